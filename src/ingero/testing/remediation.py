"""A Fleet and a scheduler for tests of the remediator: their answers are set by hand, also wrong and late ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Slowdown, Verdict, VerdictKind
from ingero.remediation.actuators.actuator import NO_SETTINGS, find_name
from ingero.remediation.actuators.pair_runner import PairJob, PairJobState
from ingero.remediation.findings import ClusterReading, NodeView
from ingero.remediation.pair_tests import PairTestRecord
from ingero.remediation.records import ActionRecord
from ingero.units import NS_PER_S

CLUSTER = "c"


def build_verdict(
    node: str, kind: VerdictKind = VerdictKind.CULPRIT, *, n_ops: int = 1, lost_gpu_s: float = 3600
) -> Verdict:
    """A verdict on rank 0 of a node that every default threshold lets through."""
    peers = tuple(Rank(CLUSTER, f"p{number}", number) for number in range(4))
    return Verdict(
        Rank(CLUSTER, node, 0),
        kind,
        "own time 1.50× that of its 3 peers",
        peers=peers,
        slowdown=Slowdown(1.5, 1.4, 1.6),
        evidence=9.0,
        n_ops=n_ops,
        lost_gpu_ns=int(lost_gpu_s * NS_PER_S),
    )


def build_reading(*verdicts: Verdict, n_known: int = 100) -> ClusterReading:
    """A cluster that is well apart from these verdicts."""
    judgement = Judgement(CLUSTER, verdicts, counts={"ops": sum(one.n_ops for one in verdicts)})
    return ClusterReading(
        judgement, NS_PER_S, n_known=n_known, n_active=n_known, has_quorum=True, in_panic=False
    )


class HandFleet:
    """A Fleet whose answer a test sets.

    Attributes:
        clusters: What it says; None is away.
    """

    def __init__(self, *verdicts: Verdict) -> None:
        self.clusters: dict[str, ClusterReading] | None = {CLUSTER: build_reading(*verdicts)}

    def read(self) -> dict[str, ClusterReading]:
        """What it says."""
        if self.clusters is None:
            raise RetryableError("this Fleet is away")
        return self.clusters

    def say(self, *verdicts: Verdict, in_panic: bool = False, n_known: int = 100) -> None:
        """SchedulerAnswer this from now on."""
        reading = build_reading(*verdicts, n_known=n_known)
        self.clusters = {CLUSTER: replace(reading, in_panic=in_panic)}


class SchedulerAnswer(Enum):
    """How a scheduler answers one request."""

    RIGHT = "right"
    LATE = "late"
    """Says that it timed out, and does it some time later."""
    LOST = "lost"
    """Says that it timed out, and never does it."""
    WRONG_YES = "wrong yes"
    """Says that it did it, and does not."""
    WRONG_NO = "wrong no"
    """Says that it refuses, and does it."""
    TWICE = "twice"
    """Does it now and some time later once more."""


@dataclass(slots=True)
class _Node:
    mark: str = ""
    is_down: bool = False
    n_drains: int = 0


class HandScheduler:
    """A scheduler whose nodes and answers a test sets.

    Args:
        nodes: Their names.
        read_ns: The true time.
        before: Called before and after each request, as a place to be killed at.

    Attributes:
        answer: How the next requests are answered.
        is_away: Whether it does not answer at all.
        nodes: By name.
        drained: The true times at which a node went out of service by us, with its name.
        late_ns: How late a late answer is.
        n_lies: So many polls show every node as in service.
        renamed: Its names of nodes by Fleet's, as the policy has them.
    """

    kind = "slurm"
    can_read_nodes = True
    settings = NO_SETTINGS

    def __init__(
        self,
        nodes: tuple[str, ...],
        read_ns: Callable[[], int],
        before: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.nodes = {name: _Node() for name in nodes}
        self.answer = SchedulerAnswer.RIGHT
        self.is_away = False
        self.drained: list[tuple[int, str, str]] = []
        self.late_ns = 5 * NS_PER_S
        self.n_lies = 0
        self.renamed: dict[str, str] = {}
        self.jobs: dict[str, int] | None = None
        self.requeued: list[str] = []
        self._read_ns = read_ns
        self._before = before
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def catch_up(self) -> None:
        """Do what was due by now."""
        now_ns = self._read_ns()
        due = [do for at_ns, do in self._waiting if at_ns <= now_ns]
        self._waiting = [one for one in self._waiting if one[0] > now_ns]
        for do in due:
            do()

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Every node."""
        self.catch_up()
        if self.is_away:
            raise RetryableError("this scheduler is away")
        self.n_lies, is_lie = max(0, self.n_lies - 1), self.n_lies > 0
        views = (
            (name, "" if is_lie else node.mark, node.is_down) for name, node in self.nodes.items()
        )
        return {
            name: NodeView(
                name,
                in_service=not mark and not is_down,
                state="DOWN" if is_down else "IDLE+DRAIN" if mark else "IDLE",
                mark=mark,
            )
            for name, mark, is_down in views
        }

    def find_target(self, rank: Rank, nodes: Mapping[str, NodeView]) -> str:
        """As the policy has it, the same name, or its first label's, as Slurm's actuator finds it."""
        return find_name(rank.node_id, nodes, {}, self.renamed)

    def watch(self, _targets: Iterable[str]) -> None:
        """Nothing: each look is at all nodes."""

    def apply(self, record: ActionRecord) -> None:
        """Drain it."""

        def drain() -> None:
            node = self.nodes[record.target]
            if node.mark != record.action_id:
                self.drained.append((self._read_ns(), record.target, record.action_id))
            node.mark = record.action_id

        self._ask("apply", drain)

    def rehearse(self, record: ActionRecord) -> None:
        """Refuse what the next request would be refused."""
        if self.answer is SchedulerAnswer.WRONG_NO:
            raise PermanentError(f"{record.target} is not for you")

    def reverse(self, record: ActionRecord) -> None:
        """Give it back."""

        def resume() -> None:
            self.nodes[record.target].mark = ""

        self._ask("reverse", resume)

    def _ask(self, what: str, do: Callable[[], None]) -> None:
        self._before(f"before {what}")
        if self.is_away or self.answer is SchedulerAnswer.LOST:
            raise RetryableError("timed out")
        late_ns = self._read_ns() + self.late_ns
        if self.answer in {SchedulerAnswer.LATE, SchedulerAnswer.TWICE}:
            self._waiting.append((late_ns, do))
        if self.answer is SchedulerAnswer.LATE:
            raise RetryableError("timed out")
        if self.answer is not SchedulerAnswer.WRONG_YES:
            do()
        self._before(f"after {what}")
        if self.answer is SchedulerAnswer.WRONG_NO:
            raise PermanentError("refused")

    def find_jobs(self, _record: ActionRecord) -> Mapping[str, int] | None:
        """Jobs that a test set."""
        return None if self.jobs is None else dict(self.jobs)

    def requeue(self, job: str) -> None:
        """Count one more restart."""
        assert self.jobs is not None
        self._before("before requeue")
        self.jobs[job] += 1
        self.requeued.append(job)
        self._before("after requeue")


