"""What agents of a recorded job send, and in which order."""

import numpy as np
import pytest

from ingero.job_traces.model import STEP, JobTrace, iter_pushes
from ingero.job_traces.readers import find_packaged, read_trace
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveRun, Rank
from ingero.units import NS_PER_S


@pytest.fixture(scope="module")
def trace():
    return read_trace(find_packaged("AR"))


def test_every_operation_is_pushed_once(trace):
    pushed = sum(run.ops.size for push in iter_pushes(trace, 7 * NS_PER_S) for run in push.runs)
    assert pushed == trace.n_ops


def test_a_worker_s_operations_are_told_in_the_order_it_entered_them(trace):
    told_until = {}
    for push in iter_pushes(trace, NS_PER_S):
        if not push.runs:
            continue
        entries = np.concatenate([run.ops["entry_ns"] for run in push.runs])
        assert entries.min() > told_until.get(push.worker, -1)
        told_until[push.worker] = entries.max()
        ends = np.concatenate([run.ops["entry_ns"] + run.ops["inside_ns"] for run in push.runs])
        assert ends.max() <= push.at_ns


def overlapping(*ops):
    """One worker whose operations, each (communicator, entry, inside), overlap; seconds."""
    rank = Rank("c", "n", 0)
    runs = []
    for comm in sorted({comm for comm, _, _ in ops}):
        mine = [(entry, inside) for name, entry, inside in ops if name == comm]
        rows = np.zeros(len(mine), COLLECTIVE_OP)
        rows["seq"] = range(len(mine))
        rows["entry_ns"] = [entry * NS_PER_S for entry, _ in mine]
        rows["inside_ns"] = [inside * NS_PER_S for _, inside in mine]
        runs.append(CollectiveRun(rank, comm, 0, 2, ClockKind.DEVICE, rows))
    steps = np.array([(0, 0, 40 * NS_PER_S)], STEP)
    return JobTrace("t", (rank,), (tuple(runs),), steps)


def reported(trace):
    """For each push its moment and what it reports, as (communicator, entry)."""
    return [
        (push.at_ns // NS_PER_S, sorted((r.comm, int(e) // NS_PER_S) for r in push.runs for e in r.ops["entry_ns"]))
        for push in iter_pushes(trace, 10 * NS_PER_S)
        if push.runs
    ]  # fmt: skip


def test_operation_waits_for_one_that_was_entered_before_it_and_lasts_longer():
    assert reported(overlapping(("a", 1, 14), ("b", 2, 3), ("b", 16, 1))) == [
        (20, [("a", 1), ("b", 2), ("b", 16)])
    ]


def test_operations_entered_together_are_told_together():
    assert reported(overlapping(("a", 1, 2), ("b", 1, 14))) == [(20, [("a", 1), ("b", 1)])]
