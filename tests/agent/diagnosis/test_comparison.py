"""What a process that is slow is compared with."""

from dataclasses import replace

import numpy as np
import pytest
from tests.agent.diagnosis.asked_node import PID, RANK, Files

from ingero.agent.diagnosis.comparison import WorkComparison
from ingero.agent.diagnosis.history import CounterHistory
from ingero.model.collectives import COLLECTIVE_OP, UNKNOWN_NS
from ingero.model.diagnosis import DiagnosisRequest
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_MS, NS_PER_S

BEGAN_NS = 20 * NS_PER_S
PEER = replace(RANK, rank=5)


def build_comparison(n_late, **own_ms):
    """Two operations a second from `BEGAN_NS` on, 80 of them, the last ones with other own times; seen until 60 s.

    Args:
        n_late: How many operations are the last ones.
        own_ms: Of each process, ``slow`` or ``peer``, what its operations take before and late.
    """
    clock = ManualClock(60 * NS_PER_S)
    late_ns = clock.mono_ns() - n_late * NS_PER_S // 2
    history = CounterHistory(0, Files(clock, late_ns))
    who = {"slow": (PID, RANK), "peer": (PID + 1, PEER)}
    for name, (before_ms, late_ms) in own_ms.items():
        ops = np.zeros(80, COLLECTIVE_OP)
        ops["entry_ns"] = BEGAN_NS + np.arange(1, 81) * NS_PER_S // 2
        ops["own_ns"] = np.where(ops["entry_ns"] > late_ns, late_ms, before_ms) * NS_PER_MS
        ops["own_ns"][0] = UNKNOWN_NS
        history.add_ops(*who[name], ops)
    for half in range(40, 121):
        history.read(half * NS_PER_S // 2)
    return WorkComparison(history, clock)


def ask(excess_share, since_ns=BEGAN_NS):
    return DiagnosisRequest("00" * 8, RANK.rank, "", excess_share, since_ns, peers=(4, PEER.rank))


@pytest.mark.parametrize("n_slow", [5, 8])
def test_a_first_operation_whose_own_time_nobody_saw_is_no_step_of_it(n_slow):
    """Fleet's onset is before all of them."""
    comparison = build_comparison(n_slow, slow=(100, 400))
    after, before = comparison.find(PID, ask(0.5))
    assert before is not None
    assert before.own_ns == pytest.approx(100 * NS_PER_MS, rel=0.05)
    assert abs(after.n_ops - n_slow) <= 1


def test_an_own_time_that_is_not_known_adds_nothing():
    work = build_comparison(8, slow=(100, 400)).history.find_work(PID, BEGAN_NS, 24 * NS_PER_S)
    assert (work.n_ops, work.own_ns) == (7, 700 * NS_PER_MS)
    ops = build_comparison(8, slow=(100, 400)).history.find_ops(PID, BEGAN_NS, 24 * NS_PER_S)
    assert len(ops) == 7


def test_a_step_that_its_peers_made_too_is_no_reference():
    """Slow from its start, on a machine that has become slower."""
    slow = (100, 150)
    assert build_comparison(20, slow=slow).find(PID, ask(0.5))[1] is not None
    comparison = build_comparison(20, slow=slow, peer=(50, 75))
    after, before = comparison.find(PID, ask(0.5))
    assert before is None
    assert after.n_ops >= 19


def test_a_step_that_its_peers_made_less_of_is_one():
    """They wait for the same disk, or are slower for the same neighbour; it was as quick as they are."""
    comparison = build_comparison(20, slow=(55, 150), peer=(50, 75))
    _, before = comparison.find(PID, ask(0.5))
    assert before is not None
    assert before.own_ns == pytest.approx(55 * NS_PER_MS, rel=0.05)


def test_an_onset_of_before_which_it_was_as_far_above_its_peers_leaves_no_reference():
    comparison = build_comparison(20, slow=(100, 150), peer=(50, 75))
    assert comparison.find(PID, ask(0.5, 50 * NS_PER_S))[1] is None
    comparison = build_comparison(20, slow=(55, 150), peer=(50, 75))
    assert comparison.find(PID, ask(0.5, 50 * NS_PER_S))[1] is not None
