"""What a process that is slow is compared with."""

import numpy as np
import pytest
from tests.agent.diagnosis.asked_node import PID, RANK, Files

from ingero.agent.diagnosis.comparison import WorkComparison
from ingero.agent.diagnosis.history import CounterHistory
from ingero.model.collectives import COLLECTIVE_OP
from ingero.model.diagnosis import DiagnosisRequest
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_MS, NS_PER_S


@pytest.mark.parametrize("n_slow", [5, 8])
def test_a_first_operation_whose_own_time_nobody_saw_is_no_step_of_it(n_slow):
    """Two operations a second; the last ones take four times as long, and Fleet's onset is before all of them."""
    clock = ManualClock(60 * NS_PER_S)
    slow_ns = clock.mono_ns() - n_slow * NS_PER_S // 2
    history = CounterHistory(0, Files(clock, slow_ns))
    ops = np.zeros(80, COLLECTIVE_OP)
    ops["entry_ns"] = 20 * NS_PER_S + np.arange(1, 81) * NS_PER_S // 2
    ops["own_ns"] = np.where(ops["entry_ns"] > slow_ns, 400, 100) * NS_PER_MS
    ops["own_ns"][0] = -1
    history.add_ops(PID, RANK, ops)
    for half in range(40, 121):
        history.read(half * NS_PER_S // 2)
    request = DiagnosisRequest("00" * 8, 2, "", 0.5, 20 * NS_PER_S)
    after, before = WorkComparison(history, clock).find(PID, request)
    assert before is not None
    assert before.own_ns == pytest.approx(100 * NS_PER_MS, rel=0.05)
    assert abs(after.n_ops - n_slow) <= 1
