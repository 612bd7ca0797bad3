"""Where hosts get their processor time, and what is written for it; the kernel's files are a folder in most tests."""

import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from ingero.errors import UnsupportedError
from ingero.sim.cluster import shares
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.shares import (
    DISKS,
    PROCESSORS,
    HostShares,
    ProcessorShare,
    count_processors,
    find_least_part,
    find_own,
    find_parent,
    list_disks,
    open_shares,
)
from ingero.testing.waiting import wait_until

BOTH = """22 27 0:21 / /proc rw - proc proc rw
30 27 0:26 / {root}/cpu rw - cgroup cgroup rw,cpu
31 27 0:27 / {root}/cpuset rw - cgroup cgroup rw,cpuset
40 27 0:36 / {root}/unified rw - cgroup2 cgroup2 rw
"""


@pytest.fixture
def machine(tmp_path):
    """Files of a machine: its mounts, and the groups of this process."""

    def write(mounts, own="2:cpu,cpuacct:/slice/me\n1:cpuset:/\n0::/\n", controllers="cpu io"):
        for name in ("unified", "cpu"):
            (tmp_path / name).mkdir()
        (tmp_path / "unified/cgroup.controllers").write_text(controllers)
        (tmp_path / "mounts").write_text(mounts.format(root=tmp_path))
        (tmp_path / "own").write_text(own)
        return tmp_path / "mounts", tmp_path / "own"

    return write


def test_version_1_is_taken_where_it_has_the_processors_below_our_own_group(machine, tmp_path):
    assert find_parent(PROCESSORS, *machine(BOTH)) == (tmp_path / "cpu/slice/me", False)


def test_version_2_is_taken_at_its_root(machine, tmp_path):
    mounts = "\n".join(line for line in BOTH.splitlines() if "cgroup cgroup" not in line) + "\n"
    assert find_parent(PROCESSORS, *machine(mounts)) == (tmp_path / "unified", True)


def test_no_group_with_the_processors_is_said(machine):
    mounts = "\n".join(line for line in BOTH.splitlines() if "cpu rw" not in line) + "\n"
    with pytest.raises(UnsupportedError, match="no cgroup has the cpu controller"):
        find_parent(PROCESSORS, *machine(mounts, controllers="io memory"))


@pytest.mark.parametrize(
    ("text", "path"), [("4:memory:/a\n2:cpuacct,cpu:/b/c\n", "/b/c"), ("0::/x\n", "/"), ("", "/")]
)
def test_our_own_group_is_that_of_the_processors(text, path):
    assert find_own(text) == path


