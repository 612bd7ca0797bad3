"""What records of switches add up to; the real ones are in `tests/kernel/test_switches.py`."""

import numpy as np
import pytest

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.diagnosis.children import Children
from ingero.agent.diagnosis.switches import _Sums
from ingero.model.events import OffCpuReason

PID = 40


@pytest.mark.parametrize(
    ("reason", "field"),
    [(OffCpuReason.STOPPED, "stopped_ns"), (OffCpuReason.BLOCKED_IO, "io_ns")],
)
def test_when_it_was_ready_again_is_no_part_of_what_kept_a_thread(reason, field):
    sums, records = _Sums(PID, PID, Children(PID)), np.zeros(3, get_dtype("off_cpu"))
    records["tid"], records["reason"], records["weight"] = [PID, PID, PID + 1], reason, 1
    records["off_ns"], records["wait_ns"] = 100, [40, 0, 0]
    sums.add_switches(records)
    assert getattr(sums.conclude(0, 1000), field) == 160
