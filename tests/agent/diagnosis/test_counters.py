"""Counters of processes: this one's own, and a planted machine's of either version of cgroups."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.agent.capture.discover.cgroups import Cgroups
from ingero.agent.diagnosis.counters import MAX_CHILDREN, MAX_THREADS, CounterFiles
from ingero.model.counters import QuotaMember, TaskTimes, Work
from ingero.recording.causal.excess import find_excess_causes
from ingero.recording.causal.work_rates import find_held, find_rates
from ingero.units import NS_PER_S

TICK_NS = NS_PER_S // os.sysconf("SC_CLK_TCK")


@pytest.fixture
def machine(tmp_path):
    """Processes 5, its child 6, a neighbour 7 that is a child of 1; all in the cgroup ``a/b``."""
    for pid, parent, name in ((5, 1, "train"), (6, 5, "worker"), (7, 1, "stress) 1")):
        folder = tmp_path / "proc" / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True)
        fields = ["S", parent, *[0] * 5, 12, 0, 4, 0, 30, 10, 0, 0, 20, 3, 0, 0, 100 + pid, 0, 0]
        (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")
        (folder / "task" / str(pid) / "schedstat").write_text(f"{pid}000 {pid}00 9\n")
        (folder / "cgroup").write_text("4:cpu,cpuacct:/a/b\n0::/a/b\n")
    (tmp_path / "cg" / "a" / "b").mkdir(parents=True)
    return tmp_path


def files(machine, kind, options, root="/"):
    line = f"31 23 0:28 {root} {machine}/cg rw - {kind} {kind} rw,{options}\n"
    (machine / "proc/self").mkdir(exist_ok=True)
    (machine / "proc/self/mountinfo").write_text(f"30 23 0:27 / / rw - ext4 /dev/vda rw\n{line}")
    return CounterFiles(machine / "proc", Cgroups(machine / "proc"), lambda: 900 * TICK_NS)


def limit_of(reading):
    """The narrowest limit, for how long and how often it held back."""
    quota = min(reading.quotas, key=lambda one: one.n_processors)
    return (quota.n_processors, *reading.throttled[quota.cgroup])


def plant(folder, **contents):
    for name, text in contents.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_narrowest_quota_above_a_process_of_version_2_and_its_neighbour(machine):
    outer, inner = machine / "cg/a", machine / "cg/a/b"
    plant(outer, cpu__max="50000 100000\n", cpu__stat="nr_throttled 3\nthrottled_usec 40\n")
    plant(outer, cgroup__procs="5\n6\n7\n")
    plant(inner, cpu__max="max 100000\n", cpu__stat="nr_throttled 0\n")
    reading = files(machine, "cgroup2", "nsdelegate").read(5, 17)
    assert (reading.mono_ns, reading.boot_ticks) == (17, 900)
    assert reading.threads == {5: (5000, 500, 105)}
    assert (reading.n_minor_faults, reading.kernel_ns, reading.nice) == (12, 10 * TICK_NS, 3)
    assert limit_of(reading) == (0.5, 40_000, 3)
    ((neighbour, spent_ns),) = reading.quotas[0].others_ns.items()
    assert (neighbour, neighbour.label) == (QuotaMember(7, 107, ""), "stress) 1 (7)")
    assert spent_ns == 40 * TICK_NS


def test_of_alike_quotas_the_one_that_the_processes_are_under_counts(machine):
    """As of a pod and its only container."""
    outer, inner = machine / "cg/a", machine / "cg/a/b"
    plant(outer, cpu__max="50000 100000\n", cpu__stat="nr_throttled 1\nthrottled_usec 5\n")
    plant(outer, cgroup__procs="")
    plant(inner, cpu__max="50000 100000\n", cpu__stat="nr_throttled 3\nthrottled_usec 40\n")
    plant(inner, cgroup__procs="5\n6\n7\n")
    reading = files(machine, "cgroup2", "nsdelegate").read(5, 17)
    assert limit_of(reading) == (0.5, 40_000, 3)
    assert [one.label for one in reading.quotas[0].others_ns] == ["stress) 1 (7)"]


def test_neighbours_are_seen_in_cgroups_below_the_one_that_has_the_quota(machine):
    """As in other containers of a pod that has a limit of its own; in version 2 the pod's cgroup has no process."""
    outer, inner, beside = (machine / "cg" / name for name in ("a", "a/b", "a/c"))
    beside.mkdir()
    plant(outer, cpu__max="50000 100000\n", cpu__stat="", cgroup__procs="")
    plant(inner, cpu__max="max 100000\n", cgroup__procs="5\n6\n")
    plant(beside, cpu__max="max 100000\n", cgroup__procs="7\n")
    reading = files(machine, "cgroup2", "nsdelegate").read(5, 17)
    assert [one.label for one in reading.quotas[0].others_ns] == ["stress) 1 (7)"]