@pytest.mark.parametrize(
    ("n_processors", "part", "quota"),
    [(0.5, 1.0, (5_000, 10_000)), (0.5, 0.5, (2_500, 10_000)), (0.1, 0.5, (1_000, 20_000))],
)
def test_a_part_is_a_quota_that_the_kernel_takes(tmp_path, n_processors, part, quota):
    for is_unified in (True, False):
        folder = tmp_path / str(is_unified)
        folder.mkdir()
        ProcessorShare(folder, is_unified, n_processors).limit(part)
    assert (tmp_path / "True/cpu.max").read_text() == "{} {}".format(*quota)
    files = (tmp_path / "False" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
    assert tuple(int(file.read_text()) for file in files) == quota


@pytest.mark.parametrize("n_hosts", [1, 3, 4, 7, 63, 64])
def test_the_least_part_is_a_quota_that_the_kernel_takes(tmp_path, monkeypatch, n_hosts):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    share = ProcessorShare(tmp_path, True, count_processors(n_hosts))
    share.limit(find_least_part(n_hosts))
    assert (tmp_path / "cpu.max").read_text() == "1000 1000000"


def test_a_kernel_that_refuses_is_told_with_the_file(tmp_path):
    with pytest.raises(UnsupportedError, match=r"cannot write .*cpu\.max"):
        ProcessorShare(tmp_path / "gone", True, 0.5).limit(1.0)


@pytest.mark.parametrize(
    ("told", "throttled_ns"),
    [
        ("nr_periods 9\nnr_throttled 3\nthrottled_time 7000\n", 7000),
        ("usage_usec 1\nnr_throttled 3\nthrottled_usec 7\n", 7000),
        ("", 0),
    ],
)
def test_how_long_a_host_was_held_back_is_read_in_either_version(tmp_path, told, throttled_ns):
    (tmp_path / "cpu.stat").write_text(told)
    assert ProcessorShare(tmp_path, True, 0.5).read_throttled() == throttled_ns


def test_disks_have_a_group_of_their_own_in_version_1_and_the_same_in_version_2(machine, tmp_path):
    blkio = "32 27 0:28 / {root}/blkio rw - cgroup cgroup rw,blkio\n"
    own = "2:cpu,cpuacct:/slice/me\n3:blkio:/disks\n"
    files = machine(BOTH + blkio, own)
    assert find_parent(DISKS, *files) == (tmp_path / "blkio/disks", False)
    unified = tmp_path / "mounts-2"
    unified.write_text(BOTH.format(root=tmp_path).splitlines()[-1] + "\n")
    assert find_parent(DISKS, unified, files[1]) == (tmp_path / "unified", True)


@pytest.fixture
def disks(tmp_path):
    """What the kernel shows of a disk, a drive without a medium and a compressed piece of memory."""
    for name, size, number in (("sda", 8, "8:0"), ("sr0", 0, "11:0"), ("zram0", 8, "253:0")):
        folder = tmp_path / "block" / name
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
        (folder / "dev").write_text(f"{number}\n")
    return tmp_path / "block"


def test_reading_is_limited_on_each_disk_that_has_a_medium(tmp_path, disks):
    assert list_disks(disks) == ["8:0"]
    for is_unified, name, line in (
        (True, "io.max", "8:0 rbps=5000000"),
        (False, "blkio.throttle.read_bps_device", "8:0 5000000"),
    ):
        share = ProcessorShare(tmp_path / "cpu", is_unified, 0.5, tmp_path)
        share.limit_reading(5_000_000, disks)
        assert (tmp_path / name).read_text() == line
    assert share.members == (tmp_path / "cpu/cgroup.procs", tmp_path / "cgroup.procs")
    assert ProcessorShare(tmp_path, True, 0.5, tmp_path).members == (tmp_path / "cgroup.procs",)


@pytest.fixture
def unified(machine, tmp_path, monkeypatch):
    """Version 2 as the only one; what is written to a file replaces it, and a removed group goes with its files."""
    mounts = BOTH.format(root=tmp_path).splitlines()[-1] + "\n"
    paths = machine(mounts)
    monkeypatch.setattr(shares, "find_parent", lambda wanted: find_parent(wanted, *paths))
    monkeypatch.setattr(shares, "_REMOVE", 'rm -r "$1"')
    return tmp_path / "unified"


def run_hosts(**options):
    with open_cleanup() as cleanup, open_shares(2, cleanup, **options) as made:
        assert [one.folder.is_dir() for one in made] == [True, True]


def make_group(root, name, **values):
    group = root / name
    group.mkdir()
    for file, value in ({"cpu_max": "max 100000", "cpu_weight": "100"} | values).items():
        (group / file.replace("_", ".")).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("before", "options", "after"),
    [
        ("memory pids", {}, "-cpu"),
        ("memory", {"slow_disks": [0]}, "-cpu -io"),
        ("cpu memory", {"slow_disks": [0]}, "-io"),
    ],
)
def test_controllers_that_were_off_are_off_again(unified, before, options, after):
    control = unified / "cgroup.subtree_control"
    control.write_text(f"{before}\n")
    make_group(unified, "system.slice")
    (unified / "system.slice/io.max").touch()
    run_hosts(**options)
    assert control.read_text() == f"{after}\n"


