"""One poll after another: read, finish what was begun, rule, act. What is done stands in the journal first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from ingero.errors import PermanentError, RetryableError, UnsupportedError
from ingero.model.collectives import Worker
from ingero.remediation.actuators.actuator import Actuator
from ingero.remediation.carrying_out import ActionRunner
from ingero.remediation.config import RemediatorConfig
from ingero.remediation.confirming import PairTester
from ingero.remediation.episodes import CulpritTracker, name_action
from ingero.remediation.findings import ClusterReading, CulpritFinding, NodeView, SiteReading
from ingero.remediation.journal import Journal
from ingero.remediation.orders import NodeOrders, build_orders
from ingero.remediation.pair_tests import PairOutcome, PairTestRecord
from ingero.remediation.policy import Ruling, Situation, rule_all, still_lets
from ingero.remediation.records import (
    WAITING,
    ActionRecord,
    ActionState,
    FindingRecord,
    Moment,
)
from ingero.units import NS_PER_S

_NOTE_NS: Final = 60 * NS_PER_S
"""Between two notes of when findings were there last."""


class FindingSource(Protocol):
    """Where findings come from."""

    def read(self) -> dict[str, ClusterReading]:
        """What Fleet says now, by cluster.

        Raises:
            RetryableError: It does not answer.
        """
        ...


@dataclass(slots=True)
class RemediatorCounts:
    """What a remediator has done since its start.

    Attributes:
        n_polls: Polls of Fleet and the scheduler.
        n_fleet_away: Looks at which Fleet did not answer.
        n_scheduler_away: Looks at which the scheduler did not answer.
        n_clock_jumps: Jumps of the wall clock.
        n_by_state: Changes of actions into each state.
        n_tests: Pair tests that ended, by outcome.
    """

    n_polls: int = 0
    n_fleet_away: int = 0
    n_scheduler_away: int = 0
    n_clock_jumps: int = 0
    n_by_state: dict[ActionState, int] = field(default_factory=dict)
    n_tests: dict[PairOutcome, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PollResult:
    """What came of one poll.

    Attributes:
        reading: What was read.
        rulings: What the policy says of each finding.
        changed: Actions whose state changed, as they are now.
        refusals: By episode, why the scheduler would refuse what the policy lets through; of a single poll, where the
            scheduler can be asked.
        tests: Pair tests whose state changed, as they are now.
        stop_file: The stop file that is there; empty for none.
    """

    reading: SiteReading
    rulings: tuple[Ruling, ...]
    changed: tuple[ActionRecord, ...]
    refusals: Mapping[str, str] = field(default_factory=dict)
    tests: tuple[PairTestRecord, ...] = ()
    stop_file: str = ""


class _Steadiness:
    """Since when all answer, per cluster, and when the clock jumped."""

    def __init__(self, tolerance_ns: int) -> None:
        self._tolerance_ns = tolerance_ns
        self._last: Moment | None = None
        self._n_ops: dict[str, int] = {}
        self.settled_ns: dict[str, int] = {}
        self.jumped_ns: int | None = None

    def note_clock(self, now: Moment) -> bool:
        """Take a time; whether the wall clock has jumped since the last."""
        last, self._last = self._last, now
        if last is None:
            return False
        step_ns = (now.wall_ns - last.wall_ns) - (now.mono_ns - last.mono_ns)
        if abs(step_ns) <= self._tolerance_ns:
            return False
        self.jumped_ns = now.mono_ns
        return True

    def note_answers(self, reading: SiteReading, now: Moment) -> bool:
        """Take a poll; whether Fleet has started over since the last."""
        clusters = reading.clusters
        if clusters is None or (reading.can_read_nodes and reading.nodes is None):
            self.settled_ns.clear()
            return clusters is None
        n_ops = {name: one.judgement.counts.get("ops", 0) for name, one in clusters.items()}
        is_other = any(count < self._n_ops.get(name, 0) for name, count in n_ops.items())
        self._n_ops = n_ops
        if is_other:
            self.settled_ns.clear()
        calm = {name for name, one in clusters.items() if not one.in_panic}
        self.settled_ns = {name: self.settled_ns.get(name, now.mono_ns) for name in calm}
        return is_other


@dataclass(slots=True)
class _Written:
    """What the journal has of findings.

    Attributes:
        records: The open ones, as they were written last.
        noted_ns: When it was noted last that they were there.
    """

    records: dict[str, FindingRecord]
    noted_ns: int = 0


class Remediator:
    """The program's core, without threads or waiting.

    Args:
        config: The policy.
        source: Fleet.
        actuator: The scheduler.
        journal: Whose lock the caller holds.
        read_now: The time.
        is_single_poll: Persistence cannot be known; only for dry-run.

    Attributes:
        counts: What it has done.
        orders: Answers to nodes that ask; read by other threads. None before the first poll.
    """

    def __init__(
        self,
        config: RemediatorConfig,
        source: FindingSource,
        actuator: Actuator,
        journal: Journal,
        read_now: Callable[[], Moment],
        *,
        is_single_poll: bool = False,
    ) -> None:
        self.counts = RemediatorCounts()
        self.orders: NodeOrders | None = None
        self._config = config
        self._source = source
        self._actuator = actuator
        self._journal = journal
        self._read_now = read_now
        self._is_single_poll = is_single_poll
        self._tester = PairTester(config, actuator, journal.pair_tests, read_now)
        self._steadiness = _Steadiness(config.brakes.clock_tolerance)
        self._tracker = CulpritTracker(config.findings.max_age)
        self._tracker.restore(journal.findings(), read_now())
        self._written = _Written({one.episode: one for one in journal.findings() if one.is_open})

    def poll(self) -> PollResult:
        """Look once and do what the policy says.

        Raises:
            StoreError: The journal cannot be written; nothing was done that is not in it.
        """
        now = self._read_now()
        self.counts.n_polls += 1
        self.counts.n_clock_jumps += self._steadiness.note_clock(now)
        reading = self._read()
        if self._steadiness.note_answers(reading, now):
            self._tracker.break_off()
        findings = self._tracker.update(reading.clusters or {}, now)
        runner = ActionRunner(self._config, self._actuator, self._journal, self._read_now)
        stop_file = self._config.brakes.find_stop_file()
        is_stopped = bool(stop_file)
        is_acting = self._config.mode != "dry-run"
        if reading.nodes is not None and not self._is_single_poll:
            runner.settle(reading.nodes, only_asked=is_stopped or not is_acting)
        targets = self._find_targets(findings, reading)
        self._actuator.watch(targets.values())
        tests = self._journal.pair_tests.read()
        if not self._is_single_poll:
            tests = self._tester.follow(self._tracker.open_episodes, is_stopped=is_stopped)
        situation = Situation(
            now=now,
            clusters=None if reading.clusters is None else dict(reading.clusters),
            nodes=None if reading.nodes is None else dict(reading.nodes),
            can_read_nodes=reading.can_read_nodes,
            targets=targets,
            records=self._journal.actions(),
            settled_ns=dict(self._steadiness.settled_ns),
            jumped_ns=self._steadiness.jumped_ns,
            stop_file=stop_file,
            is_single_poll=self._is_single_poll,
            tests=tests,
        )
        rulings = rule_all(self._config, findings, situation)
        self._write_findings(rulings, now)
        if is_acting:
            if not is_stopped:
                by_episode = {one.episode: one for one in findings}
                runner.repeat(lambda one: still_lets(self._config, one, by_episode, situation))
            self._retract(runner, situation)
            self._answer(runner, rulings, situation)
            if not self._config.brakes.find_stop_file():
                self._tester.begin(rulings, situation)
        self.orders = build_orders(self._config, rulings, situation, self._journal.actions())
        for record in runner.changed:
            states = self.counts.n_by_state
            states[record.state] = states.get(record.state, 0) + 1
        refusals = self._rehearse(rulings, situation) if self._is_single_poll else {}
        tested = tuple(self._tester.changed)
        for outcome in filter(None, (one.outcome for one in tested)):
            self.counts.n_tests[outcome] = self.counts.n_tests.get(outcome, 0) + 1
        return PollResult(reading, rulings, tuple(runner.changed), refusals, tested, stop_file)

    def _rehearse(self, rulings: tuple[Ruling, ...], situation: Situation) -> dict[str, str]:
        refusals = {}
        for ruling in rulings:
            if not ruling.is_allowed:
                continue
            try:
                self._actuator.rehearse(self._plan(ruling, situation))
            except (RetryableError, PermanentError) as error:
                refusals[ruling.finding.episode] = error.message
        return refusals

    def _read(self) -> SiteReading:
        problems: list[str] = []
        clusters: Mapping[str, ClusterReading] | None = None
        nodes: Mapping[str, NodeView] | None = None
        try:
            clusters = self._source.read()
        except RetryableError as error:
            self.counts.n_fleet_away += 1
            problems.append(error.message)
        can_read_nodes = self._actuator.can_read_nodes
        try:
            nodes = self._actuator.read_nodes()
        except (RetryableError, PermanentError, UnsupportedError) as error:
            self.counts.n_scheduler_away += 1
            problems.append(error.message)
        return SiteReading(clusters, nodes, can_read_nodes, tuple(problems))

    def _find_targets(
        self, findings: Sequence[CulpritFinding], reading: SiteReading
    ) -> dict[tuple[str, str], str]:
        """What is to be taken out of service for each finding, unless it also is what another node of Fleet's is."""
        if not findings:
            return {}
        nodes, clusters = reading.nodes or {}, reading.clusters or {}
        reached_by: dict[str, set[tuple[str, str]]] = {}
        for cluster_id, one in clusters.items():
            for rank in (verdict.rank for verdict in one.judgement.verdicts):
                target = self._actuator.find_target(rank, nodes)
                reached_by.setdefault(target, set()).add((cluster_id, rank.node_id))
        targets = {}
        for finding in findings:
            node = (finding.cluster_id, finding.node_id)
            target = self._actuator.find_target(finding.verdict.rank, nodes)
            if target and reached_by.get(target, set()) <= {node}:
                targets[node] = target
        return targets

    def _write_findings(self, rulings: tuple[Ruling, ...], now: Moment) -> None:
        opened = self._tracker.open_episodes
        for ruling in rulings:
            finding = ruling.finding
            record = FindingRecord(
                finding.episode,
                finding.cluster_id,
                finding.node_id,
                opened[finding.episode],
                now.wall_ns,
                is_open=True,
                evidence=finding.as_json(),
                clauses=tuple(clause.as_json() for clause in ruling.clauses),
                decision=describe_ruling(ruling, self._config.mode),
            )
            before = self._written.records.get(finding.episode)
            if before is None or _is_other(before, record):
                self._journal.put_finding(record)
                self._written.records[finding.episode] = record
        self._note_judged([one.finding.episode for one in rulings], now)
        for episode in [one for one in self._written.records if one not in opened]:
            self._journal.put_finding(replace(self._written.records.pop(episode), is_open=False))

    def _note_judged(self, episodes: Sequence[str], now: Moment) -> None:
        """The next process has to know how long ago the findings were there."""
        if now.mono_ns - self._written.noted_ns >= _NOTE_NS:
            self._written.noted_ns = now.mono_ns
            if episodes:
                self._journal.note_judged(episodes, now.wall_ns)

    def _retract(self, runner: ActionRunner, situation: Situation) -> None:
        undo = self._config.undo
        if not undo.when_retracted or situation.is_stopped:
            return
        for record in situation.records:
            if record.state is not ActionState.DONE or record.kind != self._actuator.kind:
                continue
            workers = self._find_workers(record, situation)
            retracted_ns = self._tracker.retracted_for(record.cluster_id, workers)
            if retracted_ns is not None and retracted_ns >= undo.retracted_for:
                runner.undo(record, situation.nodes, "Fleet finds its ranks ordinary again")

    def _find_workers(self, record: ActionRecord, situation: Situation) -> list[Worker]:
        """Ranks that Fleet has judged on what an action took out: a node, or one of its devices."""
        reading = (situation.clusters or {}).get(record.cluster_id)
        ranks = [one.rank for one in reading.judgement.verdicts] if reading else []
        return [
            rank.worker
            for rank in ranks
            if rank.node_id == record.node_id
            and self._actuator.find_target(rank, situation.nodes or {}) == record.target
        ]

    def _answer(
        self, runner: ActionRunner, rulings: tuple[Ruling, ...], situation: Situation
    ) -> None:
        """Act on what is allowed, or propose it and act on what was approved."""
        waiting = {one.episode: one for one in situation.records if one.state in WAITING}
        for ruling in rulings:
            proposed = waiting.pop(ruling.finding.episode, None)
            if proposed is not None and self._expire(runner, proposed, situation.now):
                continue
            asked_of = (self._actuator.kind, ruling.target)
            is_other = proposed is not None and (proposed.kind, proposed.target) != asked_of
            if not ruling.is_allowed or is_other:  # only what a person agreed to is done
                continue
            record = proposed or self._plan(ruling, situation)
            is_approved = record.state is ActionState.APPROVED
            if self._config.mode == "auto" or is_approved:
                with suppress(RetryableError):  # a person answered meanwhile: the next poll tells
                    runner.begin(_with_ruling(record, ruling), is_new=proposed is None)
            elif proposed is None:
                runner.propose(record)
        for record in waiting.values():
            self._expire(runner, record, situation.now, is_over=True)

    def _expire(
        self, runner: ActionRunner, record: ActionRecord, now: Moment, *, is_over: bool = False
    ) -> bool:
        is_late = now.since(record.changed) >= self._config.approval.expires
        if is_late or (is_over and record.episode not in self._tracker.open_episodes):
            runner.end(record, ActionState.EXPIRED, "too late" if is_late else "it is over")
            return True
        return False

    def _plan(self, ruling: Ruling, situation: Situation) -> ActionRecord:
        finding, now = ruling.finding, situation.now
        count = sum(one.episode == finding.episode for one in situation.records)
        return ActionRecord(
            action_id=name_action(finding.episode, finding.node_id, count),
            episode=finding.episode,
            cluster_id=finding.cluster_id,
            node_id=finding.node_id,
            target=ruling.target,
            kind=self._actuator.kind,
            state=ActionState.PROPOSED,
            began=now,
            changed=now,
            evidence=finding.as_json(),
            clauses=tuple(clause.as_json() for clause in ruling.clauses),
        )


def _with_ruling(record: ActionRecord, ruling: Ruling) -> ActionRecord:
    return replace(
        record,
        target=ruling.target,
        evidence=ruling.finding.as_json(),
        clauses=tuple(clause.as_json() for clause in ruling.clauses),
    )


def _is_other(before: FindingRecord, after: FindingRecord) -> bool:
    """Whether what a clause said has turned; numbers alone are written with the next that turns."""
    met = [
        [(clause["met"], clause.get("outcome")) for clause in record.clauses]
        for record in (before, after)
    ]
    return met[0] != met[1] or before.decision != after.decision


def describe_ruling(ruling: Ruling, mode: str) -> str:
    """What a policy does about a finding, on one line."""
    finding = ruling.finding
    target = ruling.target or finding.node_id
    if not ruling.is_allowed:
        names = ", ".join(clause.clause for clause in ruling.stops)
        return f"leaves {target} alone: stopped by {names}"
    words = {"dry-run": "would act on", "ask": "asks to act on", "auto": "acts on"}
    return f"{words[mode]} {target}"