def test_children_of_the_first_thread_are_read_and_ended_ones_left_out(machine):
    plant(machine / "proc/6", schedstat="6000 600 9\n")
    plant(machine / "proc/5/task/5", children="6 8 ")
    reading = CounterFiles(machine / "proc", Cgroups(machine / "proc")).read(5, 0)
    assert (reading.threads, reading.children) == (
        {5: (5000, 500, 105)},
        {6: (6000, 600, 106)},
    )


def test_quota_of_version_1_is_in_nanoseconds(machine):
    inner = machine / "cg/a/b"
    plant(inner, cpu__cfs_quota_us="25000\n", cpu__cfs_period_us="100000\n")
    plant(inner, cpu__stat="nr_periods 9\nnr_throttled 4\nthrottled_time 77\n", cgroup__procs="5\n")
    assert limit_of(files(machine, "cgroup", "cpu,cpuacct").read(5, 0)) == (0.25, 77, 4)


def test_cgroup_below_the_part_that_is_mounted_is_found(machine):
    (machine / "cg/b").mkdir()
    plant(machine / "cg/b", cpu__max="100 100\n", cpu__stat="", cgroup__procs="")
    assert limit_of(files(machine, "cgroup2", "x", root="/a").read(5, 0)) == (1.0, 0, 0)


@pytest.mark.parametrize("text", ["4:cpu:/../../x\n0::/../x\n", "", "0::/nowhere\n"])
def test_without_a_quota_that_can_be_seen_there_is_none(machine, text):
    (machine / "proc/5/cgroup").write_text(text)
    assert files(machine, "cgroup2", "x").read(5, 0).quotas == ()


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


def write_stat(machine, pid, spent_ticks, start_ticks, name="loader"):
    """A neighbour, a child of 1."""
    folder = machine / "proc" / str(pid)
    folder.mkdir(exist_ok=True)
    fields = ["S", 1, *[0] * 7, 0, 0, spent_ticks, 0, 0, 0, 20, 0, 0, 0, start_ticks, 0, 0]
    (folder / "stat").write_text(f"{pid} ({name}) {' '.join(map(str, fields))}\n")


def look(machine, seconds, pids, limit="400000 100000\n"):
    """A reading so many seconds after the machine was started, with so many members of the limited cgroup."""
    inner = machine / "cg/a/b"
    plant(inner, cpu__max=limit, cpu__stat=f"nr_throttled {seconds}\nthrottled_usec {seconds}\n")
    plant(inner, cgroup__procs="".join(f"{pid}\n" for pid in (5, *pids)))
    found = files(machine, "cgroup2", "x")
    return CounterFiles(found.proc, found.cgroups, lambda: seconds * NS_PER_S).read(
        5, seconds * NS_PER_S
    )


def rates(first, last):
    return find_rates(Work(first, last, 100, NS_PER_S))


PER_S = NS_PER_S // TICK_NS


def test_neighbours_that_come_into_view_are_told_as_unknown(machine):
    """Of many members the first are read: old ones come into view when others end."""
    pids = range(100, 190)
    for pid in pids:
        write_stat(machine, pid, 36_000 * PER_S, 5)
    first = look(machine, 50_000, pids)
    for pid in pids:
        write_stat(machine, pid, 36_000 * PER_S + 3 * PER_S, 5)
    found = rates(first, look(machine, 50_100, pids[30:]))
    assert {one.pid for one in found.others} == {*range(130, 163)}
    assert set(found.others.values()) == {0.03}
    assert found.n_unknown_others == 27


