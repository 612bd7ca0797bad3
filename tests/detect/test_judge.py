"""The Judge: verdicts on simulated jobs, costs, and independence of how reports arrive."""

from dataclasses import replace

import numpy as np
import pytest
from tests.detect.simulated_jobs import SHAPE, judge, kinds, simulate, slow, small_run
from tests.support.synthetic_jobs import (
    JobShape,
    heavy_noise,
    normal_noise,
    rotate_heavy_sequences,
    skewed_noise,
)

from ingero.detect.judge import Judge
from ingero.model.collectives import UNKNOWN_NS, ClockKind, Rank
from ingero.model.verdicts import VerdictKind


def all_workers(shape=SHAPE):
    return {(dp, stage) for dp in range(shape.n_dp) for stage in range(shape.n_stages)}


@pytest.mark.parametrize("noise", [normal_noise(0.03), heavy_noise(0.03), skewed_noise(0.05)])
def test_healthy_workers_are_ordinary(noise):
    assert kinds(judge(simulate(noise=noise))) == {"ordinary": all_workers()}


@pytest.mark.parametrize("factor", [1.2, 1.5, 2.0])
def test_a_slow_worker_is_the_only_culprit_and_the_others_its_victims(factor):
    judgement = judge(simulate(change=slow(factor, (2, 1))))
    found = kinds(judgement)
    assert found["culprit"] == {(2, 1)}
    assert found["victim"] == all_workers() - {(2, 1)}
    (culprit,) = judgement.culprits
    assert culprit.slowdown.median == pytest.approx(factor, rel=0.03)
    assert culprit.n_ops_to_detect < 12
    assert {victim.rank for victim in judgement.verdicts} - {culprit.rank} == set(culprit.victims)
    assert culprit.lost_gpu_ns == judgement.charged_gpu_ns > 0


def test_onset_and_detection_lie_in_the_step_where_the_slowdown_began():
    trace = simulate(change=slow(1.5, (1, 0), since=3))
    (culprit,) = judge(trace).culprits
    assert trace.find_step(culprit.onset.entry_ns) == 3
    assert trace.find_step(culprit.detected_entry_ns) == 3
    run = next(
        run
        for runs in trace.runs
        for run in runs
        if run.comm == culprit.onset.comm and run.rank == culprit.rank
    )
    row = run.ops[run.ops["seq"] == culprit.onset.seq]
    assert row["entry_ns"].tolist() == [culprit.onset.entry_ns]


@pytest.mark.parametrize("workers", [((2, 1), (3, 1)), ((0, 0), (3, 2)), ((2, 0), (2, 1))], ids=str)
def test_two_slow_workers_are_both_named_and_nobody_else(workers):
    found = kinds(judge(simulate(change=slow(1.5, *workers))))
    assert found["culprit"] == set(workers)


def test_a_small_slowdown_is_a_drag_and_no_alarm():
    shape = replace(SHAPE, n_steps=16)
    judgement = judge(simulate(shape, change=slow(1.06, (1, 1))))
    assert kinds(judgement)["drag"] == {(1, 1)}
    assert not any(verdict.is_alarm for verdict in judgement.verdicts)


def test_a_stage_with_more_work_is_an_imbalance_and_no_alarm():
    def heavier(work, rng):
        work[:, :, 2] *= 1.3
        return work

    judgement = judge(simulate(change=heavier))
    assert kinds(judgement) == {
        "imbalance:stage": {(dp, 2) for dp in range(4)},
        "ordinary": {(dp, stage) for dp in range(4) for stage in range(2)},
    }
    stage = [v for v in judgement.verdicts if v.kind is VerdictKind.IMBALANCE_STAGE]
    for verdict in stage:
        assert verdict.excess_ns / verdict.since_onset_ns == pytest.approx(0.3 / 1.3, abs=0.03)
        assert verdict.reason.endswith("× as long as the other stages")
    assert judgement.charged_gpu_ns == 0, "nobody is blamed for it"


