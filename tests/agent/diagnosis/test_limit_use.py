"""How much of its CPU limit a rank's host uses, from readings of the kernel's counters."""

import numpy as np
import pytest

from ingero.agent.diagnosis.history import CounterHistory
from ingero.model.collectives import COLLECTIVE_OP, Rank
from ingero.model.counters import ProcessCounters, Quota, QuotaMember, TaskTimes, Work
from ingero.recording.causal.work_rates import find_limit_use
from ingero.units import NS_PER_S

PID = 40
RANK = Rank("c", "n", 3)
HOG = QuotaMember(9, 0, "hog")


def reading(second, *limits, main=0.25, worker=0.5, hog=0.0):
    """Processors in use are constant from the start."""
    mono_ns = round(second * NS_PER_S)
    return ProcessCounters(
        mono_ns,
        {PID: TaskTimes(round(main * mono_ns), 0)},
        tuple(Quota(limit, at, {HOG: round(hog * mono_ns)}) for at, limit in enumerate(limits)),
        children={PID + 1: TaskTimes(round(worker * mono_ns), 0)},
    )


def use(*limits, cuda_ns=None, **amounts):
    first, last = reading(1, *limits, **amounts), reading(5, *limits, **amounts)
    return find_limit_use(Work(first, last, 0, 0, cuda_ns))


def test_use_is_of_all_threads_children_and_others_under_the_quota():
    assert use(1.0) == pytest.approx(0.75)
    assert use(1.0, hog=0.125) == pytest.approx(0.875)


def test_of_several_quotas_the_one_that_is_closest_counts_and_without_one_nothing():
    assert use(4.0, 1.0, 2.0) == pytest.approx(0.75)
    assert use() == 0.0


def test_threads_that_wait_for_a_device_spin_and_count_for_nothing():
    assert use(1.0, cuda_ns=NS_PER_S) == pytest.approx(0.5)
    assert use(1.0, cuda_ns=9 * NS_PER_S) == 0.0


class Files:
    """Readings in their order."""

    def __init__(self, readings):
        self._readings = list(readings)

    def read(self, pid, mono_ns, before=None):
        return self._readings.pop(0)


def follow(history):
    return history.add_ops(PID, RANK, np.zeros(1, COLLECTIVE_OP))


def test_what_is_pushed_is_the_use_of_the_last_seconds_and_never_more_than_all():
    idle = [reading(second, 1.0, main=0.0, worker=0.0) for second in range(20)]
    busy = [reading(20 + second, 0.7, main=0.5, worker=0.5) for second in range(20)]
    history = CounterHistory(0, Files(idle + busy))
    assert follow(history) == 0, "nothing was read yet"
    for second in range(20):
        history.read(second * NS_PER_S)
    assert follow(history) == 0
    for second in range(20, 40):
        history.read(second * NS_PER_S)
    assert follow(history) == 1000


def test_a_rank_without_a_limit_pushes_none():
    history = CounterHistory(0, Files([reading(1), reading(2)]))
    follow(history)
    history.read(NS_PER_S)
    history.read(2 * NS_PER_S)
    assert follow(history) == 0