def test_neighbours_are_unknown_where_the_limit_came_after_the_first_reading(machine):
    write_stat(machine, 7, 36_000 * PER_S, 5)
    first = look(machine, 50_000, [7], limit="max 100000\n")
    write_stat(machine, 7, 36_100 * PER_S, 5)
    write_stat(machine, 8, 50 * PER_S, 50_040 * PER_S)
    found = rates(first, look(machine, 50_100, [7, 8]))
    assert {one.pid: rate for one, rate in found.others.items()} == {8: 0.5}
    assert found.n_unknown_others == 1
    assert found.throttled_ns == 1000, "it is read of cgroups without a limit too"


def test_a_neighbour_is_another_one_where_its_number_was_given_again(machine):
    write_stat(machine, 7, 30 * PER_S, 5)
    first = look(machine, 50_000, [7])
    write_stat(machine, 7, 40 * PER_S, 50_010 * PER_S)
    found = rates(first, look(machine, 50_100, [7]))
    assert list(found.others.values()) == [0.4]


def test_a_neighbour_stays_the_same_one_when_it_takes_another_name(machine):
    write_stat(machine, 7, 36_000 * PER_S, 5, "python")
    first = look(machine, 50_000, [7])
    write_stat(machine, 7, 36_040 * PER_S, 5, "pt_data_worker")
    found = rates(first, look(machine, 50_100, [7]))
    assert [(one.label, rate) for one, rate in found.others.items()] == [
        ("pt_data_worker (7)", 0.4)
    ]


def test_neighbours_are_not_said_to_use_more_than_the_quota(machine):
    for pid in (7, 8):
        write_stat(machine, pid, 0, 5)
    first = look(machine, 50_000, [7, 8], limit="800000 100000\n")
    for pid in (7, 8):
        write_stat(machine, pid, 300 * PER_S, 5)
    found = rates(first, look(machine, 50_100, [7, 8]))
    assert list(found.others.values()) == [2.0, 2.0]


def test_a_cgroup_that_the_first_reading_did_not_have_says_nothing_of_how_it_was_held_back(machine):
    """A process was moved: what its new cgroup was held back before is not the process's."""
    first = look(machine, 50_000, [])
    other = machine / "cg/a/c"
    other.mkdir()
    stat = "nr_throttled 9000\nthrottled_usec 36000000000\n"
    plant(other, cpu__max="100000 100000\n", cpu__stat=stat, cgroup__procs="5\n")
    (machine / "proc/5/cgroup").write_text("0::/a/c\n")
    last = files(machine, "cgroup2", "x").read(5, 50_100 * NS_PER_S)
    assert rates(first, last).throttled_ns == 0.0


def look_at_pod(machine, seconds, limits, held_s):
    """A reading of a rank in a container in a pod: the limit of each in processors, and how long it was held back."""
    for folder, limit, held in zip(
        (machine / "cg/a/b", machine / "cg/a"), limits, held_s, strict=True
    ):
        quota = "max" if limit is None else round(limit * 100_000)
        stat = f"nr_throttled {seconds}\nthrottled_usec {round(held * 1e6)}\n"
        plant(folder, cpu__max=f"{quota} 100000\n", cpu__stat=stat, cgroup__procs="")
    plant(machine / "cg/a/b", cgroup__procs="5\n")
    # An operation takes 50 ms on a processor, ten a second until 110 s and then five.
    ran_s = min(seconds, 110) / 2 + max(seconds - 110, 0) / 4
    plant(
        machine / "proc/5/task/5",
        schedstat=f"{round(ran_s * 1e9)} {round(sum(held_s) * 1e9)} 1\n",
    )
    found = files(machine, "cgroup2", "x")
    return CounterFiles(found.proc, found.cgroups, lambda: seconds * NS_PER_S).read(
        5, seconds * NS_PER_S
    )


def explain_pod(before, after):
    """Causes of a rank whose operations took 100 ms, and 200 ms since it is slow."""
    then, now = Work(*before, 100, 10 * NS_PER_S), Work(*after, 50, 10 * NS_PER_S)
    return find_excess_causes(0.5, now, find_rates(then, find_held(now, then)), None).causes


def test_the_limit_of_a_pod_counts_where_that_holds_back_and_not_the_containers(machine):
    """The container's is the narrower one, and the pod's was made smaller."""
    before = [look_at_pod(machine, at, (0.8, 2.0), (1.0, 0.0)) for at in (100, 110)]
    after = [
        look_at_pod(machine, at, (0.8, 1.0), (1.0, held)) for at, held in ((110, 0.0), (120, 5.0))
    ]
    (cause,) = explain_pod(before, after)
    assert (cause.kind, cause.share) == ("cpu-quota", 1.0)
    assert "its cgroup may use 1 processors, 2 before" in cause.evidence