@pytest.mark.parametrize(
    ("before", "group", "values"),
    [
        ("cpu memory", "system.slice", {}),
        ("memory", "job", {"cpu_max": "50000 100000"}),
        ("memory", "job", {"cpu_weight": "300"}),
        ("memory", "job", {"io_max": "8:0 rbps=1000"}),
        ("memory", "ingero-77-0", {}),
    ],
)
def test_controllers_that_were_on_or_that_others_use_stay_on(unified, before, group, values):
    control = unified / "cgroup.subtree_control"
    control.write_text(f"{before}\n")
    make_group(unified, group, **values)
    run_hosts()
    assert control.read_text() == "+cpu"


def test_hosts_have_the_whole_machine_while_a_run_of_the_job_loads_but_those_with_a_fault(tmp_path):
    shares = []
    for host in range(2):
        (tmp_path / str(host)).mkdir()
        shares.append(ProcessorShare(tmp_path / str(host), True, 0.5))

    def read():
        return [(tmp_path / str(host) / "cpu.max").read_text() for host in range(2)]

    hosts = HostShares(shares)
    hosts.divide(is_loading=True)
    assert read() == ["10000 10000", "10000 10000"]
    hosts.divide(is_loading=False)
    assert read() == ["5000 10000", "5000 10000"]
    hosts.hit(1, 0.5)
    assert read() == ["5000 10000", "2500 10000"]
    hosts.divide(is_loading=True)  # the job was requeued
    assert read() == ["10000 10000", "2500 10000"]


@pytest.mark.parametrize(
    ("files", "lifted"),
    [
        (
            {"cpu.max": "2500 10000\n", "io.max": "8:0 rbps=1 wbps=max\n8:16 rbps=2\n"},
            {"cpu.max": "max\n", "io.max": "8:16 rbps=max\n"},  # a file keeps the last line alone
        ),
        (
            {"cpu.cfs_quota_us": "2500\n", "blkio.throttle.read_bps_device": "8:0 100\n"},
            {"cpu.cfs_quota_us": "-1\n", "blkio.throttle.read_bps_device": "8:0 0\n"},
        ),
    ],
)
def test_limits_of_either_version_are_lifted_before_a_group_is_removed(tmp_path, files, lifted):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    command = ["/bin/sh", "-c", shares._REMOVE, "remove", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: {name: (tmp_path / name).read_text() for name in files} == lifted)
        process.kill()  # it tries to remove the folder, which is no group
    assert {path.name for path in tmp_path.iterdir()} == set(files)


LARGE = "own = b'1' * 400_000_000; print(flush=True); input()"
SPINS = "print(flush=True)\nwhile True: pass"


@pytest.mark.kernel
def test_group_is_removed_though_its_processes_have_next_to_no_time_and_much_to_give_back():
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for program in (LARGE, SPINS)
    ]
    with ExitStack() as stack:
        for process in processes:
            stack.enter_context(process)
            assert process.stdout.readline() == b"\n"
        with open_cleanup() as cleanup, open_shares(1, cleanup, slow_disks=[0]) as (share,):
            share.limit(find_least_part(1))
            share.limit_reading(1)
            for members in share.members:
                for process in processes:
                    members.write_text(str(process.pid))
        folders = {share.folder, share.disk_folder}
        assert [folder for folder in folders if folder.exists()] == []
        assert [process.wait() for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.kernel
def test_group_that_cannot_be_removed_is_reported(capfd):
    with open_cleanup() as cleanup, open_shares(1, cleanup) as (share,):
        inner = share.folder / "inner"
        inner.mkdir()
    try:
        assert capfd.readouterr().err == (
            f"ingero: the cgroup {share.folder} is left behind; once these have ended, "
            f"rmdir {share.folder}: groups in it\n"
        )
    finally:
        inner.rmdir()
        share.folder.rmdir()
