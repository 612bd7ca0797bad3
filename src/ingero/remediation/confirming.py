"""Pair tests, a poll at a time: begun for what nothing else stops, followed, ended, and cleared away.

A test stands in the journal before the scheduler is asked to run it, and its job is named after it: a remediator that
was killed is followed by one that goes on with it. At most one runs at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final

from ingero.errors import PermanentError, RetryableError
from ingero.remediation.actuators.pair_runner import PairJob, PairJobState, PairRunner
from ingero.remediation.config import RemediatorConfig
from ingero.remediation.confirm_config import PairTestConfig
from ingero.remediation.pair_table import PairTestTable
from ingero.remediation.pair_tests import (
    ALIVE,
    PairOutcome,
    PairTestRecord,
    PairTestState,
    is_overdue,
    judge_confirmation,
    judge_times,
)
from ingero.remediation.policy import PAIR_TEST_CLAUSE, Ruling, Situation
from ingero.remediation.records import HOLDING, Moment
from ingero.units import format_duration

Tests = tuple[PairTestRecord, ...]
_NO_PEER: Final = "no other node in service is like it"


class PairTester:
    """The pair tests of a remediator.

    Args:
        config: The policy.
        runner: The scheduler; tests are left alone by one that is no `PairRunner`.
        table: Written before and after.
        read_now: The time.

    Attributes:
        changed: Tests whose state changed in this poll, as they are now.
    """

    def __init__(
        self,
        config: RemediatorConfig,
        runner: object,
        table: PairTestTable,
        read_now: Callable[[], Moment],
    ) -> None:
        self.changed: list[PairTestRecord] = []
        self._config = config
        self._runner = runner if isinstance(runner, PairRunner) else None
        self._table = table
        self._read_now = read_now

    @property
    def _wanted(self) -> PairTestConfig | None:
        confirm = self._config.confirm
        return confirm.pair_test if confirm and self._runner else None

    def follow(self, open_episodes: Container[str], *, is_stopped: bool) -> Tests:
        """Go on with every test that is not over; all tests as they are then, oldest first.

        Args:
            open_episodes: A test of another one is cancelled.
            is_stopped: All are cancelled.
        """
        self.changed = []
        wanted = self._wanted
        if wanted is None:
            return self._table.read()
        for record in self._table.read():
            why_over = ""
            if is_stopped or self._config.mode == "dry-run":
                why_over = "nothing may be acted on"
            elif record.episode not in open_episodes:
                why_over = "the finding is over"
            with suppress(RetryableError):  # the next poll goes on
                if record.state is PairTestState.ENDED:
                    self._close(record)
                elif record.state in ALIVE:
                    self._follow_one(record, wanted, why_over)
        return self._table.read()

    def _follow_one(self, record: PairTestRecord, wanted: PairTestConfig, why_over: str) -> None:
        if why_over:
            self._cancel(record, f"cancelled: {why_over}", PairOutcome.CANCELLED)
            return
        if is_overdue(wanted, record, self._read_now()):
            self._cancel(record, "it did not end in time")
            return
        assert self._runner is not None
        job = self._runner.read_test(record)
        if job.state is PairJobState.UNKNOWN:
            if self._is_old(record):
                self._end(record, "the scheduler has no job of it")
            return
        if record.state is PairTestState.BEGUN:
            record = self._submitted(record, job.job)
        self._go_on(record, wanted, job)

    def _go_on(self, record: PairTestRecord, wanted: PairTestConfig, job: PairJob) -> None:
        if job.state is PairJobState.FINISHED:
            outcome, description, times = judge_times(record, job.detail, wanted.min_ratio)
            self._put(
                replace(
                    record,
                    state=PairTestState.ENDED,
                    outcome=outcome,
                    note=description,
                    times=times,
                )
            )
        elif job.state is PairJobState.FAILED:
            self._end(record, f"job {job.job} failed: {job.detail}")
        elif job.state is PairJobState.WAITING:
            waited_ns = self._read_now().since(record.began)
            if waited_ns >= wanted.max_wait:
                description = (
                    f"the nodes were not free for {format_duration(waited_ns)}: {job.detail}"
                )
                self._cancel(record, description)

    def begin(self, rulings: Sequence[Ruling], situation: Situation) -> None:
        """Begin a test of the first finding that nothing else stops, if none runs."""
        wanted, tests = self._wanted, situation.tests
        if wanted is None or any(one.state in ALIVE for one in tests):
            return
        for ruling in rulings:
            if [clause.clause for clause in ruling.stops] != [PAIR_TEST_CLAUSE]:
                continue
            episode = ruling.finding.episode
            if judge_confirmation(wanted, episode, tests, situation.now).wants_test:
                with suppress(RetryableError):
                    self._begin(ruling, rulings, situation)
                return

    def _begin(self, ruling: Ruling, rulings: Sequence[Ruling], situation: Situation) -> None:
        assert self._runner is not None
        protects = self._config.brakes.protects
        avoid = {
            *(one.target for one in rulings),
            *(one.target for one in situation.records if one.state in HOLDING),
            *(name for name in situation.nodes or {} if protects(name)),
        }
        used = {one.peer for one in situation.tests if one.episode == ruling.finding.episode}
        peer, partition = self._runner.find_peer(ruling.target, avoid | used)
        if not peer:
            peer, partition = self._runner.find_peer(ruling.target, avoid)
        finding, now = ruling.finding, self._read_now()
        record = PairTestRecord(
            test_id=_name_test(finding.episode, len(situation.tests)),
            episode=finding.episode,
            cluster_id=finding.cluster_id,
            suspect=ruling.target,
            peer=peer,
            partition=partition,
            state=PairTestState.BEGUN,
            began=now,
            changed=now,
            note="to be asked for",
        )
        if not peer:
            self._end(record, _NO_PEER)
            return
        self._put(record)
        try:
            job = self._runner.submit_test(record)
        except PermanentError as error:
            self._end(record, f"refused: {error.message}")
        except RetryableError as error:
            self._put(replace(record, note=f"outcome unknown: {error.message}"))
        else:
            self._submitted(record, job)

    def _submitted(self, record: PairTestRecord, job: str) -> PairTestRecord:
        return self._put(replace(record, state=PairTestState.SUBMITTED, job=job, note=f"job {job}"))

    def _cancel(
        self, record: PairTestRecord, why: str, outcome: PairOutcome = PairOutcome.CANNOT_TELL
    ) -> None:
        assert self._runner is not None
        self._runner.cancel_test(record)
        self._end(record, why, outcome)

    def _end(
        self, record: PairTestRecord, why: str, outcome: PairOutcome = PairOutcome.CANNOT_TELL
    ) -> None:
        self._put(replace(record, state=PairTestState.ENDED, outcome=outcome, note=why))

    def _close(self, record: PairTestRecord) -> None:
        """A scheduler that answers late may have begun a job after all."""
        assert self._runner is not None
        if self._is_old(record):
            self._runner.cancel_test(record)
            self._table.put(replace(record, state=PairTestState.CLOSED))

    def _put(self, record: PairTestRecord) -> PairTestRecord:
        written = replace(record, changed=self._read_now())
        self._table.put(written)
        self.changed.append(written)
        return written

    def _is_old(self, record: PairTestRecord) -> bool:
        return self._read_now().since(record.changed) >= self._config.brakes.settle_time


def _name_test(episode: str, count: int) -> str:
    return "p" + hashlib.sha256(f"{episode}\0{count}".encode()).hexdigest()[:10]