def test_a_limit_that_holds_back_as_it_always_did_hides_no_other(machine):
    before = [
        look_at_pod(machine, at, (0.8, 2.0), (held, 0.0)) for at, held in ((100, 0.0), (110, 12.0))
    ]
    after = [
        look_at_pod(machine, at, (0.8, 1.0), held)
        for at, held in ((110, (12.0, 0.0)), (120, (18.0, 5.0)))
    ]
    (cause,) = explain_pod(before, after)
    assert (cause.kind, cause.share) == ("cpu-quota", 1.0)


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (0.25, None, "its cgroup may use 0.25 processors, 1 before, without a limit by now"),
        (0.25, 2.0, "its cgroup may use 0.25 processors, 1 before, 2 by now"),
        (None, None, "its cgroup was held back by a limit that is gone by now"),
    ],
)
def test_a_limit_that_was_raised_or_taken_away_meanwhile_was_the_cause(machine, first, last, says):
    """As a scaler that resizes pods does: what is looked at goes back to before that."""
    before = [look_at_pod(machine, at, (1.0, None), (0.0, 0.0)) for at in (100, 110)]
    after = [
        look_at_pod(machine, at, (limit, None), (held, 0.0))
        for at, limit, held in ((110, first, 0.0), (120, last, 5.0))
    ]
    (cause,) = explain_pod(before, after)
    assert (cause.kind, cause.share) == ("cpu-quota", 1.0)
    assert says in cause.evidence


def write_times(folder, ran_ns, start_ticks):
    """A thread or a child."""
    folder.mkdir(parents=True, exist_ok=True)
    plant(folder, schedstat=f"{ran_ns} 0 1\n")
    fields = ["S", 5, *[0] * 17, start_ticks, 0, 0]
    plant(folder, stat=f"1 (x) {' '.join(map(str, fields))}\n")


def test_threads_and_children_that_come_into_view_are_unknown_and_new_ones_are_not(machine):
    task = machine / "proc/5/task"
    for tid in range(1000, 1300):
        write_times(task / str(tid), 3600 * NS_PER_S, 50)
    for pid in range(2000, 2070):
        write_times(machine / "proc" / str(pid), 3600 * NS_PER_S, 60)
    plant(task / "5", children=" ".join(map(str, range(2000, 2070))))
    first = look(machine, 50_000, [])
    assert (len(first.threads), len(first.children)) == (MAX_THREADS, MAX_CHILDREN)
    for tid in range(1000, 1100):
        shutil.rmtree(task / str(tid))
    write_times(machine / "proc/2070", 7 * NS_PER_S, 50_010 * PER_S)
    plant(task / "5", children=" ".join(map(str, range(2010, 2071))))
    last = look(machine, 50_100, [])
    assert TaskTimes(3600 * NS_PER_S, 0, 50) in last.threads.values()
    found = rates(first, last)
    assert found.child_pid == 2070
    assert found.computing_ns * found.n_ops == 7 * NS_PER_S
    assert found.n_unknown_threads == 45 + 6


def test_the_start_of_a_thread_is_read_again_when_its_number_was_given_again(machine):
    worker = machine / "proc/5/task/9"
    write_times(worker, 100, 20)
    first = look(machine, 50_000, [])
    write_times(worker, 200, 30)
    same = files(machine, "cgroup2", "x").read(5, 0, first)
    assert same.threads[9] == (200, 0, 20), "what is known is not read again"
    write_times(worker, 50, 30)
    assert files(machine, "cgroup2", "x").read(5, 0, first).threads[9] == (50, 0, 30)


def test_the_start_that_the_kernel_tells_is_on_the_clock_of_the_readings():
    before = CounterFiles().read(os.getpid(), 0)
    with subprocess.Popen(["sleep", "60"]) as child:
        reading = CounterFiles().read(child.pid, 0)
        child.kill()
    assert before.threads[os.getpid()].start_ticks <= before.boot_ticks
    assert before.boot_ticks <= reading.threads[child.pid].start_ticks <= reading.boot_ticks
