"""Which report of a job comes first changes nothing: Fleet may begin in the middle, and a new node may report first."""

from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest

from ingero.detect.judge import Judge
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.verdicts import VerdictKind
from ingero.units import NS_PER_MS, NS_PER_S

PART_S, N_OPS = 10, 200
"""Seconds between two pushes of a rank, and operations in one."""


def build_ops(n_ranks, n_ops, slow, seed=0):
    """Operations of each rank, in order, of which one takes 1.5 times as long for its own work."""
    own = (
        20 * NS_PER_MS * (1 + 0.02 * np.random.default_rng(seed).standard_normal((n_ranks, n_ops)))
    )
    own[slow] *= 1.5
    own = own.astype(np.int64)
    arrived = own.max(axis=0)
    ops = np.zeros((n_ranks, n_ops), COLLECTIVE_OP)
    ops["own_ns"], ops["inside_ns"] = own, arrived - own + NS_PER_MS
    ops["entry_ns"] = np.cumsum(arrived + NS_PER_MS) - ops["inside_ns"] + 1
    ops["seq"], ops["n_bytes"], ops["op"] = np.arange(n_ops), 1 << 24, CollectiveOp.ALL_REDUCE
    return ops


def build_run(rank, n_ranks, ops, comm="aa"):
    who = Rank("c", f"node{rank}", rank, 1)
    return CollectiveRun(who, comm, rank, n_ranks, ClockKind.DEVICE, ops)


def name_slow(found, now_ns):
    for after_s in (0, 70):
        found.settle(now_ns + after_s * NS_PER_S)
    (judgement,) = found.judgements()
    return {one.rank.rank: one.kind for one in judgement.verdicts}


@pytest.mark.parametrize("starts", [(0,) * 8, (0, 0, 0, 1, 0, 0, 0, 0), (0, 1) * 4])
def test_of_two_equal_communicators_it_does_not_matter_which_each_rank_is_seen_on_first(starts):
    """It gathers on one and scatters on the other, in turns, as a job does that keeps the two apart."""
    n_parts = 12
    ops = build_ops(8, N_OPS * (n_parts + 1), slow=3)
    ops["op"] = np.where(
        np.arange(ops.shape[1]) % 2 == 0, CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER
    )
    ops["seq"] //= 2
    found = Judge()
    for part in range(1, n_parts):
        for rank, start in enumerate(starts):
            pushed = ops[rank, N_OPS * part + start : N_OPS * (part + 1) + start]
            kinds = [CollectiveOp.ALL_GATHER, CollectiveOp.REDUCE_SCATTER]
            runs = [
                build_run(rank, 8, pushed[pushed["op"] == kind], comm)
                for kind, comm in zip(kinds, ("aa", "bb"), strict=True)
            ]
            found.observe(runs[:: -1 if start else 1], part * PART_S * NS_PER_S)
        found.settle(part * PART_S * NS_PER_S)
    kinds = name_slow(found, n_parts * PART_S * NS_PER_S)
    assert kinds == {
        rank: VerdictKind.CULPRIT if rank == 3 else VerdictKind.VICTIM for rank in range(8)
    }


@pytest.mark.parametrize("order", [1, -1])
def test_a_new_node_of_a_job_that_meets_under_its_old_name_may_report_first(order):
    """Eight ranks, and nine once it was started again; the ninth is slow."""
    lives = [(8, build_ops(8, 6 * N_OPS, slow=[]), 0), (9, build_ops(9, 20 * N_OPS, slow=8), 100)]
    found = Judge()
    for n_ranks, ops, began_s in lives:
        ops["entry_ns"] += began_s * NS_PER_S
        for part in range(ops.shape[1] // N_OPS):
            now_ns = (began_s + (part + 1) * PART_S) * NS_PER_S
            for rank in range(n_ranks)[::order]:
                pushed = ops[rank, N_OPS * part : N_OPS * (part + 1)]
                found.observe([build_run(rank, n_ranks, pushed)], now_ns)
            found.settle(now_ns)
    kinds = name_slow(found, now_ns)
    assert kinds == {
        rank: VerdictKind.CULPRIT if rank == 8 else VerdictKind.VICTIM for rank in range(9)
    }


def test_one_that_comes_late_to_a_job_that_is_started_again_soon_after_is_not_taken_for_new():
    """It reported in the old life, as far as the others had come."""
    lives = [(build_ops(8, 6 * N_OPS, slow=[]), 0), (build_ops(8, 20 * N_OPS, slow=7), 100)]
    found = Judge()
    for life, (ops, began_s) in enumerate(lives):
        ops["entry_ns"] += began_s * NS_PER_S
        for part in range(ops.shape[1] // N_OPS):
            now_ns = (began_s + (part + 1) * PART_S) * NS_PER_S
            for rank in range(8):
                if rank < 7 or life or part == 5:
                    found.observe(
                        [build_run(rank, 8, ops[rank, N_OPS * part : N_OPS * (part + 1)])], now_ns
                    )
            found.settle(now_ns)
    kinds = name_slow(found, now_ns)
    assert kinds == {
        rank: VerdictKind.CULPRIT if rank == 7 else VerdictKind.VICTIM for rank in range(8)
    }


@pytest.mark.parametrize("late", [1, 2])
def test_one_whose_first_push_is_cut_and_overtaken_is_not_taken_for_new(late):
    """A first life of four seconds, which all but one push whole; the rest of that one comes in the second life."""
    first, second = build_ops(8, N_OPS, slow=[]), build_ops(8, 20 * N_OPS, slow=0, seed=1)
    second["entry_ns"] += 20 * NS_PER_S
    pushes = [(5, rank, first[rank]) for rank in range(8) if rank != late]
    pushes += [(5, late, first[late][:80]), (30, late, first[late][80:])]
    pushes += [
        (25 + 5 * part, rank, second[rank, N_OPS * part : N_OPS * (part + 1)])
        for part in range(20)
        for rank in range(8)
    ]
    found = Judge()
    for at_s, together in groupby(sorted(pushes, key=itemgetter(0)), itemgetter(0)):
        for _, rank, pushed in together:
            found.observe([build_run(rank, 8, pushed)], at_s * NS_PER_S)
        found.settle(at_s * NS_PER_S)
    kinds = name_slow(found, at_s * NS_PER_S)
    assert kinds == {
        rank: VerdictKind.CULPRIT if rank == 0 else VerdictKind.VICTIM for rank in range(8)
    }
