"""What a Fleet that takes a cluster over says: what changed against what the one before it said, and no more."""

from dataclasses import replace
from functools import cache

import pytest
from tests.e2e.test_collectives import job
from tests.fleet.processors.collectives.judged import Judged
from tests.fleet.processors.collectives.judged import job as job_of_parts
from tests.fleet.processors.collectives.test_costs import seconds

from ingero.fleet.component import Learner, PushContext, ReportLedger
from ingero.fleet.consumer import Batch
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.engine import DetectionEngine
from ingero.fleet.processors.collectives.telemetry import LATE_OPS, OPS
from ingero.model.verdicts import VerdictKind
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives


@pytest.mark.parametrize("said", [(), (5,), (3, 5)])
def test_after_a_replay_only_what_differs_from_what_was_said_is_a_change(said):
    engine, runs = DetectionEngine(NcclConfig(), MeterRegistry()), list(job(slow=5))
    cluster_id, workers = runs[0].rank.cluster_id, {run.rank.rank: run.rank.worker for run in runs}
    engine.begin_replay(cluster_id)
    assert engine.add(runs, 0) == (0, "")
    assert engine.judge(60 * NS_PER_S) == {}, "nothing is concluded of a replay"
    engine.end_replay(
        cluster_id, {workers[rank]: VerdictKind.CULPRIT for rank in said}, 60 * NS_PER_S
    )
    conclusion = engine.judge(61 * NS_PER_S)[cluster_id]
    assert {one.rank.rank for one in conclusion.judgement.culprits} == {5}
    changed = {
        (one.verdict.rank.rank, one.before, one.verdict.kind is VerdictKind.CULPRIT)
        for one in conclusion.changes
        if VerdictKind.CULPRIT in {one.before, one.verdict.kind}
    }
    new = {(5, None, True)} if 5 not in said else set()
    taken_back = {(rank, VerdictKind.CULPRIT, False) for rank in said if rank != 5}
    assert changed == new | taken_back


@pytest.mark.parametrize("has_log", [True, False])
def test_nothing_is_kept_of_a_cluster_that_is_forgotten(has_log):
    engine, runs = DetectionEngine(NcclConfig(), MeterRegistry()), list(job(slow=5))
    cluster_id = runs[0].rank.cluster_id
    if has_log:
        engine.note_stored(cluster_id, 100 * NS_PER_S, 0)
    engine.add(runs, 0)
    engine.judge(10 * NS_PER_S)
    assert list(engine.cuts) == [cluster_id]
    for at_s in (10_000, 10_001):
        engine.judge(at_s * NS_PER_S)
    assert not engine.conclusions()
    assert not engine.cuts


@pytest.mark.parametrize("is_replayed", [True, False])
def test_what_was_said_of_a_rank_ends_although_nothing_is_concluded_of_it_at_first(is_replayed):
    engine, runs = DetectionEngine(NcclConfig(), MeterRegistry()), list(job(slow=5))
    cluster_id, culprit = runs[0].rank.cluster_id, runs[3].rank.worker
    first = [replace(run, ops=run.ops[:1]) for run in runs if run.rank.worker != culprit]
    engine.begin_replay(cluster_id)
    if is_replayed:
        engine.add(first, 0)
        engine.judge(NS_PER_S)
    engine.end_replay(cluster_id, {culprit: VerdictKind.CULPRIT}, NS_PER_S)
    early = engine.judge(2 * NS_PER_S)
    concluded = [one.rank.worker for every in early.values() for one in every.judgement.verdicts]
    assert culprit not in concluded
    assert bool(concluded) == is_replayed
    assert not any(every.changes and not every.changes[0].is_quiet for every in early.values())
    engine.add([replace(run, ops=run.ops[1:]) for run in runs], 3 * NS_PER_S)
    conclusion = engine.judge(60 * NS_PER_S)[cluster_id]
    (ended,) = [one for one in conclusion.changes if one.verdict.rank.worker == culprit]
    assert ended.before is VerdictKind.CULPRIT
    assert ended.verdict.kind is not VerdictKind.CULPRIT


