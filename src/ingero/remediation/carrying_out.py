"""Carries actions out and finds out what became of them.

Each step from one state to the next stands in the journal before the scheduler is asked, and its outcome after.
A person may answer in the journal at any time: what was read before is then not written, and the next poll goes on.
So may a stop file come: with a slow scheduler a poll lasts long, and the file is looked for before each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ingero.errors import PermanentError, RetryableError
from ingero.remediation.actuators.actuator import SETTINGS, Actuator
from ingero.remediation.config import BrakesConfig, RemediatorConfig
from ingero.remediation.findings import NodeView
from ingero.remediation.journal import Journal
from ingero.remediation.records import ENDED, ActionRecord, ActionState, Moment

Nodes = Mapping[str, NodeView]
_MISSED: Final = "the scheduler does not show it"
_NOT_ANY_MORE: Final = "outcome unknown, and the policy would not begin it any more"
_NOT_BACK: Final = "refused to give it back"


class ActionRunner:
    """What one poll has to do.

    Args:
        config: The policy.
        actuator: The scheduler.
        journal: Written before and after.
        read_now: The time.

    Attributes:
        changed: Actions whose state changed, as they are now.
    """

    def __init__(
        self,
        config: RemediatorConfig,
        actuator: Actuator,
        journal: Journal,
        read_now: Callable[[], Moment],
    ) -> None:
        self.changed: list[ActionRecord] = []
        self._brakes = config.brakes
        self._actuator = actuator
        self._journal = journal
        self._read_now = read_now

    def propose(self, record: ActionRecord) -> None:
        """Ask a person."""
        self._journal.add(record)
        self.changed.append(record)

    def end(self, record: ActionRecord, state: ActionState, note: str) -> None:
        """Write that nothing more is done."""
        with suppress(RetryableError):
            self._change(record, state, note)

    def begin(self, record: ActionRecord, *, is_new: bool) -> None:
        """Take the node out of service: written first, then asked, then looked at.

        Raises:
            RetryableError: A person answered meanwhile, or a stop file came; nothing was done.
        """
        _heed_stop_file(self._brakes, record)
        now = self._read_now()
        settings, evidence = dict(self._actuator.settings), record.evidence
        if settings:
            evidence = {**evidence, SETTINGS: settings}
        begun = replace(
            record,
            state=ActionState.BEGUN,
            began=now,
            changed=now,
            evidence=evidence,
            note="to be asked",
        )
        if is_new:
            self._journal.add(begun)
        else:
            self._journal.change(record, begun)
        self.changed.append(begun)
        with suppress(RetryableError):
            self._ask(begun)

    def _ask(self, begun: ActionRecord) -> None:
        try:
            self._actuator.apply(begun)
        except PermanentError as error:
            # Who can be looked at may have done it all the same.
            state = ActionState.UNDOING if self._actuator.can_read_nodes else ActionState.VOID
            self._change(begun, state, f"refused: {error.message}")
            return
        except RetryableError as error:
            self._change(begun, ActionState.BEGUN, f"outcome unknown: {error.message}")
            return
        if not self._actuator.can_read_nodes:
            self._finish(begun)
            return
        self._read_again(begun)

    def _read_again(self, record: ActionRecord) -> None:
        try:
            nodes = self._actuator.read_nodes()
        except RetryableError:
            return  # the next poll tells
        self._settle_one(record, nodes.get(record.target))

    def undo(self, record: ActionRecord, nodes: Nodes | None, note: str) -> None:
        """Give a node back."""
        with suppress(RetryableError):
            _heed_stop_file(self._brakes, record)
            undoing = self._change(record, ActionState.UNDOING, note)
            if not self._actuator.can_read_nodes:
                self._ask_unseen(undoing)
            elif nodes is not None:
                self._settle_one(undoing, nodes.get(record.target))

    def settle(self, nodes: Nodes, *, only_asked: bool) -> None:
        """Compare every action with what the scheduler shows, and go on with what is not over.

        Args:
            nodes: What it shows.
            only_asked: Do no more than reverse what a person asked to have reversed.
        """
        for record in _list_own(self._journal, self._actuator):
            view = nodes.get(record.target)
            if only_asked and not record.is_asked_back:
                continue
            with suppress(RetryableError):
                if record.state in ENDED and view is not None and view.mark == record.action_id:
                    self._take_up(record)
                else:
                    self._settle_one(record, view)

    def _take_up(self, record: ActionRecord) -> None:
        """The scheduler shows an action that was over: it answered late, or wrongly before."""
        is_left = record.state is ActionState.LEFT
        state = ActionState.DONE if is_left else ActionState.UNDOING
        self._change(record, state, "the scheduler shows it after all", took_effect=True)

    def _settle_one(self, record: ActionRecord, view: NodeView | None) -> None:
        if not self._actuator.can_read_nodes:
            self._settle_unseen(record)
        elif record.state is ActionState.BEGUN:
            self._settle_begun(record, view)
        elif record.state is ActionState.DONE:
            self._settle_done(record, view)
        elif record.state is ActionState.UNDOING:
            self._settle_undoing(record, view)

    def repeat(self, still_lets: Callable[[ActionRecord], bool]) -> None:
        """Without looking: ask again for what was begun and has an unknown outcome, or reverse it.

        Args:
            still_lets: Whether the policy would begin an action now; with other settings of the actuator it would not.
        """
        if self._actuator.can_read_nodes:
            return
        for record in _list_own(self._journal, self._actuator):
            if record.state is not ActionState.BEGUN or not self._is_old(record):
                continue
            settings = self._actuator.settings
            is_same = record.evidence.get(SETTINGS, settings) == settings
            if is_same and still_lets(record):
                with suppress(RetryableError):
                    self._ask_unseen(record)
            else:
                self.undo(record, None, _NOT_ANY_MORE)

    def _settle_unseen(self, record: ActionRecord) -> None:
        """Without looking: ask again for what is to be reversed. What was begun is up to `repeat`."""
        is_refused = record.note.startswith(_NOT_BACK)
        is_due = self._is_old(record) or (record.is_asked_back and not is_refused)
        if record.state is ActionState.UNDOING and is_due:
            self._ask_unseen(record)

    def _ask_unseen(self, record: ActionRecord) -> None:
        """Ask, perhaps once more, which changes nothing more when it was done."""
        _heed_stop_file(self._brakes, record)
        is_begun = record.state is ActionState.BEGUN
        try:
            if is_begun:
                self._actuator.apply(record)
                self._finish(record)
            else:
                self._actuator.reverse(record)
                self._change(record, ActionState.UNDONE, "reversed")
        except RetryableError as error:
            note = f"outcome unknown: {error.message}"
            if not record.is_asked_back or record.note != note:  # it is asked at every poll
                self._change(record, record.state, note)
        except PermanentError as error:
            if record.took_effect:  # it is out by us until it is given back
                self._change(record, ActionState.UNDOING, f"{_NOT_BACK}: {error.message}")
                return
            state = ActionState.VOID if is_begun else ActionState.LEFT
            self._change(record, state, f"refused: {error.message}")

    def _settle_begun(self, record: ActionRecord, view: NodeView | None) -> None:
        if view is not None and view.mark == record.action_id:
            if not record.took_effect:
                record = self._change(record, ActionState.BEGUN, "in effect", took_effect=True)
            self._finish(record)
        elif self._is_old(record):
            note = "took no effect" if view is not None else "the scheduler has no such node"
            self._change(record, ActionState.UNDOING, note)

    def _finish(self, record: ActionRecord) -> None:
        """Requeue its jobs where the policy says so; then it is done."""
        try:
            if record.jobs is None:
                jobs = self._actuator.find_jobs(record)
                if jobs is not None:
                    note = f"to requeue: {', '.join(jobs) or 'nothing'}"
                    record = self._change(
                        record, ActionState.BEGUN, note, jobs=jobs, took_effect=True
                    )
            note = self._requeue(record) if record.jobs else "in effect"
        except RetryableError as error:
            note = f"jobs not requeued yet: {error.message}"
            if record.note != note:
                self._change(record, ActionState.BEGUN, note)
            return
        self._change(record, ActionState.DONE, note, took_effect=True)

    def _requeue(self, record: ActionRecord) -> str:
        assert record.jobs is not None
        running = self._actuator.find_jobs(record) or {}
        done, refused = [], []
        for job, restarts in record.jobs.items():
            if running.get(job) != restarts:
                done.append(job)  # requeued already, or it has ended
                continue
            _heed_stop_file(self._brakes, record)
            try:
                self._actuator.requeue(job)
                done.append(job)
            except PermanentError as error:
                refused.append(f"{job} ({error.message})")
        return f"requeued {', '.join(done) or 'nothing'}" + (
            f"; refused: {', '.join(refused)}" if refused else ""
        )

    def _settle_done(self, record: ActionRecord, view: NodeView | None) -> None:
        if view is not None and view.mark == record.action_id:
            if record.note == _MISSED:
                self._change(record, ActionState.DONE, "in effect")
        elif record.note != _MISSED:
            self._change(record, ActionState.DONE, _MISSED)
        elif self._is_old(record):
            shown = "no such node" if view is None else view.state
            note = f"somebody else changed the node: {shown}"
            self._change(record, ActionState.LEFT, note)

    def _settle_undoing(self, record: ActionRecord, view: NodeView | None) -> None:
        if view is None or view.mark != record.action_id:
            if not self._is_old(record):
                return  # a late scheduler may still show it
            is_theirs = view is not None and not view.in_service
            if not record.took_effect:
                self._change(record, ActionState.VOID, "it never took effect")
            elif is_theirs:
                self._change(record, ActionState.LEFT, "somebody else has taken the node out")
            else:
                self._change(record, ActionState.UNDONE, "the node is back")
            return
        if not record.took_effect:
            record = self._change(
                record, ActionState.UNDOING, "in effect after all", took_effect=True
            )
        try:
            _heed_stop_file(self._brakes, record)
            self._actuator.reverse(record)
            nodes = self._actuator.read_nodes()
        except RetryableError:
            return  # again at the next poll
        except PermanentError as error:
            note = f"{_NOT_BACK}: {error.message}"
            if record.note != note:  # it is asked at every poll
                self._change(record, ActionState.UNDOING, note)
            return
        after = nodes.get(record.target)
        if after is not None and after.mark != record.action_id and after.in_service:
            self._change(record, ActionState.UNDONE, "the node is back")

    def _is_old(self, record: ActionRecord) -> bool:
        return self._read_now().since(record.changed) >= self._brakes.settle_time

    def _change(
        self,
        record: ActionRecord,
        state: ActionState,
        note: str,
        *,
        took_effect: bool = False,
        jobs: Mapping[str, int] | None = None,
    ) -> ActionRecord:
        changed = replace(
            record,
            state=state,
            changed=self._read_now(),
            note=note,
            took_effect=record.took_effect or took_effect,
            jobs=record.jobs if jobs is None else jobs,
        )
        self._journal.change(record, changed)
        self.changed.append(changed)
        return changed


def _list_own(journal: Journal, actuator: Actuator) -> list[ActionRecord]:
    """Actions that were asked of this actuator: of others it can neither see nor reverse anything."""
    return [one for one in journal.actions() if one.kind == actuator.kind]


def _heed_stop_file(brakes: BrakesConfig, record: ActionRecord) -> None:
    """Go no further than to what a person asked to have reversed.

    Raises:
        RetryableError: A stop file is there, and nobody asked for this.
    """
    stop_file = "" if record.is_asked_back else brakes.find_stop_file()
    if stop_file:
        raise RetryableError(f"the stop file {stop_file} is there")
