"""The judge gets a job in pushes: cut, late, repeated, without some ranks, and with labels alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.detect.simulated_jobs import QUIET, SHAPE, judge, kinds, simulate, slow, small_run
from tests.support.properties import draw_examples
from tests.support.synthetic_jobs import build_work, run_job

from ingero.detect.judge import Judge, JudgeSettings
from ingero.detect.member_readings import summarize
from ingero.detect.ranks.edetector import EDetector
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import iter_pushes
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.verdicts import Slowdown, judgement_json
from ingero.units import NS_PER_S


def canonical(found, with_history=True):
    answers = [judgement_json(j) for j in found.judgements(with_history=with_history)]
    for answer in answers:
        for name in ("stale_ops", "pending_ops"):
            answer["counts"].pop(name)
        answer["counts"].pop("ops")
    return answers


TRACE = simulate(replace(SHAPE, n_steps=5), change=slow(1.5, (2, 1), since=1))
WHOLE = Judge()
for _runs in TRACE.runs:
    WHOLE.observe(_runs, 0)
WHOLE.settle(0, final=True)
EXPECTED = canonical(WHOLE)


@pytest.mark.parametrize("interval_s", [0.7, 2.0, 10.0])
def test_pushes_in_trace_time_give_the_verdicts_of_the_whole_recording(interval_s):
    found = Judge()
    for push in iter_pushes(TRACE, round(interval_s * NS_PER_S)):
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    found.settle(push.at_ns, final=True)
    assert canonical(found) == EXPECTED


@draw_examples(8, 25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.booleans())
def test_interleaving_lateness_and_repeats_within_patience_change_nothing(seed, n_cuts, repeats):
    """Every run cut anywhere; pieces late by up to the reorder time, ranks late against each other at will."""
    rng = np.random.default_rng(seed)
    arrivals = []
    for runs in TRACE.runs:
        rank_delay = rng.integers(0, 50 * NS_PER_S)
        for run in runs:
            cuts = np.sort(rng.integers(0, run.ops.size + 1, n_cuts))
            for ops in np.split(run.ops, cuts):
                if not ops.size:
                    continue
                left = int((ops["entry_ns"] + ops["inside_ns"]).max())
                at = left + int(rank_delay) + int(rng.integers(0, 4 * NS_PER_S))
                arrivals.append((at, replace(run, ops=ops)))
                if repeats and rng.random() < 0.3:
                    arrivals.append((at + NS_PER_S, replace(run, ops=ops)))
    arrivals.sort(key=lambda arrival: arrival[0])
    found = Judge(JudgeSettings(reorder_ns=200 * NS_PER_S, patience_ns=10_000 * NS_PER_S))
    for at, run in arrivals:
        found.observe([run], at)
        if rng.random() < 0.2:
            found.settle(at)
    found.settle(at, final=True)
    assert canonical(found) == EXPECTED


def test_a_rank_that_stops_reporting_is_left_out_after_the_patience():
    found = Judge(JudgeSettings(patience_ns=30 * NS_PER_S))
    for push in iter_pushes(TRACE, 2 * NS_PER_S):
        is_silenced = dict(TRACE.workers[push.worker].labels) == {"dp": "3", "stage": "1"}
        if is_silenced and push.at_ns > 4 * NS_PER_S:
            continue
        found.observe(push.runs, push.at_ns)
        found.settle(push.at_ns)
    (before,) = found.judgements()
    assert before.culprits == ()
    found.settle(push.at_ns + 31 * NS_PER_S)
    found.settle(push.at_ns + 62 * NS_PER_S)
    found.settle(push.at_ns + 93 * NS_PER_S)
    (after,) = found.judgements()
    assert [dict(v.rank.labels) for v in after.culprits] == [{"dp": "2", "stage": "1"}]


def push_seconds(judge, seconds, silent=(), slow=(), late=()):
    """Eight ranks that add up ten times a second, judged each second; late ones report three seconds after the others."""
    rng = np.random.default_rng(seconds[0])
    for second in seconds:
        for rank in (rank for rank in range(8) if rank not in silent):
            ops = np.zeros(10, COLLECTIVE_OP)
            begin = 10 * (second - 3 if rank in late else second)
            ops["seq"] = np.arange(begin, begin + 10)
            ops["own_ns"] = (
                50e6 * (1 + 0.01 * rng.standard_normal(10)) * (1.5 if rank in slow else 1)
            )
            ops["entry_ns"] = ops["seq"] * 100_000_000 + ops["own_ns"]
            ops["inside_ns"] = 76e6 - ops["own_ns"]
            ops["n_bytes"], ops["op"] = 1 << 20, CollectiveOp.ALL_REDUCE
            who = Rank("c", f"node{rank}", rank)
            run = CollectiveRun(who, "c0" * 8, rank, 8, ClockKind.DEVICE, ops)
            judge.observe([run], second * NS_PER_S)
        judge.settle(second * NS_PER_S)


def count_compared(judge, rank):
    (judgement,) = judge.judgements()
    return next(verdict.n_ops for verdict in judgement.verdicts if verdict.rank.rank == rank)


def test_a_rank_whose_agent_is_gone_costs_its_peers_one_wait_and_not_one_for_each_operation():
    """Long after: with one wait for each operation nobody would be compared and memory would grow."""
    found = Judge()
    push_seconds(found, range(60))
    push_seconds(found, range(60, 160), silent=[7])
    assert count_compared(found, 2) > 10 * 150
    assert count_compared(found, 7) <= 10 * 60
    push_seconds(found, range(160, 190), silent=[7], slow=[2])
    assert [culprit.rank.rank for culprit in found.judgements()[0].culprits] == [2]
    push_seconds(found, range(190, 230), slow=[2], late=[7])
    assert count_compared(found, 7) > 10 * 60 + 10 * 20, "it is waited for again once it reports"


def test_memory_is_bounded_and_what_is_dropped_is_counted():
    found = Judge(JudgeSettings(max_workers=5, max_pending_ops=500))
    for runs in TRACE.runs:
        found.observe(runs, 0)
    found.settle(0, final=True)
    counts = found.judgements()[0].counts
    assert counts["refused_workers"] == sum(len(runs) for runs in TRACE.runs[5:])
    assert counts["ops"] <= 500
    assert counts["ops"] + counts["dropped_ops"] == sum(
        run.ops.size for runs in TRACE.runs[:5] for run in runs
    )


def test_two_jobs_are_judged_apart():
    other = simulate(seed=5)
    found = Judge()
    for trace, cluster in ((TRACE, "a"), (other, "b")):
        for runs in trace.runs:
            renamed = [replace(run, rank=replace(run.rank, cluster_id=cluster)) for run in runs]
            found.observe(renamed, 0)
    found.settle(0, final=True)
    one, two = found.judgements()
    assert (one.cluster_id, len(one.culprits)) == ("a", 1)
    assert (two.cluster_id, len(two.culprits)) == ("b", 0)
    assert two.charged_gpu_ns == 0


def simulate_without(*optypes, change):
    shape = replace(SHAPE, n_steps=4)
    work = change(build_work(shape, QUIET, np.random.default_rng(0)), None)
    table = run_job(shape, work)
    drop = [table.optypes.index(name) for name in optypes]
    return build_job_trace(table.where(~np.isin(table.optype, drop)), "job")


def test_a_job_that_only_reduces_at_the_end_is_paired_from_its_first_operation():
    trace = simulate_without("params-all-gather", change=slow(1.5, (2, 1), since=0))
    (culprit,) = judge(trace).culprits
    assert trace.find_step(culprit.detected_entry_ns) == 0
    assert culprit.onset.op_index == 0


def test_without_any_shared_collective_the_launchers_labels_tell_the_peers():
    trace = simulate_without(
        "params-all-gather", "grads-reduce-scatter", change=slow(1.5, (2, 1), since=1)
    )
    found = kinds(judge(trace))
    assert found["culprit"] == {(2, 1)}


def test_a_small_reduction_over_the_whole_job_does_not_make_everybody_peers():
    """A norm of 4 bytes on the greatest communicator; without labels only its size distinguishes it."""
    rng = np.random.default_rng(0)
    found = Judge()
    for rank in range(8):
        stage = rank % 2
        own = np.round((2.0 if stage else 1.0) * 1e8 * rng.normal(1, 0.02, 120)).astype(np.int64)
        entry = np.arange(120) * 10**9
        steps = [(seq, int(entry[seq]), 10**6, int(own[seq])) for seq in range(120)]
        gradients = small_run(Rank("c", f"n{rank}", rank), f"dp{stage}", rank // 2, 4, steps)
        norms = small_run(
            gradients.rank, "world", rank, 8, [(s, e + 10**8, 10**6, 0) for s, e, _, _ in steps]
        )
        norms.ops["n_bytes"] = 4
        found.observe([gradients, norms], 0)
    found.settle(0, final=True)
    (judgement,) = found.judgements()
    assert {len(verdict.peers) for verdict in judgement.verdicts} == {4}
    assert not any(verdict.is_alarm for verdict in judgement.verdicts)


def test_verdicts_of_one_group_share_the_list_of_its_members():
    found = judge(simulate(change=slow(1.5, (2, 1))))
    lists = {}
    for verdict in found.verdicts:
        lists.setdefault(verdict.peers, set()).add(id(verdict.peers))
    assert len(found.verdicts) > len(lists) > 0
    assert all(len(ids) == 1 for ids in lists.values()), "10 000 lists of 10 000 are a gigabyte"


@pytest.mark.parametrize("share_missing", [0.0, 0.3])
def test_what_is_read_of_all_members_at_once_is_what_is_read_of_each(share_missing):
    rng = np.random.default_rng(5)
    detector = EDetector(6, EDetectorSettings())
    (row,) = detector.add_groups(1)
    costs = rng.lognormal(0, 0.05, (300, 1, 6)) * 1e8
    costs[rng.random(costs.shape) < share_missing] = np.nan
    costs[:, :, 5] = np.nan
    detector.observe(np.array([row]), costs, np.array([300]))
    found = summarize(detector.slowdowns_of_all(int(row)))
    assert found[5] is None
    for worker in range(5):
        low, median, high = np.quantile(detector.slowdowns(int(row), worker, 0), (0.25, 0.5, 0.75))
        assert found[worker] == Slowdown(median=median, low=low, high=high)
