"""Peers whose CPU limits are used up are no faster without the rank that comes last: nobody is named for that."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.support.looks import cut_trace, look_often

from ingero.cli.commands.replay.offline import judge_trace
from ingero.detect.episodes import Took
from ingero.detect.groups import PairedOps
from ingero.detect.judge import Judge, JudgeSettings
from ingero.detect.slack import LimitInterval, count_excess, find_slack
from ingero.job_traces.readers import read_trace
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.verdicts import VerdictKind
from ingero.units import NS_PER_MS, NS_PER_S

DATA = Path(__file__).parents[1] / "data/cpu_limits"
RECORDED = DATA / "ddp_files.slow-rank-2-1.3x.batch-512.parquet"
ONSET_S = 29.683
RECORDED_WAIT = DATA / "ddp_files.first-use-1-2s.batch-512.parquet"
RECORDED_QUOTA = DATA / "ddp_files.cpu-quota-0-70pct.batch-512.parquet"
STEP_NS = 200 * NS_PER_MS
N_RANKS, LAST, N_OPS = 4, 1, 300


def paired(own_ms, entry_ms, limit_use):
    own = np.array(own_ms, np.int64) * NS_PER_MS
    entry = np.array(entry_ms, np.int64) * NS_PER_MS
    blank = np.zeros(own.shape, np.int64)
    return PairedOps(own, entry, blank, blank, np.array(limit_use, np.int64), blank[:, 0])


def slack_ms(ops, last_ms=(0, 0, 0)):
    counts = ops.own_ns >= 0
    own = np.where(counts, ops.own_ns, 0)
    found = find_slack(ops, own, counts, [at * NS_PER_MS for at in last_ms])
    return np.round(found.slack_ns / NS_PER_MS, 3).tolist()


def test_slack_is_the_time_since_the_last_operation_that_the_median_peer_leaves_unused():
    ops = paired(
        [[90, 50, 50], [90, 50, 50]],
        [[100, 101, 102], [200, 201, 202]],
        [[1000, 900, 800], [1000, 900, 700]],
    )
    assert slack_ms(ops) == [[9, 5, 5], [10, 10, 10]]
    assert slack_ms(ops, (0, 1, 82))[0] == [9, 10, 5]


def test_without_limits_slack_is_the_own_time_and_bounds_nothing():
    ops = paired([[90, 50, 50]], [[100, 101, 102]], [[0, 0, 0]])
    assert slack_ms(ops) == [[90, 50, 50]]
    most_have_none = paired([[90, 50, 50]], [[100, 101, 102]], [[1000, 0, 0]])
    assert slack_ms(most_have_none) == [[90, 50, 50]]


def test_a_member_that_is_missing_has_no_slack_and_is_no_peer():
    ops = paired(
        [[90, 50, 50], [-1, 50, 50], [90, 50, 50]],
        [[100, 101, 102], [-1, 201, 202], [300, 301, 302]],
        [[1000, 900, 900], [-1, 800, 600], [1000, 900, 900]],
    )
    assert slack_ms(ops, (1, 1, 1)) == [[9.9, 10.0, 10.1], [0.0, 30.0, 30.0], [20.0, 10.0, 10.0]]


def count(ops, excess_ms, latest, last_ms=(0, 0, 0)):
    counts = ops.own_ns >= 0
    own = np.where(counts, ops.own_ns, 0)
    slack = find_slack(ops, own, counts, [at * NS_PER_MS for at in last_ms])
    excess = np.array(excess_ms, np.int64) * NS_PER_MS
    counted, began = count_excess(ops, excess, counts, slack, latest)
    return np.round(counted / NS_PER_MS).astype(int).tolist(), began


def test_excess_counts_up_to_the_slack_of_its_interval_and_no_later_one():
    ops = paired(
        [[900, 500, 500]] * 4,
        [[1_000, 1_000, 1_000], [2_000, 2_000, 2_000], [15_000, 14_999, 14_999], [18_000] * 3],
        [[1000, 900, 900], [1000, 800, 800], [1000, 500, 500], [1000, 0, 0]],
    )
    counted, began = count(
        ops, [[400, 0, 0], [150, 0, 0], [0, 0, 0], [400, 0, 0]], fresh(3), (1, 1, 1)
    )
    # 100 of 400; then 300 of 550 in all; what the next interval leaves unused adds nothing; then there is no limit.
    assert [row[0] for row in counted] == [100, 200, 0, 400]
    assert began[:, 0].tolist() == [0, 0, 2, 3]
    assert began[:, 1].tolist() == [0, 0, 0, 3]


def test_what_a_replica_shares_is_taken_from_the_excess_and_from_what_of_it_counts():
    took = Took(own_ns=160, excess_ns=60, slack_ns=90, span_ns=200, counted_ns=50)
    alone = took.less(1.5)  # its peers took 100, and others of its replica half as long again
    assert (alone.excess_ns, alone.counted_ns, alone.is_bound) == (10, 10, False)
    assert alone.ratio_within_limits == pytest.approx(200 / 190)
    assert took.is_bound
    assert took.ratio_within_limits == pytest.approx(200 / 150)


def fresh(n):
    return [LimitInterval() for _ in range(n)]


def test_what_counts_of_the_excess_does_not_depend_on_how_operations_are_cut():
    rng = np.random.default_rng(1)
    n, m = 400, 4
    own = rng.integers(50, 200, (n, m))
    own[rng.random((n, m)) < 0.1] = -1
    use = rng.integers(300, 1000, (n, 1)) * (
        rng.random((n, 1)) < np.repeat([1, 0, 0.9, 1], n // 4)[:, None]
    )
    entry = np.cumsum(rng.integers(100, 900, (n, 1)), axis=0) + rng.integers(0, 50, (n, m))
    excess = np.where(own < 0, 0, rng.integers(-80, 200, (n, m)))
    excess = np.minimum(excess, np.maximum(own, 0))

    def cut(*bounds):
        latest, found, last = fresh(m), [], (0,) * m
        for first, end in pairwise((0, *bounds, n)):
            some = slice(first, end)
            ops = paired(
                own[some],
                np.where(own[some] < 0, -1, entry[some]),
                np.where(own[some] < 0, -1, use[some]),
            )
            ops = replace(ops, own_ns=np.where(own[some] < 0, -1, ops.own_ns))
            found += count(ops, excess[some], latest, last)[0]
            seen = np.where(own[:end] < 0, 0, entry[:end]).max(axis=0)
            last = tuple(seen.tolist())
        return found, latest

    assert cut(1, 2, 57, 58, 99, 100, 130, 150, 180, 250, 333) == cut()


def report(first, last, limit_use, factor=1.45):
    """What four ranks of a job push, one of them the last to arrive, with the use of their CPU limits."""
    rng = np.random.default_rng(0)
    noise = rng.normal(1.0, 0.02, (N_RANKS, N_OPS))
    for rank in range(N_RANKS):
        ops = np.zeros(N_OPS, COLLECTIVE_OP)
        ops["seq"] = np.arange(N_OPS)
        own = 120 * NS_PER_MS * noise[rank] * (factor if rank == LAST else 1.0)
        ops["own_ns"] = own.astype(np.int64)
        ops["inside_ns"] = STEP_NS - ops["own_ns"]
        ops["entry_ns"] = NS_PER_S + STEP_NS * np.arange(N_OPS) + ops["own_ns"]
        ops["n_bytes"], ops["op"] = 1 << 21, CollectiveOp.ALL_REDUCE
        ops["limit_use"] = limit_use[rank]
        who = Rank("c", f"n{rank}", rank)
        yield CollectiveRun(who, "a" * 16, rank, N_RANKS, ClockKind.SYNC, ops[first:last])


def judge(limit_use, n_pushes=1, with_history=False, **changes):
    judge = Judge()
    bounds = np.linspace(0, N_OPS, n_pushes + 1).astype(int).tolist()
    for at, (first, last) in enumerate(pairwise(bounds)):
        judge.observe(list(report(first, last, limit_use, **changes)), at * NS_PER_S)
        judge.settle(at * NS_PER_S)
    judge.settle(10 * N_OPS * NS_PER_S, final=True)
    (judgement,) = judge.judgements(with_history=with_history)
    return judgement


@pytest.mark.parametrize("with_history", [False, True])
def test_the_last_to_arrive_is_no_culprit_where_its_peers_limits_are_used_up(with_history):
    judgement = judge((890, 1000, 880, 870), with_history=with_history)
    verdict = judgement.verdicts[LAST]
    assert verdict.kind is VerdictKind.DRAG
    assert "own time 1.4" in verdict.reason
    assert "whose CPU limits let them be 1.1" in verdict.reason
    # No more is charged than they could have been faster: 12 % of 300 steps of 200 ms, from where it was found slow.
    assert verdict.excess_ns <= 0.12 * N_OPS * STEP_NS


@pytest.mark.parametrize("limit_use", [(0, 0, 0, 0), (770, 990, 770, 760), (0, 1000, 0, 0)])
def test_a_slow_rank_is_named_where_its_peers_have_room(limit_use):
    verdict = judge(limit_use).verdicts[LAST]
    assert verdict.kind is VerdictKind.CULPRIT
    assert verdict.reason.startswith("own time 1.45× that of its 3 peers,")


@pytest.mark.parametrize(
    ("limit_use", "said"), [(950, "; their CPU limits are used up to 95%"), (700, ""), (0, "")]
)
def test_ranks_that_are_slow_in_turns_are_told_where_it_is_their_limits(limit_use, said):
    judge = Judge()
    for run in report(0, N_OPS, (limit_use,) * N_RANKS, factor=1.0):
        is_slow = np.arange(N_OPS) % N_RANKS == run.rank.rank
        run.ops["own_ns"][is_slow] *= 2
        run.ops["inside_ns"] = STEP_NS - run.ops["own_ns"]
        judge.observe([run], 0)
    judge.settle(0, final=True)
    (judgement,) = judge.judgements()
    assert {verdict.kind for verdict in judgement.verdicts} == {VerdictKind.IMBALANCE_DATA}
    for verdict in judgement.verdicts:
        assert verdict.reason.endswith("something holds now one back and now another" + said)


SLOWER, WAITING_USE = 3, 550


def report_change(first, last):
    """The same job: after half of the time another rank takes twice as long, and its peers wait for it."""
    half = N_OPS // 2
    for run in report(first, last, (890, 1000, 880, 870)):
        later = run.ops["seq"] >= half
        own = (120 if run.rank.rank != SLOWER else 240) * NS_PER_MS
        run.ops["own_ns"][later] = own
        run.ops["inside_ns"][later] = 300 * NS_PER_MS - own
        run.ops["entry_ns"][later] += (
            (run.ops["seq"][later].astype(np.int64) - half) * 100 * NS_PER_MS
        )
        run.ops["limit_use"][later] = WAITING_USE if run.rank.rank != SLOWER else 900
        yield run


def test_room_that_limits_leave_later_says_nothing_of_the_time_before():
    looks = (report_change(at, at + 5) for at in range(0, N_OPS, 5))
    assert look_often(looks, every_s=1.0) == {SLOWER: pytest.approx(45, abs=10)}


@pytest.mark.parametrize("limited", [slice(None), slice(0, N_OPS, 2), slice(100, 150)])
def test_how_the_operations_were_cut_into_pushes_changes_nothing(limited):
    def judge(n_pushes):
        judge = Judge()
        bounds = np.linspace(0, N_OPS, n_pushes + 1).astype(int).tolist()
        for at, (first, last) in enumerate(pairwise(bounds)):
            runs = list(report_change(first, last))
            for run in runs:
                known = np.isin(run.ops["seq"], np.arange(N_OPS)[limited])
                run.ops["limit_use"][~known] = 0
            judge.observe(runs, at * NS_PER_S)
            judge.settle(at * NS_PER_S)
        judge.settle(10 * N_OPS * NS_PER_S, final=True)
        return judge.judgements(with_history=True)

    assert judge(37) == judge(1)


def test_a_rank_so_slow_that_its_peers_wait_in_spite_of_their_limits_is_named():
    verdict = judge((700, 1000, 690, 710), factor=1.6).verdicts[LAST]
    assert verdict.kind is VerdictKind.CULPRIT


def name_ranks(trace):
    """Whoever was named at any time, by rank: when, in seconds from the fault on."""
    named = {}
    for judgement in judge_trace(trace, JudgeSettings()):
        for verdict in judgement.culprits:
            at_s = verdict.detected_entry_ns / NS_PER_S - ONSET_S
            named.setdefault(verdict.rank.rank, at_s)
    return named


def test_in_a_real_job_only_the_rank_with_the_fault_is_named():
    trace = read_trace(RECORDED)
    (rank,) = name_ranks(trace).items()
    assert rank == (2, pytest.approx(5.3, abs=0.1))
    for runs in trace.runs:
        for run in runs:
            run.ops["limit_use"] = 0
    unbound = name_ranks(trace)
    assert unbound[0] < 0, "an innocent rank, before any fault"
    assert unbound[2] == rank[1], (
        "what limits leave is enough for the slow one: it is named no later"
    )


def test_in_a_real_job_the_slow_rank_is_named_as_soon_as_its_peers_wait_and_no_other_is():
    named = look_often(cut_trace(read_trace(RECORDED_QUOTA)))
    assert named == {0: pytest.approx(60, abs=5)}, "the fault begins at 40.4 s"


def test_a_moment_in_which_all_waited_makes_no_room_for_the_last_to_be_named():
    assert look_often(cut_trace(read_trace(RECORDED_WAIT), 1.0), 1.0) == {}