@dataclass(slots=True)
class _PairJobOfHand:
    """A job of a pair test.

    Attributes:
        test_id: Of the test.
        job: Its id.
        ends_ns: The true time at which it ends by itself.
        description: What it prints then.
        is_cancelled: Whether it was ended before.
    """

    test_id: str
    job: str
    ends_ns: int
    description: str
    is_cancelled: bool = False


class HandPairScheduler(HandScheduler):
    """One that runs pair tests too: a slow node takes twice as long.

    Args:
        nodes: Their names.
        read_ns: The true time.
        before: Called before and after each request, as a place to be killed at.

    Attributes:
        slow: Nodes that a test finds slow.
        is_busy: Whether no job starts.
        tests: Jobs of tests, also those that ended.
        submitted: Test ids for which a job was asked, each time.
    """

    def __init__(
        self,
        nodes: tuple[str, ...],
        read_ns: Callable[[], int],
        before: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(nodes, read_ns, before)
        self.slow: set[str] = set()
        self.is_busy = False
        self.tests: list[_PairJobOfHand] = []
        self.submitted: list[str] = []

    def find_peer(self, suspect: str, avoid: Collection[str]) -> tuple[str, str]:
        """The first that is not to be avoided."""
        views = self.read_nodes()
        fitting = [
            name
            for name, view in views.items()
            if view.in_service and name not in {suspect, *avoid}
        ]
        return (fitting[0], "all") if fitting else ("", "")

    def submit_test(self, record: PairTestRecord) -> str:
        """Have it run for four seconds."""
        self.submitted.append(record.test_id)
        job = str(len(self.submitted))
        seconds = {
            node: 0.2 if node in self.slow else 0.1 for node in (record.suspect, record.peer)
        }
        description = "".join(
            json.dumps({"node": node, "rounds_s": [time * (1 + n / 100) for n in range(7)]})
            for node, time in seconds.items()
        )

        def run() -> None:
            ends_ns = self._read_ns() + 4 * NS_PER_S
            self.tests.append(_PairJobOfHand(record.test_id, job, ends_ns, description))

        self._ask("submit_test", run)
        return job

    def read_test(self, record: PairTestRecord) -> PairJob:
        """The first job of its name."""
        self.catch_up()
        if self.is_away:
            raise RetryableError("this scheduler is away")
        for one in self.tests:
            if one.test_id == record.test_id:
                return PairJob(*self._describe(one))
        return PairJob(PairJobState.UNKNOWN)

    def _describe(self, job: _PairJobOfHand) -> tuple[PairJobState, str, str]:
        if job.is_cancelled:
            return PairJobState.FAILED, job.job, "CANCELLED"
        if self.is_busy:
            return PairJobState.WAITING, job.job, "Resources"
        is_over = self._read_ns() >= job.ends_ns
        state = PairJobState.FINISHED if is_over else PairJobState.RUNNING
        return state, job.job, job.description if is_over else ""

    def cancel_test(self, record: PairTestRecord) -> None:
        """End all of its name."""

        def cancel() -> None:
            for one in self.tests:
                if one.test_id == record.test_id:
                    one.is_cancelled = True

        try:
            self._ask("cancel_test", cancel)
        except PermanentError as error:
            raise RetryableError(error.message) from error

    @property
    def alive(self) -> list[str]:
        """Tests that have a job which waits or runs."""
        over = {PairJobState.FAILED, PairJobState.FINISHED}
        return [one.test_id for one in self.tests if self._describe(one)[0] not in over]
