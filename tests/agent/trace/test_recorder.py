"""What a recorder writes beside the rows: who took a thread's CPU, and when the run ended."""

import os
import sqlite3
import subprocess
from contextlib import closing

import numpy as np
import pytest

from ingero.agent.capture.discover.identity import ProcessIdentity
from ingero.agent.capture.discover.processes import find_family
from ingero.agent.capture.events import BUILDERS
from ingero.agent.capture.kernel.abi import ProcessEvent, get_dtype
from ingero.agent.trace.recorder import Recorder
from ingero.agent.trace.selection import NAMED_NS, Selection
from ingero.config.invoker import find_invoker
from ingero.model.events import HostOp, NcclOp, OffCpuReason, Source
from ingero.recording.causal.engine import explain
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.store.reader import load_recording
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_MS, NS_PER_S

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


class Names:
    """A sink that keeps the names alone, in the order in which it got them."""

    def __init__(self):
        self.put = []

    def put_process_names(self, names, _seen_wall_ns):
        self.put += names.items()


def take_cpu(selection, pid, name):
    spans = np.zeros(1, SPAN)
    spans["reason"], spans["other_pid"], spans["other_comm"] = OffCpuReason.PREEMPTED, pid, name
    selection.on_events("off_cpus", spans, BUILDERS["off_cpus"](spans, 0))


def end_recorded(selection, pid):
    ended = np.zeros(1, get_dtype("process"))
    ended["pid"], ended["event"] = pid, ProcessEvent.EXIT
    selection.on_events("processes", ended, BUILDERS["processes"](ended, 0))


def test_a_preemptor_with_a_pid_that_was_used_before_gets_its_own_name():
    clock, names = ManualClock(), Names()
    selection = Selection(clock, [names])
    take_cpu(selection, 8821, b"logrotate")
    clock.advance(NAMED_NS - NS_PER_S)
    take_cpu(selection, 8821, b"logrotate")
    assert names.put == [(8821, "logrotate")]
    clock.advance(NS_PER_S)
    take_cpu(selection, 8821, b"rsync")
    assert names.put == [(8821, "logrotate"), (8821, "rsync")]


@pytest.mark.parametrize(
    "end", [end_recorded, lambda selection, pid: selection.on_unrecorded_ends([pid])]
)
def test_a_process_of_the_trace_keeps_its_name_until_it_ends(end):
    clock, names = ManualClock(), Names()
    selection = Selection(clock, [names])
    selection.on_process(ProcessIdentity(70, name="python"))
    for _ in range(2):
        clock.advance(NAMED_NS)
        take_cpu(selection, 70, b"pt_autograd_0")
    assert names.put == [(70, "python")]
    end(selection, 70)
    take_cpu(selection, 70, b"make")
    assert names.put == [(70, "python"), (70, "make")]


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_step_of_the_wall_clock_makes_no_rank_silent_at_the_end(tmp_path, step_s):
    """Rows are on the clock that the run began with; a recording ends in the middle of a step of the job."""
    path = tmp_path / "r.db"
    job = RecordingBuilder("n")
    for rank, n_ops in enumerate((200, 199)):
        for seq in range(n_ops):
            job.call(
                (Source.NCCL, NcclOp.ALL_REDUCE), seq * 40 * NS_PER_MS, NS_PER_MS, 6000 + rank,
                gpu_id=rank, arg0=1 << 20, arg1=0xA, arg2=seq, arg3=rank << 32 | 2,
            )  # fmt: skip
    job.call((Source.HOST, HostOp.EXEC), 8 * NS_PER_S, 0, 77)
    job.write(path)
    clock = ManualClock(wall_ns=START_NS)
    recorder = Recorder(path, "n", clock, invoker=find_invoker())
    clock.advance(8 * NS_PER_S)
    clock.step_wall(step_s * NS_PER_S)
    recorder.close()
    recording = load_recording(path)
    assert [one.title for one in explain(recording).incidents] == []
    assert max(one.stopped_wall_ns for one in recording.sessions) == START_NS + 8 * NS_PER_S


def test_the_parent_and_the_children_of_a_process_are_noted_when_it_is_first_seen(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            family = find_family(os.getpid())
            assert family[child.pid] == os.getpid()
            assert family[os.getpid()] == os.getppid()
            recorder = Recorder(tmp_path / "r.db", "n", ManualClock(), invoker=find_invoker())
            recorder.on_process(ProcessIdentity(os.getpid(), name="pytest"))
            recorder.close()
        finally:
            child.kill()
    assert find_family(2**31 - 1) == {}
    with closing(sqlite3.connect(tmp_path / "r.db")) as connection:
        rows = connection.execute("SELECT pid, parent FROM process_parents").fetchall()
    assert (child.pid, os.getpid()) in rows
    assert (os.getpid(), os.getppid()) in rows
