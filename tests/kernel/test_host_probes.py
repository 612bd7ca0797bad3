"""What the host probes tell, against things done on purpose. Real tracepoints."""

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.uncached import write_uncached

from ingero.agent.capture.events import BUILDERS
from ingero.agent.capture.kernel.abi import ProcessEvent, get_dtype
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.host import PROBES
from ingero.model.events import HostOp, IoOp, NetOp, OffCpuReason, Source, TcpOp
from ingero.sim.runner import get_program

pytestmark = pytest.mark.kernel


def wait_for(engine, ring, is_wanted):
    """Records of a ring, read until one is wanted; the test's timeout is the limit."""
    kept = [engine.rings[ring].empty()]
    poll = select.poll()
    poll.register(engine.rings[ring].fd, select.POLLIN)
    while not is_wanted(np.concatenate(kept)).any():
        poll.poll(20)
        engine.drain({ring: lambda view: kept.append(view.copy())})
    return np.concatenate(kept)


def test_every_probe_of_the_list_starts_here(start_engine):
    engine = start_engine(EngineSettings(), attach=False)
    assert engine.missing == []
    assert set(engine.rings) >= {probe.ring for probe in PROBES}
    for probe in PROBES:
        assert engine.rings[probe.ring].empty().dtype == get_dtype(probe.record)


def test_fork_exec_and_exit_of_a_watched_process_are_told_and_threads_are_not(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)), attach=False)
    script = "read line; /bin/true; exit 7"
    with subprocess.Popen(["/bin/sh", "-c", script], stdin=subprocess.PIPE) as shell:
        engine.control.watch_pid(shell.pid)
        shell.communicate(b"go\n")
    records = wait_for(
        engine, "processes",
        lambda r: (r["pid"] == shell.pid) & (r["event"] == ProcessEvent.EXIT),
    )  # fmt: skip
    # The shell's own exec may end after Popen returns: the pipe that Popen waits for closes just before.
    records = records[(records["pid"] != shell.pid) | (records["event"] != ProcessEvent.EXEC)]
    (forked,) = records[records["event"] == ProcessEvent.FORK]
    child = int(forked["pid"])
    assert int(forked["other_pid"]) == shell.pid
    told = [(int(r["pid"]), int(r["event"])) for r in records]
    assert told == [
        (child, ProcessEvent.FORK),
        (child, ProcessEvent.EXEC),
        (child, ProcessEvent.EXIT),
        (shell.pid, ProcessEvent.EXIT),
    ]
    assert int(records[-1]["exit_code"]) >> 8 == 7
    assert records[1]["comm"] == b"true"
    rows = BUILDERS["processes"](records, 0)
    assert (rows["op"][0], rows["pid"][0], rows["arg1"][0]) == (HostOp.FORK, shell.pid, child)


def test_a_direct_write_is_told_with_its_bytes_device_and_process(start_engine, tmp_path):
    engine = start_engine(EngineSettings(host_probes=("block",), keep_first=1 << 20), attach=False)
    device = tmp_path.stat().st_dev
    if os.major(device) == 0:
        pytest.skip("the temporary folder is not on a block device")
    size = 37 * 4096
    path = tmp_path / "written"
    buffer = mmap.mmap(-1, size)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        assert os.write(fd, buffer) == size
    finally:
        os.close(fd)
    records = wait_for(
        engine, "blocks", lambda r: (r["pid"] == os.getpid()) & (r["op"] == IoOp.WRITE)
    )
    own = records[(records["pid"] == os.getpid()) & (records["op"] == IoOp.WRITE)]
    assert own["bytes"].sum() == size
    assert set(own["device"]) == {os.major(device) << 20 | os.minor(device)}
    assert set(own["error"]) == {0}
    assert (own["device_ns"] > 0).all()
    rows = BUILDERS["blocks"](own, 0)
    assert rows["arg0"].sum() == size // 512
    assert (rows["wait_ns"] <= rows["duration_ns"]).all()
    assert set(rows["source"]) == {Source.IO}


