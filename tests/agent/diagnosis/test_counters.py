"""Counters of processes: this one's own, and a planted machine's of either version of cgroups."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.agent.capture.discover.cgroups import Cgroups
from ingero.agent.diagnosis.counters import CounterFiles
from ingero.model.counters import Quota

TICK_NS = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path):
    """Processes 5, its child 6, a neighbour 7 that is a child of 1; all in the cgroup ``a/b``."""
    for pid, parent, name in ((5, 1, "train"), (6, 5, "worker"), (7, 1, "stress) 1")):
        folder = tmp_path / "proc" / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        fields = ["S", parent, *[0] * 7, 12, 0, 30, 10, 0, 0, 20, 3, *[0] * 5]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        (folder / "task" / str(pid) / "schedstat").write_text(f"{pid}000 {pid}00 9\n")
        (folder / "cgroup").write_text("4:cpu,cpuacct:/a/b\n0::/a/b\n")
    (tmp_path / "cg" / "a" / "b").mkdir(parents=True)
    return tmp_path


def files(machine, kind, options, root="/"):
    line = f"31 23 0:28 {root} {machine}/cg rw - {kind} {kind} rw,{options}\n"
    (machine / "proc/self").mkdir(exist_ok=True)
    (machine / "proc/self/mountinfo").write_text(f"30 23 0:27 / / rw - ext4 /dev/vda rw\n{line}")
    return CounterFiles(machine / "proc", Cgroups(machine / "proc"))


def plant(folder, **contents):
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_narrowest_quota_above_a_process_of_version_2_and_its_neighbour(machine):
    outer, inner = machine / "cg/a", machine / "cg/a/b"
    plant(outer, cpu__max="50000 100000\n", cpu__stat="nr_throttled 3\nthrottled_usec 40\n")
    plant(outer, cgroup__procs="5\n6\n7\n")
    plant(inner, cpu__max="max 100000\n", cpu__stat="nr_throttled 0\n")
    reading = files(machine, "cgroup2", "nsdelegate").read(5, 17)
    assert reading.mono_ns == 17
    assert reading.threads == {5: (5000, 500)}
    assert (reading.n_major_faults, reading.nice) == (12, 3)
    assert reading.quota == Quota(0.5, 40_000, 3, {"stress) 1 (7)": 40 * TICK_NS})


def test_children_of_the_first_thread_are_read_and_ended_ones_left_out(machine):
    plant(machine / "proc/6", schedstat="6000 600 9\n")
    plant(machine / "proc/5/task/5", children="6 8 ")
    reading = CounterFiles(machine / "proc", Cgroups(machine / "proc")).read(5, 0)
    assert (reading.threads, reading.children) == ({5: (5000, 500)}, {6: (6000, 600)})


def test_quota_of_version_1_is_in_nanoseconds(machine):
    inner = machine / "cg/a/b"
    plant(inner, cpu__cfs_quota_us="25000\n", cpu__cfs_period_us="100000\n")
    plant(inner, cpu__stat="nr_periods 9\nnr_throttled 4\nthrottled_time 77\n", cgroup__procs="5\n")
    assert files(machine, "cgroup", "cpu,cpuacct").read(5, 0).quota == Quota(0.25, 77, 4)


def test_cgroup_below_the_part_that_is_mounted_is_found(machine):
    (machine / "cg/b").mkdir()
    plant(machine / "cg/b", cpu__max="100 100\n", cpu__stat="", cgroup__procs="")
    assert files(machine, "cgroup2", "x", root="/a").read(5, 0).quota == Quota(1.0, 0, 0)


@pytest.mark.parametrize("text", ["4:cpu:/../../x\n0::/../x\n", "", "0::/nowhere\n"])
def test_without_a_quota_that_can_be_seen_there_is_none(machine, text):
    (machine / "proc/5/cgroup").write_text(text)
    assert files(machine, "cgroup2", "x").read(5, 0).quota is None


def test_process_that_is_gone_has_no_reading(machine):
    assert files(machine, "cgroup2", "x").read(4, 0) is None


def test_this_process_has_a_reading_of_each_of_its_threads():
    reading = CounterFiles().read(os.getpid(), 1)
    assert reading.threads[os.getpid()][0] > 0
    assert reading.n_processors_allowed == len(os.sched_getaffinity(0))


def test_process_that_ended_and_was_not_waited_for_has_no_reading():
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}/stat").exists()
        assert CounterFiles().read(child.pid, 1) is None
