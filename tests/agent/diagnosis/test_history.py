"""What the agent keeps of counters and operations, to look back."""

from dataclasses import replace

import numpy as np
import pytest
from tests.agent.diagnosis.asked_node import PID, RANK, Files, Listed, Node

from ingero.agent.diagnosis.history import MAX_OPS, MAX_READINGS, READ_NS, CounterHistory
from ingero.model.collectives import COLLECTIVE_OP
from ingero.model.counters import (
    ProcessCounters,
    TaskTimes,
)
from ingero.recording.causal.work_rates import find_rates
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


def test_workers_that_a_loader_starts_anew_count_as_the_ones_whose_places_they_take():
    """Each epoch has two of its own, which are always on a processor; the last ones have just begun."""

    def reading(second):
        epoch, since_s = divmod(second, 20)
        times = TaskTimes(since_s * NS_PER_S, 0, 20 * epoch)
        return ProcessCounters(
            second * NS_PER_S,
            {PID: TaskTimes(second * NS_PER_S // 4, 0)},
            children={100 * epoch + 7: times, 100 * epoch + 8: times},
            boot_ticks=second,
        )

    history = CounterHistory(0, Listed(map(reading, range(62))))
    ops = np.zeros(62, COLLECTIVE_OP)
    ops["entry_ns"], ops["own_ns"] = np.arange(62) * NS_PER_S, NS_PER_S // 2
    history.add_ops(PID, RANK, ops)
    for second in range(62):
        history.read(second * NS_PER_S)
    rates = find_rates(history.find_work(PID, 0, 62 * NS_PER_S))
    assert rates.child_pid == 307
    assert rates.computing_ns == pytest.approx(NS_PER_S, rel=0.1)
    assert rates.n_unknown_threads == 0


def build_history_with_calls(calls):
    """Readings at 0, 1, ... 10 s, an operation in each, and times in calls of CUDA by second."""
    seconds = [NS_PER_S * second for second in range(11)]
    readings = [ProcessCounters(at, {PID: TaskTimes(at, 0)}) for at in seconds]
    history = CounterHistory(0, Listed(readings))
    ops = np.zeros(10, COLLECTIVE_OP)
    ops["entry_ns"], ops["own_ns"] = seconds[1:], NS_PER_S // 4
    history.add_ops(PID, RANK, ops)
    for at, took_ns in calls:
        history.add_calls(at, took_ns)
    for at in seconds:
        history.read(at)
    return history


def test_time_in_calls_of_cuda_is_that_between_the_readings():
    calls = [
        (NS_PER_S * second, {PID: NS_PER_S * (0.8 if second > 5 else 0.4), PID + 1: 9e9})
        for second in range(11)
    ]
    history = build_history_with_calls(calls)
    early, late = (
        history.find_work(PID, NS_PER_S * first, NS_PER_S * (first + 5)) for first in (1, 6)
    )
    assert early.cuda_ns == pytest.approx(0.4 * 4 * NS_PER_S + 0.8 * NS_PER_S, rel=0.01)
    assert late.cuda_ns == pytest.approx(0.8 * (late.last.mono_ns - late.first.mono_ns), rel=0.01)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [(NS_PER_S * second, {PID + 1: 1e9}) for second in range(11)],
        [(NS_PER_S * second, {PID: 1e9}) for second in (0, 1, 2, 3)],
    ],
    ids=["none", "of another process", "of a third of the time"],
)
def test_time_in_calls_of_cuda_is_unknown_where_none_is_seen(calls):
    history = build_history_with_calls(calls)
    assert history.find_work(PID, 0, 11 * NS_PER_S).cuda_ns is None


def test_history_keeps_a_bounded_stretch_and_forgets_a_process_that_ended():
    node = Node()
    for second in range(MAX_READINGS + 100):
        node.history.read((100 + second) * NS_PER_S)
    work = node.history.find_work(PID, 0, 10_000 * NS_PER_S)
    assert work.last.mono_ns - work.first.mono_ns == (MAX_READINGS - 1) * NS_PER_S
    ops = np.zeros(MAX_OPS, COLLECTIVE_OP)
    node.history.add_ops(PID, RANK, ops)
    node.history.read_due((100 + MAX_READINGS + 99) * NS_PER_S + READ_NS - 1)
    assert node.history.find_work(PID, 0, 10_000 * NS_PER_S).last == work.last
    assert node.history._followed[PID].n_ops == MAX_OPS
    node.history._files = Listed([None])
    node.history.read((101 + MAX_READINGS + 99) * NS_PER_S)
    assert node.history.find(2, "") is None
    assert node.history.find_work(PID, 0, 10_000 * NS_PER_S) is None


def test_rank_that_begins_again_on_its_node_is_its_new_process():
    """The old one's last operations are delivered after its end."""

    class Alive(Files):
        def read(self, pid, mono_ns, before=None):
            return super().read(pid, mono_ns, before) if pid != PID else None

    clock = ManualClock(100 * NS_PER_S)
    history = CounterHistory(0, Alive(clock, clock.mono_ns()))
    ops = np.ones(3, COLLECTIVE_OP)
    history.add_ops(PID, RANK, ops)
    history.add_ops(PID + 1, RANK, ops)
    history.read(NS_PER_S)
    assert history.find(2, "") == (PID + 1, RANK)


def test_a_process_that_got_the_number_of_another_one_is_not_taken_for_it():
    readings = [
        ProcessCounters(second, {PID: TaskTimes(ran_ns, 0, start_ticks)})
        for second, ran_ns, start_ticks in ((1, 10, 5), (2, 20, 5), (3, 900, 7))
    ]
    history = CounterHistory(0, Listed(readings))
    history.add_ops(PID, RANK, np.ones(1, COLLECTIVE_OP))
    history.read(1)
    history.read(2)
    assert history.find(2, "") == (PID, RANK)
    history.read(3)
    assert history.find(2, "") is None


def test_the_busiest_thread_is_the_one_that_runs_and_not_one_that_waits_for_a_used_up_quota():
    seconds = NS_PER_S * np.arange(1, 4)
    children = [{9: TaskTimes(at // 3, at // 9)} for at in seconds.tolist()]
    readings = [
        ProcessCounters(
            at, {PID: TaskTimes(at // 4, at // 8), PID + 1: TaskTimes(at // 9, at // 2)}
        )
        for at in seconds.tolist()
    ]
    readings = [replace(one, children=busy) for one, busy in zip(readings, children, strict=True)]
    history = CounterHistory(0, Listed(readings))
    history.add_ops(PID, RANK, np.ones(1, COLLECTIVE_OP))
    for at in range(3):
        history.read(at)
    assert history.find_busiest(PID) == PID
    assert history.find_worker(PID) == 9  # wants one longer than the thread that computes