@pytest.mark.parametrize("is_replayed", [True, False])
def test_what_was_said_of_a_rank_that_never_comes_again_ends_once(is_replayed):
    config = NcclConfig()
    engine, runs = DetectionEngine(config, MeterRegistry()), list(job(slow=5))
    cluster_id, gone = runs[0].rank.cluster_id, runs[3].rank.worker
    others = [run for run in runs if run.rank.worker != gone]
    engine.begin_replay(cluster_id)
    if is_replayed:
        engine.add(others, 0)
        engine.judge(NS_PER_S)
    engine.end_replay(cluster_id, {gone: VerdictKind.CULPRIT}, NS_PER_S)
    ends = []
    for since_s in range(2, 3 * config.idle_timeout // NS_PER_S, 30):
        before = engine.conclusions()
        engine.judge(since_s * NS_PER_S)
        for of, conclusion in engine.conclusions().items():
            if conclusion is not before.get(of):
                ends += [(since_s, o) for o in conclusion.changes if o.verdict.rank.worker == gone]
    ((ended_s, end),) = ends
    assert abs(ended_s * NS_PER_S - config.idle_timeout) <= 60 * NS_PER_S
    assert end.before is VerdictKind.CULPRIT
    assert end.verdict.kind is VerdictKind.UNKNOWN
    assert engine.conclusions() == {}, "the cluster is forgotten"


def test_the_budget_in_time_of_a_cluster_is_the_same_for_its_judge_and_its_heir():
    """However the log was cut into rounds."""
    config, log = NcclConfig(alarms_per_worker_day=0.1), list(log_of(6, every_s=10))
    judge, heir = (DetectionEngine(config, MeterRegistry()) for _ in range(2))
    heir.begin_replay("c")
    for run in log[0][1]:
        run.ops["entry_ns"][1:] += 8 * NS_PER_S
    for stored_ns, runs in log:
        for run in runs:
            judge.add([run], stored_ns)
            judge.judge(stored_ns + NS_PER_S)
        heir.add(runs, stored_ns, is_replay=True)
    heir.judge(stored_ns + NS_PER_S)
    heir.end_replay("c", {}, stored_ns + NS_PER_S)
    for engine in (judge, heir):
        engine.judge(stored_ns + 20 * NS_PER_S)
    ops_per_day = 86_400 * 6 * 60 / 51
    (alpha,) = {engine.conclusions()["c"].alpha for engine in (judge, heir)}
    assert alpha == pytest.approx(0.1 / ops_per_day, rel=0.05)


def test_what_is_only_followed_is_neither_shown_nor_counted():
    meter = MeterRegistry()
    engine, runs = DetectionEngine(NcclConfig(), meter), list(job(slow=5))
    cluster_id, comm = runs[0].rank.cluster_id, runs[0].comm
    engine.begin_replay(cluster_id)
    engine.add(runs, 0, [60 * NS_PER_S] * len(runs), is_replay=True)
    engine.judge(60 * NS_PER_S)
    assert engine.conclusions() == engine.find_late_ns() == {}
    for ask in (lambda: engine.comms_of(cluster_id), lambda: engine.lags_of(cluster_id, comm)):
        with pytest.raises(KeyError):
            ask()
    for counted in (OPS, LATE_OPS):
        assert meter.counter(counted).read() == 0
    engine.end_replay(cluster_id, {}, 60 * NS_PER_S)
    engine.judge(120 * NS_PER_S)
    assert engine.comms_of(cluster_id)
    assert cluster_id in engine.conclusions()


def test_followed_clusters_leave_the_cap_to_those_that_are_judged():
    engine, runs = DetectionEngine(NcclConfig(max_clusters=1), MeterRegistry()), list(job(slow=5))
    engine.begin_replay(runs[0].rank.cluster_id)
    assert engine.add(runs, 0, is_replay=True) == (0, "")
    others = [replace(run, rank=replace(run.rank, cluster_id="other")) for run in runs]
    assert engine.add(others, 0) == (0, "")
    third = [replace(run, rank=replace(run.rank, cluster_id="third")) for run in runs]
    assert engine.add(third, 0) == (len(runs), "cluster_cap")


def test_a_cluster_that_was_forgotten_and_comes_back_is_judged_by_another_judge():
    """Its sums begin anew: what was charged before is not taken back."""
    config = NcclConfig()
    engine, runs = DetectionEngine(config, MeterRegistry()), list(job(slow=5))
    cluster_id, generations = runs[0].rank.cluster_id, []
    for now_ns in (0, 3 * config.idle_timeout):
        engine.add(runs, now_ns)
        generations.append(engine.judge(now_ns + NS_PER_S)[cluster_id].generation)
        engine.judge(now_ns + 5 * config.idle_timeout // 2)
        assert engine.conclusions() == {}
    assert generations[0] != generations[1]


N_PARTS = 24


class Said:
    """A ledger whose reports leave at once, until its Fleet is killed."""

    def __init__(self):
        self.states, self.is_open = {}, True

    def report(self, cluster_id, reported, sender, export):
        if self.is_open and sender.try_send(export):
            self.states |= reported


class StreamFleet(Judged):
    """A Fleet that reads pushes from a log, under a ledger."""

    def __init__(self, said):
        super().__init__(cost_interval="10s")
        self.host.offer(ReportLedger, said)
        self.pipe._state.downstream.begin(self.host, "nccl")
        for signal, out in self.out.items():
            self.pipe._state.downstream.join(signal, out)
        (self.learner,) = self.host.find(Learner)
        self.charged_s = 0.0

    def apply(self, stored_ns, runs, *, is_replay=False):
        """A push of the log."""
        self.learner.note_stored("c", stored_ns, self.host.clock.mono_ns())
        export = decode_protobuf(
            encode_protobuf(build_collectives(runs, self.host.clock.wall_ns())), Signal.LOGS
        )
        push = PushContext(cluster_hint="c", is_replay=is_replay)
        self.pipe.consume(Batch(Signal.LOGS, export, stored_ns, push))

    def judge(self):
        self.round()
        self.charged_s += seconds(self.records("ingero.cost"), "charged")
        self.charged_s += seconds(self.records("ingero.cost"), "unattributed")

    def until(self, stored_ns):
        self.host.clock.advance(stored_ns - self.host.clock.mono_ns())


def log_of(n_parts, every_s=2):
    """A job's pushes, each with when it was stored."""
    for part in range(n_parts):
        runs = job_of_parts(slow=3, n_ops=60, seed=part)
        for run in runs:
            run.ops["seq"] += 60 * part
            run.ops["entry_ns"] += part * every_s * NS_PER_S
        yield (1000 + every_s * part) * NS_PER_S, runs


@cache
def find_whole_s():
    """What one Fleet charges that judges the log to its end and until nothing more comes."""
    fleet, log = StreamFleet(Said()), log_of(N_PARTS)
    begin(fleet, {})
    fleet.learner.end_replay("c", {})
    for stored_ns, runs in log:
        fleet.until(stored_ns)
        fleet.apply(stored_ns, runs)
        fleet.judge()
    for _ in range(8):
        fleet.host.clock.advance(5 * NS_PER_S)
        fleet.judge()
    return fleet.charged_s


def begin(fleet, reported):
    fleet.until(1000 * NS_PER_S)
    fleet.learner.begin_replay("c", reported)


@pytest.mark.parametrize("is_standby", [False, True])
@pytest.mark.parametrize("n_before", [3, 9, 16])
def test_costs_around_a_take_over_are_charged_once(n_before, is_standby):
    log = list(log_of(N_PARTS))
    said, heir = Said(), None
    judge = StreamFleet(said)
    begin(judge, {})
    judge.learner.end_replay("c", {})
    heir = StreamFleet(said)
    if is_standby:
        begin(heir, {})
    for stored_ns, runs in log[:n_before]:
        judge.until(stored_ns)
        judge.apply(stored_ns, runs)
        judge.judge()
        if is_standby:
            heir.until(stored_ns)
            heir.apply(stored_ns, runs, is_replay=True)
            heir.judge()
    # Killed: nothing of what came since its last report leaves it.
    assert said.states["cost"]
    if not is_standby:
        begin(heir, said.states)
        for at, (stored_ns, runs) in enumerate(log[:n_before]):
            heir.until(stored_ns)  # a push is applied at the moment at which it was received
            heir.apply(stored_ns, runs, is_replay=True)
            if at % 7 == 0:  # rounds go on meanwhile, at a time that is later
                heir.pipe._state.engine.judge((1200 + at) * NS_PER_S)
    heir.judge()
    assert heir.charged_s == 0
    for stored_ns, runs in log[n_before : n_before + 3]:  # nobody judges meanwhile
        heir.until(stored_ns)
        heir.apply(stored_ns, runs)
    heir.learner.end_replay("c", dict(said.states))
    for stored_ns, runs in log[n_before + 3 :]:
        heir.until(stored_ns)
        heir.apply(stored_ns, runs)
        heir.judge()
    for _ in range(8):
        heir.host.clock.advance(5 * NS_PER_S)
        heir.judge()
    whole_s = find_whole_s()
    assert (judge.charged_s > 1) == (n_before > 3), "a first judge may end before its first report"
    assert whole_s > judge.charged_s
    assert judge.charged_s + heir.charged_s == pytest.approx(whole_s, rel=1e-3)