class Iocb(ctypes.Structure):
    """struct iocb of linux/aio_abi.h."""

    _fields_ = (
        *(("data", ctypes.c_uint64), ("key", ctypes.c_uint32), ("rw_flags", ctypes.c_int32)),
        *(("opcode", ctypes.c_uint16), ("priority", ctypes.c_int16), ("fd", ctypes.c_uint32)),
        *(("buffer", ctypes.c_uint64), ("n_bytes", ctypes.c_uint64), ("offset", ctypes.c_int64)),
        *(("reserved", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("event_fd", ctypes.c_uint32)),
    )


IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT = (
    (206, 207, 208, 209) if platform.machine() == "x86_64" else (0, 1, 4, 2)
)
IOCB_WRITE = 1


def write_at_once(fd, page, pages):
    """Hand the kernel writes of single pages in one call, so that they are queued in this order, and wait for them."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    context = ctypes.c_ulong()
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    blocks = [
        Iocb(opcode=IOCB_WRITE, fd=fd, buffer=address, n_bytes=4096, offset=4096 * page)
        for page in pages
    ]
    pointers = (ctypes.POINTER(Iocb) * len(blocks))(*map(ctypes.pointer, blocks))
    events = (ctypes.c_uint64 * (4 * len(blocks)))()
    assert syscall(IO_SETUP, len(blocks), ctypes.byref(context)) == 0
    assert syscall(IO_SUBMIT, context, len(blocks), pointers) == len(blocks)
    assert syscall(IO_GETEVENTS, context, len(blocks), len(blocks), events, None) == len(blocks)
    assert syscall(IO_DESTROY, context) == 0


# The first is what the kernel tries to add to; by the last, the two before and behind it become one.
GAP_LAST = (50, 11, 80, 10, 90, 12)


def test_a_queued_request_that_becomes_part_of_another_is_forgotten(start_engine, tmp_path):
    engine = start_engine(EngineSettings(host_probes=("block",), keep_first=1 << 20), attach=False)
    number = tmp_path.stat().st_dev
    queue = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/queue/scheduler")
    if not queue.exists() or "[mq-deadline]" not in queue.read_text():
        pytest.skip("the temporary folder is not on a whole device with the scheduler mq-deadline")
    (requests,) = (one.maps["requests"] for one in engine._objects if "requests" in one.maps)
    fd = os.open(tmp_path / "written", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    merged = []
    try:
        # So that neighbours in the file are neighbours on the disk.
        os.pwrite(fd, mmap.mmap(-1, 4096 * 100), 0)
        page = mmap.mmap(-1, 4096)
        # Until all three are one, which another write may hinder; the test's timeout is the limit.
        while not merged:
            for order in (GAP_LAST, GAP_LAST[::-1]):  # some kernels queue the last first
                write_at_once(fd, page, order)
            engine.drain({"blocks": lambda view: merged.extend(read_merged(view))})
    finally:
        os.close(fd)
    _, starts = requests.read_all(np.dtype("<u8"), REQUEST_START)
    assert not (starts["pid"] == os.getpid()).any()


REQUEST_START = np.dtype({"names": ["pid"], "formats": ["<u4"], "offsets": [32], "itemsize": 64})


def read_merged(records):
    """Sizes of this process's requests that hold three pages."""
    is_it = (records["pid"] == os.getpid()) & (records["bytes"] == 3 * 4096)
    return records["bytes"][is_it].tolist()


@pytest.fixture
def cut_device(tmp_path):
    """A block device whose file was cut off behind it: every read fails."""
    path = tmp_path / "disk"
    path.write_bytes(bytes(1 << 20))
    done = subprocess.run(
        ["losetup", "--find", "--show", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no loop device here: {done.stderr.strip()}")
    device = done.stdout.strip()
    os.truncate(path, 0)
    yield device
    subprocess.run(["losetup", "--detach", device], check=True)


def test_a_request_that_fails_has_the_errno_that_its_reader_got(start_engine, cut_device):
    engine = start_engine(EngineSettings(host_probes=("block",), keep_first=1 << 20), attach=False)
    fd = os.open(cut_device, os.O_RDONLY | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 4096) as page, pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.preadv(fd, [page], 8192)
        number = os.fstat(fd).st_rdev
    finally:
        os.close(fd)
    device = os.major(number) << 20 | os.minor(number)
    records = wait_for(engine, "blocks", lambda r: (r["device"] == device) & (r["sector"] == 16))
    failures = records[(records["device"] == device) & (records["sector"] == 16)]
    codes = BUILDERS["blocks"](failures, 0)["ret_code"].tolist()
    assert set(codes) == {-errno.EIO}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
)
def test_a_segment_sent_again_is_told_with_both_ends(start_engine, family, host):
    engine = start_engine(EngineSettings(host_probes=("tcp",)), attach=False)
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError as error:
            pytest.skip(f"no {family.name} here: {error}")
        listener.listen(0)
        port = listener.getsockname()[1]
        # One connection fills the queue; what comes after is not answered and sends its SYN again after a second.
        clients = [socket.socket(family) for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex((host, port))
        records = wait_for(engine, "retransmits", lambda r: r["remote_port"] == port)
        local_ports = {client.getsockname()[1] for client in clients}
        for client in clients:
            client.close()
    again = records[records["remote_port"] == port]
    assert {int(p) for p in again["local_port"]} <= local_ports
    assert {int(f) for f in again["family"]} == {family}
    packed = socket.inet_pton(family, host)
    assert {bytes(address)[: len(packed)] for address in again["remote"]} == {packed}
    rows = BUILDERS["retransmits"](again, 0)
    assert set(rows["op"]) == {TcpOp.RETRANSMIT}
    assert {int(v) & 0xFFFF for v in rows["arg1"]} == {port}


def in_real_time(priority):
    """A command prefix that lets no ordinary task come between; nothing where that is not allowed."""
    able = ["chrt", "--fifo", str(priority)]
    return able if subprocess.run([*able, "true"], check=False).returncode == 0 else []


def test_a_busy_neighbour_is_named_as_the_one_who_took_the_cpu(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process", "sched"), keep_first=1 << 20))
    pin = ["taskset", "-c", str(max(os.sched_getaffinity(0)))]
    # It wakes while the other computes, and goes before it: whatever else runs here cannot be next.
    neighbour_calls = [str(get_program()), "train", "steps=1000000", "loader_us=1000", "kernels=1"]
    device = {"GPUSIM_KERNEL_NS": "2000000"}
    with subprocess.Popen(
        [*in_real_time(2), *pin, *neighbour_calls],
        env=os.environ | device,
        stdout=subprocess.DEVNULL,
    ) as neighbour:
        try:
            done = subprocess.run(
                [*in_real_time(1), *pin, str(get_program()), "train", "steps=30", "loader_us=5000", "kernels=1"],
                capture_output=True, check=True, text=True,
            )  # fmt: skip
        finally:
            neighbour.kill()
    pid = json.loads(done.stdout.splitlines()[-1])["pid"]
    kept = [engine.rings["off_cpus"].empty()]
    engine.drain({"off_cpus": lambda view: kept.append(view.copy())})
    rows = BUILDERS["off_cpus"](np.concatenate(kept), 0)
    preempted = rows[(rows["reason"] == OffCpuReason.PREEMPTED) & (rows["pid"] == pid)]
    assert len(preempted[preempted["other_pid"] == neighbour.pid]) > 0
    assert (preempted["wait_ns"] == preempted["duration_ns"]).all()


@pytest.fixture
def as_gpu_process(start_engine):
    """An engine that takes this test's process for one that makes GPU calls."""

    def start(*probes):
        engine = start_engine(EngineSettings(host_probes=probes, keep_first=1 << 20), attach=False)
        engine.maps["gpu_pids"].update(os.getpid().to_bytes(4, "little"), bytes(8))
        return engine

    return start


WAKE = """
import os, sys, time
sys.stdin.readline()
for _ in range(100):
    time.sleep(0.001)
    os.write(1, b".")
"""


def test_who_woke_a_thread_of_another_cpu_is_told(as_gpu_process):
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("this machine has one CPU")
    waker_command = ["taskset", "-c", str(cpus[0]), sys.executable, "-c", WAKE]
    with subprocess.Popen(
        waker_command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as waker:
        os.sched_setaffinity(0, {cpus[-1]})
        try:
            engine = as_gpu_process("sched")
            waker.stdin.write(b"go\n")
            os.read(waker.stdout.fileno(), 1)
            began_ns = time.monotonic_ns()
            for _ in range(99):
                os.read(waker.stdout.fileno(), 1)
            ended_ns = time.monotonic_ns()
        finally:
            os.sched_setaffinity(0, cpus)
    kept = [engine.rings["off_cpus"].empty()]
    engine.drain({"off_cpus": lambda view: kept.append(view.copy())})
    records = np.concatenate(kept)
    starts = records["header"]["mono_ns"]
    is_it = (records["tid"] == os.getpid()) & (records["reason"] == OffCpuReason.SLEEP)
    slept = records[is_it & (starts >= began_ns) & (starts < ended_ns)]
    assert len(slept) > 0
    assert set(slept["waker_pid"].tolist()) == {waker.pid}
    assert set(BUILDERS["off_cpus"](slept, 0)["other_pid"].tolist()) == {waker.pid}


def counts_of(engine, source, op):
    keys, counts = engine.state.read_counts()
    is_it = (keys["pid"] == os.getpid()) & (keys["source"] == source) & (keys["op"] == op)
    return counts[is_it][0]


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_bytes_on_a_socket_are_told_with_their_direction_and_an_idle_one_is_no_error(
    as_gpu_process, family
):
    if family is socket.AF_UNIX:
        left, right = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            left = socket.create_connection(listener.getsockname())
            right, _ = listener.accept()
    with left, right:
        engine = as_gpu_process("net")
        for size in (1009, 3, 70_001):
            left.sendall(bytes(size))
            left_over = size
            assert right.recv(size, socket.MSG_PEEK)  # looked at, not taken
            while left_over:
                left_over -= len(right.recv(left_over))
        right.setblocking(False)
        with pytest.raises(BlockingIOError):
            right.recv(1)
        kept = [engine.rings["sockets"].empty()]
        engine.drain({"sockets": lambda view: kept.append(view.copy())})
    records = np.concatenate(kept)
    records = records[(records["pid"] == os.getpid()) & (records["family"] == family)]
    rows = BUILDERS["sockets"](records, 0)
    assert set(rows["source"]) == {Source.NET}
    for op in (NetOp.SEND, NetOp.RECV):
        mine = rows[rows["op"] == op]
        assert mine["arg1"].sum() == 1009 + 3 + 70_001
        count = counts_of(engine, Source.NET, op)
        assert count["bytes"] >= mine["arg1"].sum()
        assert count["errors"] == 0
        assert count["seen"] == count["emitted"] + count["sampled"] + count["lost"]
    assert set(rows["ret_code"]) == {0}


def test_pages_of_a_process_are_counted_by_their_bytes(as_gpu_process):
    engine = as_gpu_process("memory")
    size = 64 << 20
    with mmap.mmap(-1, size) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(0, size, mmap.PAGESIZE):
            memory[page] = 1
    count = counts_of(engine, Source.HOST, HostOp.PAGE_ALLOC)
    assert size <= count["bytes"] < 1.2 * size
    assert count["seen"] == count["sampled"]


def test_time_lost_making_room_in_a_full_cgroup_is_told(as_gpu_process, tmp_path):
    version_1 = Path("/sys/fs/cgroup/memory")
    root, limit = (
        (version_1, "memory.limit_in_bytes")
        if version_1.is_dir()
        else (version_1.parent, "memory.max")
    )
    group = root / f"ingero-test-{os.getpid()}"
    try:
        group.mkdir()
        if not (group / limit).exists():
            group.rmdir()
            pytest.skip("no memory cgroup can be made here")
        (group / limit).write_text(str(64 << 20))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    engine = as_gpu_process("memory", "process")
    # Pages of a file are given back without swap, so the group makes room and goes on.
    program = (
        "import sys; sys.stdin.readline()\n"
        f"f = open({str(tmp_path / 'big')!r}, 'wb')\n"
        "[f.write(bytes(1 << 20)) for _ in range(160)]\n"
    )
    try:
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as child:
            (group / "cgroup.procs").write_text(str(child.pid))
            engine.maps["gpu_pids"].update(child.pid.to_bytes(4, "little"), bytes(8))
            child.communicate(b"go\n")
            assert child.returncode == 0
    finally:
        group.rmdir()
    kept = [engine.rings["reclaims"].empty()]
    engine.drain({"reclaims": lambda view: kept.append(view.copy())})
    records = np.concatenate(kept)
    rows = BUILDERS["reclaims"](records[records["pid"] == child.pid], 0)
    assert len(rows) > 0
    assert set(rows["op"]) == {HostOp.DIRECT_RECLAIM}
    assert (rows["duration_ns"] > 0).all()
    assert rows["arg1"].sum() >= 16 << 20


def test_a_page_that_has_to_be_read_from_a_disk_is_told_with_the_time_it_took(
    as_gpu_process, tmp_path
):
    path, n_pages = tmp_path / "data", 64
    write_uncached(path, n_pages)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        memory.madvise(mmap.MADV_RANDOM)  # no read-ahead: every page waits for the disk
        engine = as_gpu_process("fault")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        began_ns = time.monotonic_ns()
        touched = [memory[page * mmap.PAGESIZE] for page in range(n_pages)]
        ended_ns = time.monotonic_ns()
        n_major = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before
    assert len(touched) == n_pages <= n_major
    kept = [engine.rings["faults"].empty()]
    engine.drain({"faults": lambda view: kept.append(view.copy())})
    records = np.concatenate(kept)
    starts = records["header"]["mono_ns"]
    records = records[(starts >= began_ns) & (starts < ended_ns)]
    rows = BUILDERS["faults"](records[records["tid"] == os.getpid()], 0)
    assert len(rows) == n_major
    assert set(rows["op"]) == {HostOp.PAGE_FAULT}
    # One after the other, each with the whole time that the disk took.
    assert (rows["start_ns"][1:] >= (rows["start_ns"] + rows["duration_ns"])[:-1]).all()
    assert n_pages * 10_000 < rows["duration_ns"].sum() <= ended_ns - began_ns
