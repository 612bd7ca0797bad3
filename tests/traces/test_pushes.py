"""What agents of a recorded job send, and in which order."""

import numpy as np
import pytest

from ingero.traces.model import iter_pushes
from ingero.traces.packaged import find_packaged
from ingero.traces.readers import read_trace
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
