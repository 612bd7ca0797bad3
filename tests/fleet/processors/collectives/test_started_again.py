"""A job that is started again on the same nodes under the same names, and agents that are started again beside a job."""

from dataclasses import replace

import pytest
from tests.fleet.processors.collectives.judged import job

from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.engine import DetectionEngine
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

DAY_S = 86_400
"""Since when the nodes run."""


def build_push(part, at_s, **shape):
    """A push of a job that began at a time: 200 operations, after so many pushes before."""
    runs = job(seed=part, **shape)
    for run in runs:
        run.ops["seq"] += 200 * part
        run.ops["entry_ns"] += (DAY_S + at_s + 10 * part) * NS_PER_S
    return runs


def go_on(engine, at_s, parts=range(6), **shape):
    """A job's pushes, one each ten seconds."""
    for part in parts:
        give(engine, build_push(part, at_s, **shape), at_s + 10 * part)
    return read(engine, at_s + 10 * part + 7)


def give(engine, runs, at_s):
    assert engine.add(runs, int(at_s * NS_PER_S)) == (0, "")
    engine.judge(int((at_s + 1) * NS_PER_S))


def read(engine, at_s):
    engine.judge(int(at_s * NS_PER_S))
    judgement = engine.conclusions()["c"].judgement
    return {verdict.rank.rank: verdict for verdict in judgement.verdicts}


def culprits(verdicts):
    return {rank for rank, verdict in verdicts.items() if verdict.kind == "culprit"}


@pytest.mark.parametrize("after_s", [70, 3600])
@pytest.mark.parametrize("slow_again", [None, 3, 5])
def test_a_job_that_is_started_again_under_its_old_names_is_judged_again(slow_again, after_s):
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    before = go_on(engine, 0, slow=3)
    assert culprits(before) == {3}
    after = go_on(engine, after_s, slow=slow_again)
    assert culprits(after) == ({slow_again} if slow_again is not None else set())
    assert {after[rank].n_ops - before[rank].n_ops for rank in before} == {6 * 200}
    assert engine.conclusions()["c"].judgement.counts["stale_ops"] == 0


@pytest.mark.parametrize("n_after", [6, 12])
def test_it_may_have_fewer_ranks_then_or_more(n_after):
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    go_on(engine, 0)
    after = go_on(engine, 100, range(12), n_ranks=n_after, slow=2)
    assert culprits(after) == {2}
    assert len(after[2].peers) == n_after


@pytest.mark.parametrize("n_after", [6, 8, 12])
def test_lags_are_those_of_its_last_start(n_after):
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    go_on(engine, 0, slow=3)
    go_on(engine, 100, range(2), n_ranks=n_after, slow=5)
    lags = {one.rank.rank: one for one in engine.lags_of("c", "00000000000000aa")}
    assert len(lags) == n_after
    assert {rank for rank, one in lags.items() if one.lag_ms > 3.0} == {5}
    assert {one.n_ops for one in lags.values()} == {400}


def test_what_of_a_job_is_overtaken_by_its_next_start_is_of_its_former_one():
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    go_on(engine, 0, range(5))
    last, first = build_push(5, 0), build_push(0, 60, slow=5)
    give(engine, first, 60)
    give(engine, last, 62)
    after = go_on(engine, 60, range(1, 6), slow=5)
    assert culprits(after) == {5}
    assert {verdict.n_ops for verdict in after.values()} == {12 * 200}
    assert engine.conclusions()["c"].judgement.counts["stale_ops"] == 0


def test_what_comes_late_or_twice_around_the_start_belongs_where_it_was():
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    go_on(engine, 0, range(5))
    last, first = build_push(5, 0), build_push(0, 70, slow=5)
    give(engine, [run for run in last if run.rank.rank != 4], 50)
    give(engine, [run for run in first if run.rank.rank != 4], 70)
    give(engine, [run for run in (*last, *first) if run.rank.rank == 4], 72)
    give(engine, last, 74)
    give(engine, first, 74)
    after = go_on(engine, 70, range(1, 6), slow=5)
    assert culprits(after) == {5}
    assert {verdict.n_ops for verdict in after.values()} == {2 * 6 * 200}
    assert engine.conclusions()["c"].judgement.counts["stale_ops"] == 8 * 2 * 200


@pytest.mark.parametrize("back_s", [30, 3600])
def test_a_rank_whose_agent_was_started_again_after_a_step_of_the_clock_is_judged_on(back_s):
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    before = go_on(engine, 0)
    assert culprits(before) == set()
    for part in range(6, 12):
        runs = build_push(part, 0, slow=3)
        runs[3].ops["entry_ns"] -= back_s * NS_PER_S
        give(engine, runs, 10 * part)
    after = read(engine, 127)
    assert culprits(after) == {3}
    assert {verdict.n_ops for verdict in after.values()} == {12 * 200}
    onset = after[3].onset
    assert abs(onset.entry_ns - (DAY_S + 60 - back_s) * NS_PER_S) < 20 * NS_PER_S, "on its clock"


def test_each_of_many_lives_of_a_job_is_judged():
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    for life in range(4):
        verdicts = go_on(engine, 100 * life, range(3), slow=life)
        assert culprits(verdicts) <= {life, life - 1}
    verdicts = go_on(engine, 100 * life, range(3, 8), slow=life)
    assert culprits(verdicts) == {life}


def test_ranks_that_do_other_work_in_their_next_job_are_compared_by_that():
    """First as two stages, then all alike."""
    engine = DetectionEngine(NcclConfig(), MeterRegistry())
    for part in range(6):
        runs = [
            replace(run, rank=replace(run.rank, labels=(("pp", str(run.rank.rank % 2)),)))
            for run in build_push(part, 0)
        ]
        give(engine, runs, 10 * part)
    after = go_on(engine, 100, range(8), comm="00000000000000bb", slow=5)
    assert {len(verdict.peers) for verdict in after.values()} == {8}
    assert {verdict.rank.labels for verdict in after.values()} == {
        (("dp", str(rank)), ("pp", "0")) for rank in range(8)
    }
    assert culprits(after) == {5}
