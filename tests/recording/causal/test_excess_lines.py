"""What a worker's lines and states add to the causes of its excess, and what they say of a rank that others wait for."""

from dataclasses import replace

import pytest
from tests.recording.causal.planted_work import LINES, explain, named, work

from ingero.model.counters import CodeLines, CudaWait, OffCpuTimes
from ingero.recording.causal.excess import describe_wait, find_hang_causes
from ingero.units import NS_PER_MS, NS_PER_S


def test_lines_of_the_program_stand_beside_computing_and_waiting():
    seen = OffCpuTimes(n_ops=50, io_ns=250 * NS_PER_MS)
    found = explain(0.5, work(100, 20, run_ms=11), work(400, 10), seen, LINES)
    computing, blocked = found.causes
    assert computing.evidence[-1] == (
        "running, of 100 looks: train.py:7 main → pad (40%); train.py:3 burn (30%)"
    )
    assert blocked.evidence[-1] == "waiting, of 100 looks: train.py:5 load (21%)"


def test_lines_tell_where_a_process_sleeps_when_nothing_else_explains_it():
    found = explain(0.5, work(100, 20), work(400, 10), OffCpuTimes(50), LINES)
    (cause,) = found.causes
    assert cause.kind == "unexplained"
    assert cause.evidence == ("asleep, of 100 looks: train.py:5 load (21%)",)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (CodeLines(reason="it runs no Python"), ("no line of its program: it runs no Python",)),
        (CodeLines(19, {}, {"train.py:5 load": 19}), ()),
        (CodeLines(100, {"train.py:5 load": 100}, {}), ()),
    ],
)
def test_too_few_looks_say_nothing_and_a_reason_is_told(lines, said):
    found = explain(0.5, work(100, 20), work(400, 10), OffCpuTimes(50), lines)
    assert found.causes[0].evidence == said


@pytest.mark.parametrize(
    ("states", "named_so"),
    [
        ({"T": 100}, [("stopped", 1.0)]),
        ({"t": 60, "T": 40}, [("stopped", 1.0)]),
        ({"R": 70, "S": 30}, [("more-computing", 0.7), ("asleep", 0.3)]),
        ({"D": 95, "S": 5}, [("blocked-io", 0.95)]),
        ({"S": 100}, [("asleep", 1.0)]),
        ({"I": 100}, [("asleep", 1.0)]),
        ({"S": 4}, [("unexplained", 1.0)]),
    ],
)
def test_a_rank_that_others_wait_for_is_told_by_its_state(states, named_so):
    found = find_hang_causes(replace(LINES, states=states), 2 * NS_PER_S)
    assert named(found) == named_so
    assert found.excess_ns == 2 * NS_PER_S


def test_a_rank_that_others_wait_for_is_told_with_its_line():
    (asleep,) = find_hang_causes(replace(LINES, states={"S": 100}), 2 * NS_PER_S).causes
    assert asleep.evidence == ("waiting, of 100 looks: train.py:5 load (21%)",)
    (running,) = find_hang_causes(replace(LINES, states={"R": 100}), 2 * NS_PER_S).causes
    assert running.evidence[0].startswith("running, of 100 looks: train.py:7 main → pad (40%)")


@pytest.mark.parametrize("state", ["R", "S"])
def test_a_rank_that_others_wait_for_and_that_waits_for_its_gpu_does_not_compute(state):
    waiting = describe_wait(CudaWait("cudaStreamSync", 3 * NS_PER_S), 15 * NS_PER_S)
    found = find_hang_causes(replace(LINES, states={state: 100}), 2 * NS_PER_S, waiting)
    (cause,) = found.causes
    assert (cause.kind, cause.name, cause.share) == ("gpu-computing", "waiting for its GPU", 1.0)
    assert cause.evidence == (
        "in cudaStreamSync for 12 s",
        "waiting, of 100 looks: train.py:7 main → pad (40%); train.py:3 burn (30%); train.py:5 load (21%)",
    )
    assert "Xid" in found.todo[0]
    stopped = find_hang_causes(replace(LINES, states={"T": 100}), 2 * NS_PER_S, waiting)
    assert named(stopped) == [("stopped", 1.0)]
