"""What people ask of a remediator's journal, and what they answer it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ingero.errors import ConfigError, IngeroError
from ingero.remediation.actuators.actuator import Actuator
from ingero.remediation.building import build_actuator, read_boot, read_moment
from ingero.remediation.carrying_out import ActionRunner
from ingero.remediation.config import RemediatorConfig
from ingero.remediation.journal import Journal
from ingero.remediation.links import build_signer
from ingero.remediation.lock import JournalLock
from ingero.remediation.records import (
    ASKED_BACK,
    HOLDING,
    WAITING,
    ActionRecord,
    ActionState,
    FindingRecord,
    Moment,
)
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S


def _open(config: RemediatorConfig, *, read_only: bool) -> Journal:
    path = Path(config.journal.file)
    if not read_only:
        Journal(path, read_only=True).close()  # an answer makes no journal
    return Journal(path, read_only=read_only, is_audited=config.audit is not None)


def _now() -> Moment:
    return read_moment(SystemClock(), read_boot())


def explain(config: RemediatorConfig, wanted: str | None, *, as_json: bool) -> str:
    """Which clause let or stopped what, of one episode or, in short, of all."""
    with _open(config, read_only=True) as journal:
        found = journal.findings()
        actions = journal.actions()
    if wanted is None:
        if as_json:
            return json.dumps({"episodes": [one.as_json() for one in found]}, indent=2)
        return "\n".join(map(_name_finding, found)) or "no finding yet"
    episodes = {one.episode for one in actions if one.action_id == wanted}
    matching = [
        one for one in found if wanted in {one.episode, one.node_id} or one.episode in episodes
    ]
    if not matching:
        known = ", ".join(one.episode for one in found[-5:]) or "none"
        raise IngeroError(f"the journal knows no episode of {wanted!r}", hint=f"the last: {known}")
    last = matching[-1]
    if as_json:
        return json.dumps(last.as_json(), indent=2)
    return "\n".join([_name_finding(last), *describe_clauses(last.clauses)])


def _name_finding(record: FindingRecord) -> str:
    state = "" if record.is_open else ", over"
    reason = record.evidence.get("reason", "")
    return (
        f"{record.episode}  {record.node_id} of {record.cluster_id}, since {_time(record.opened_wall_ns)}{state}:"
        f" {reason}\n  {_time(record.judged_wall_ns)}  {record.decision}"
    )


def describe_clauses(clauses: tuple[Any, ...]) -> list[str]:
    """A line per clause: whether it let the action through, its key and what it compared."""
    width = max(len(clause["clause"]) for clause in clauses)
    return [
        f"  {_mark(clause):7} {clause['clause']:{width}}  {clause['says']}" for clause in clauses
    ]


def _mark(clause: dict[str, Any]) -> str:
    if clause.get("assumed"):
        return "assumed"
    return "lets" if clause["met"] else "stops"


def _time(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / NS_PER_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def show_journal(config: RemediatorConfig, *, as_json: bool) -> str:
    """Every action with what became of it."""
    with _open(config, read_only=True) as journal:
        records = journal.actions()
        changes = {one.action_id: journal.changes(one.action_id) for one in records}
        tests = journal.pair_tests.read()
    links = _find_links(config, records)
    if as_json:
        rows = [
            one.as_json() | {"changes": changes[one.action_id], "links": links[one.action_id]}
            for one in records
        ]
        shown = {"actions": rows, "pair_tests": [one.as_json() for one in tests]}
        return json.dumps(shown, indent=2)
    lines = []
    for record in records:
        reason = record.evidence.get("reason", "")
        lines.append(
            f"{record.action_id}  {record.state.value:8}  {record.target} of {record.cluster_id},"
            f" episode {record.episode}: {reason}"
        )
        lines += [
            f"  {_time(one['unix_ns'])}  {one['state']:8}  {one['note']}"
            for one in changes[record.action_id]
        ]
        lines += [f"  link of {label}: {link}" for label, link in links[record.action_id].items()]
    for test in tests:
        against = f"{test.suspect} against {test.peer or 'nobody'}, episode {test.episode}"
        state = test.outcome or test.state
        lines += [
            f"{test.test_id}  {state:11}  {against}",
            f"  {_time(test.changed.wall_ns)}  {test.note}",
        ]
    return "\n".join(lines) or "nothing was done, proposed or tested yet"


def _find_links(
    config: RemediatorConfig, records: tuple[ActionRecord, ...]
) -> dict[str, dict[str, str]]:
    """Links of each action by label. Who may read the journal and not the key sees none."""
    signer = None
    with suppress(ConfigError):
        signer = build_signer(config.approval)
    return {one.action_id: dict(signer.build_links(one)) if signer else {} for one in records}


def approve(config: RemediatorConfig, action_id: str) -> ActionRecord:
    """Agree to a proposed action.

    Raises:
        IngeroError: There is no such action, or it does not wait.
    """
    return _answer(config, action_id, ActionState.APPROVED, "a person agreed")


def reject(config: RemediatorConfig, action_id: str) -> ActionRecord:
    """Refuse a proposed action.

    Raises:
        IngeroError: There is no such action, or it does not wait.
    """
    return _answer(config, action_id, ActionState.REJECTED, "a person refused")


def _answer(
    config: RemediatorConfig, action_id: str, state: ActionState, note: str
) -> ActionRecord:
    with _open(config, read_only=False) as journal:
        record = journal.get_action(action_id)
        if record.state not in WAITING:
            raise IngeroError(f"{action_id} does not wait for an answer: it is {record.state}")
        return _write(journal, record, state, note)


def _write(journal: Journal, record: ActionRecord, state: ActionState, note: str) -> ActionRecord:
    answered = replace(record, state=state, changed=_now(), note=note)
    journal.change(record, answered)
    return answered


def undo(config: RemediatorConfig, action_id: str) -> ActionRecord:
    """Ask for an action to be reversed, and reverse it if no remediator runs.

    Raises:
        IngeroError: There is no such action, there is nothing to reverse, or this policy acts in another way.
    """
    path = Path(config.journal.file)
    with _open(config, read_only=False) as journal, JournalLock(path) as lock:
        record = journal.get_action(action_id)
        if record.state not in HOLDING:
            raise IngeroError(f"there is nothing to reverse: {action_id} is {record.state}")
        if record.kind != config.action.kind:
            raise IngeroError(
                f"{action_id} was done by {record.kind}, and this policy acts through {config.action.kind}",
                hint=f"stop the remediator and undo it with a policy that has action.{record.kind}",
            )
        asked = replace(record, is_asked_back=True)
        _write(journal, asked, ActionState.UNDOING, ASKED_BACK)
        if lock.take():
            _reverse(config, journal, build_actuator(config, SystemClock()))
        return journal.get_action(action_id)


def _reverse(config: RemediatorConfig, journal: Journal, actuator: Actuator) -> None:
    runner = ActionRunner(config, actuator, journal, _now)
    runner.settle(actuator.read_nodes(), only_asked=True)


def list_held(config: RemediatorConfig) -> list[str]:
    """Nodes that are or may be out of service by an action."""
    with _open(config, read_only=True) as journal:
        records = journal.actions()
    return sorted({one.target for one in records if one.state in HOLDING})