def test_a_stage_that_became_slow_is_not_taken_for_one_that_has_more_work():
    shape = replace(SHAPE, n_steps=30)
    stage = [(dp, 2) for dp in range(4)]
    judgement = judge(simulate(shape, change=slow(1.5, *stage, since=12)))
    found = [v for v in judgement.verdicts if v.kind is VerdictKind.IMBALANCE_STAGE]
    assert [verdict.rank.labels for verdict in found] == [
        (("dp", str(dp)), ("stage", "2")) for dp in range(4)
    ]
    for verdict in found:
        assert "as long as in the beginning: something changed there" in verdict.reason


@pytest.mark.parametrize("sigma", [0.3, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_uneven_batches_are_an_imbalance_and_no_alarm(sigma, seed):
    def rotate(work, rng):
        return rotate_heavy_sequences(work, sigma, rng)

    assert kinds(judge(simulate(seed=seed, change=rotate))) == {"imbalance:data": all_workers()}


LONG = replace(SHAPE, n_steps=14)


def uneven_steps(sigma):
    def change(work, rng):
        return work * np.exp(sigma * rng.standard_normal((*work.shape[:2], 1, 1, 1)))

    return change


@pytest.mark.parametrize("sigma", [0.15, 0.3, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_steps_that_are_heavy_for_a_whole_replica_are_an_imbalance_and_no_alarm(sigma, seed):
    found = kinds(judge(simulate(LONG, seed=seed, change=uneven_steps(sigma)), with_history=True))
    assert found.keys() <= {"imbalance:data", "ordinary"}
    assert len(found["imbalance:data"]) >= 4


@pytest.mark.parametrize(("sigma", "seed"), [(0.15, 3), (0.15, 7), (0.2, 0), (0.3, 1)])
def test_without_a_pipeline_too_uneven_steps_end_as_an_imbalance(sigma, seed):
    """One worker per replica: what was named in the first heavy steps is taken back, past alarms included."""
    shape = JobShape(n_dp=4, n_stages=1, n_microbatches=18, n_steps=24)
    trace = simulate(shape, seed=seed, change=uneven_steps(sigma))
    found = kinds(judge(trace, with_history=True))
    assert found == {"imbalance:data": all_workers(shape)}


def test_a_whole_replica_that_is_slow_on_many_nodes_is_nobodys_fault():
    judgement = judge(simulate(change=slow(1.3, (1, 0), (1, 1), (1, 2))))
    found = kinds(judgement)
    assert found["imbalance:data"] == {(1, 0), (1, 1), (1, 2)}
    assert found.keys() <= {"imbalance:data", "ordinary"}
    reason = next(v.reason for v in judgement.verdicts if v.kind is VerdictKind.IMBALANCE_DATA)
    assert "2 more workers of its replica on other nodes" in reason


def test_stages_on_one_node_are_no_witnesses_for_each_other():
    """A slow node that holds a whole replica: its workers are culprits, since nobody elsewhere shares the slowdown."""
    trace = simulate(change=slow(1.3, (1, 0), (1, 1), (1, 2)))
    where = {
        worker: replace(worker, node_id=f"node{dict(worker.labels)['dp']}")
        for worker in trace.workers
    }
    runs = tuple(
        tuple(replace(run, rank=where[run.rank]) for run in of_worker) for of_worker in trace.runs
    )
    found = kinds(judge(replace(trace, workers=tuple(where.values()), runs=runs)))
    assert found["culprit"] == {(1, 0), (1, 1), (1, 2)}


def test_two_slow_workers_of_four_from_the_start_are_both_culprits():
    judgement = judge(simulate(change=slow(1.3, (0, 1), (2, 1), since=0)))
    assert kinds(judgement)["culprit"] == {(0, 1), (2, 1)}
    assert all(culprit.n_ops_to_detect <= 30 for culprit in judgement.culprits)


def test_a_slowdown_of_the_size_of_the_bar_is_no_alarm():
    for seed in range(4):
        trace = simulate(LONG, seed=seed, change=slow(1.095, (1, 1)))
        judgement = judge(trace)
        assert kinds(judgement)["drag"] == {(1, 1)}
        assert "culprit" not in kinds(judgement)
        (drag,) = [v for v in judgement.verdicts if v.kind is VerdictKind.DRAG]
        assert trace.find_step(drag.detected_entry_ns) <= 4, "dated by the tier that notices drags"


def test_a_culprit_tells_when_it_was_first_noticed():
    (culprit,) = judge(simulate(LONG, change=slow(1.14, (1, 1)))).culprits
    assert culprit.onset.entry_ns <= culprit.noticed_entry_ns < culprit.detected_entry_ns


def test_a_slow_link_is_named_at_both_ends_and_no_worker_is_blamed():
    links = np.ones((4, 2))
    links[1, 1] = 30
    found = kinds(judge(simulate(links=links)))
    assert found["network"] == {(1, 1), (1, 2)}
    assert "culprit" not in found
    assert "drag" not in found


def test_when_everybody_slows_down_nobody_stands_out():
    def later(work, rng):
        work[22:] *= 1.4
        return work

    found = kinds(judge(simulate(replace(SHAPE, n_steps=32), change=later)))
    assert found == {"cluster": all_workers()}


def test_a_worker_that_recovered_is_ordinary_now_and_named_in_the_history():
    trace = simulate(replace(SHAPE, n_steps=24), change=slow(1.5, (1, 1), since=2, until=18))
    assert kinds(judge(trace)) == {"ordinary": all_workers()}, "and no unevenness of the data"
    (culprit,) = judge(trace, with_history=True).culprits
    assert dict(culprit.rank.labels) == {"dp": "1", "stage": "1"}
    assert "recovered" in culprit.reason


def slow_spells(factor, *spells):
    """Rank (1, 1) is slow in each of these spells of steps."""

    def change(work, rng):
        for since, until in spells:
            work[since:until, 1, 1] *= factor
        return work

    return change


def test_every_slowdown_of_a_worker_costs_what_it_took():
    """In the middle of the second one and after it: the first one's cost is not taken back."""
    spells = ((2, 26), (60, 90))

    def judge_until(n_steps, *spells):
        trace = simulate(replace(SHAPE, n_steps=n_steps), change=slow_spells(1.5, *spells))
        return judge(trace, with_history=True)

    (first,) = judge_until(60, *spells).culprits
    (only_second,) = judge_until(75, spells[1]).culprits
    (within,) = judge_until(75, *spells).culprits
    assert "recovered" not in within.reason
    for name in ("excess_ns", "since_onset_ns", "lost_gpu_ns"):
        both = getattr(first, name) + getattr(only_second, name)
        assert getattr(within, name) == pytest.approx(both, rel=0.1)
    (after,) = judge_until(120, *spells).culprits
    assert after.lost_gpu_ns > within.lost_gpu_ns
    assert "with its other slowdowns" in after.reason


def test_an_alarm_in_a_drag_takes_nothing_of_its_cost_back():
    def worsen(work, rng):
        work[2:, 1, 1] *= 1.04
        work[120:, 1, 1] *= 1.6
        return work

    def judge_until(n_steps):
        trace = simulate(replace(SHAPE, n_steps=n_steps), change=worsen)
        (found,) = [v for v in judge(trace, with_history=True).verdicts if v.onset is not None]
        return found

    before, after = judge_until(120), judge_until(124)
    assert (before.kind, after.kind) == (VerdictKind.DRAG, VerdictKind.CULPRIT)
    assert after.excess_ns > before.excess_ns
    assert after.lost_gpu_ns > before.lost_gpu_ns


def test_a_worker_that_only_stumbles_often_is_a_culprit_though_its_median_is_ordinary():
    def stumble(work, rng):
        work[2:, 1, 1] *= 1 + 2 * (rng.random(work[2:, 1, 1].shape) < 0.25)
        return work

    (culprit,) = judge(simulate(replace(SHAPE, n_steps=20), change=stumble)).culprits
    assert dict(culprit.rank.labels) == {"dp": "1", "stage": "1"}
    assert culprit.slowdown.median == pytest.approx(1.0, abs=0.05)
    assert culprit.slowdown.high > 1.0


def test_own_time_that_was_not_measured_is_missing_and_not_fast():
    trace = simulate()
    hidden = []
    for at, runs in enumerate(trace.runs):
        ops = [run.ops.copy() for run in runs]
        if at == 0:
            for rows in ops:
                rows["own_ns"][rows["seq"] % 2 == 0] = UNKNOWN_NS
        hidden.append(tuple(replace(run, ops=rows) for run, rows in zip(runs, ops, strict=True)))
    judgement = judge(replace(trace, runs=tuple(hidden)))
    assert kinds(judgement) == {"ordinary": all_workers()}
    assert 0 < judgement.verdicts[0].n_ops < 0.7 * judgement.verdicts[3].n_ops
    assert judgement.verdicts[0].slowdown.median == pytest.approx(1.0, abs=0.05)


def test_two_replicas_are_too_few_to_say_whose_fault_it_is():
    judgement = judge(simulate(replace(SHAPE, n_dp=2), change=slow(1.5, (1, 1), since=0)))
    assert {verdict.kind for verdict in judgement.verdicts} == {VerdictKind.UNKNOWN}
    slowed = next(v for v in judgement.verdicts if v.rank.labels == (("dp", "1"), ("stage", "1")))
    assert "1.5" in slowed.reason


def test_enqueue_times_convict_nobody():
    trace = simulate(change=slow(2.0, (2, 1)))
    runs = tuple(
        tuple(replace(run, clock=ClockKind.ENQUEUE) for run in of_worker)
        for of_worker in trace.runs
    )
    judgement = judge(replace(trace, runs=runs))
    assert {verdict.kind for verdict in judgement.verdicts} == {VerdictKind.UNKNOWN}
    assert "enqueue" in judgement.verdicts[0].reason
    assert judgement.counts["enqueue_ops"] == trace.n_ops


@pytest.mark.parametrize("seed", range(3))
def test_charged_and_unattributed_add_up_to_all_waiting(seed):
    rng = np.random.default_rng(seed)
    workers = [tuple(rng.integers(0, (4, 3)).tolist()) for _ in range(2)]
    judgement = judge(simulate(seed=seed, change=slow(float(rng.uniform(1.2, 2)), *workers)))
    total = sum(verdict.wait_ns * verdict.rank.n_gpus for verdict in judgement.verdicts)
    assert judgement.total_wait_gpu_ns == total
    assert judgement.charged_gpu_ns + judgement.unattributed_gpu_ns == total
    assert judgement.charged_gpu_ns == sum(v.lost_gpu_ns for v in judgement.verdicts)
    for verdict in judgement.verdicts:
        assert 0 <= sum(verdict.charged_to.values()) <= verdict.wait_ns


def test_a_slow_worker_is_charged_what_the_job_lost_by_it():
    """Against the same job without the slowdown: the difference in length, times the GPUs that wait."""
    slowed, healthy = simulate(change=slow(1.5, (2, 1))), simulate()
    (culprit,) = judge(slowed).culprits
    longer_ns = int(slowed.steps["end_ns"][-1] - healthy.steps["end_ns"][-1])
    n_gpus = 2 * (len(slowed.workers) - 1)
    assert culprit.lost_gpu_ns == pytest.approx(longer_ns * n_gpus, rel=0.15)


def test_operations_in_flight_together_block_a_rank_once():
    """A batched send and receive wait for the same partner: 90, not 180."""
    ranks = [Rank("c", f"n{i}", i) for i in range(2)]
    found = Judge()
    found.observe(
        [
            small_run(ranks[0], "a", 0, 2, [(0, 0, 100, 5)]),
            small_run(ranks[0], "b", 0, 2, [(0, 0, 100, 0)]),
            small_run(ranks[1], "a", 1, 2, [(0, 90, 10, 95)]),
            small_run(ranks[1], "b", 1, 2, [(0, 90, 10, 0)]),
        ],
        0,
    )
    found.settle(0, final=True)
    (judgement,) = found.judgements()
    assert [verdict.wait_ns for verdict in judgement.verdicts] == [90, 0]
