"""A recording names the tasks that took a thread's CPU, although they may be gone by the time it is written."""

import numpy as np

from ingero.agent.capture.events import BUILDERS
from ingero.agent.trace.recorder import Recorder
from ingero.config.invoker import find_invoker
from ingero.model.events import OffCpuReason
from ingero.recording.store.reader import load_recording
from ingero.testing.clock import ManualClock

SPAN = np.dtype([
    ("header", [("mono_ns", "<u8")]), ("off_ns", "<u8"), ("wait_ns", "<u8"), ("cgroup_id", "<u8"),
    ("pid", "<u4"), ("tid", "<u4"), ("other_pid", "<u4"), ("waker_pid", "<u4"), ("reason", "u1"),
    ("flags", "u1"), ("weight", "<u4"), ("other_comm", "S16"),
])  # fmt: skip


def test_preemptors_are_named_by_what_the_kernel_read(tmp_path):
    spans = np.zeros(3, SPAN)
    spans["pid"] = spans["tid"] = 70
    spans["weight"] = 1
    spans["other_pid"] = (8821, 8821, 9000)
    spans["other_comm"] = (b"logrotate", b"logrotate", b"idle-for-all-i-k")
    spans["reason"] = (OffCpuReason.PREEMPTED, OffCpuReason.PREEMPTED, OffCpuReason.SLEEP)
    recorder = Recorder(tmp_path / "r.db", "n", ManualClock(), invoker=find_invoker())
    recorder.on_events("off_cpus", spans, BUILDERS["off_cpus"](spans, 0))
    recorder.close()
    recording = load_recording(tmp_path / "r.db")
    assert len(recording.events) == 3
    assert recording.process_names == {(0, 8821): "logrotate"}
