"""What the host probes tell, against things done on purpose. Real tracepoints."""

import mmap
import os
import select
import socket
import subprocess

import numpy as np
import pytest

from ingero.agent.app.events import BUILDERS
from ingero.agent.kernel.abi import ProcessEvent, get_dtype
from ingero.agent.probes.engine import EngineSettings
from ingero.agent.probes.host import PROBES
from ingero.gpusim.runner import get_program
from ingero.model.events import HostOp, IoOp, Source, TcpOp

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
        engine.watch_pid(shell.pid)
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


def test_a_busy_neighbour_is_named_as_the_one_who_took_the_cpu(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process", "sched"), keep_first=1 << 20))
    cpu = max(os.sched_getaffinity(0))
    pin = ["taskset", "-c", str(cpu)]
    with subprocess.Popen([*pin, "/bin/sh", "-c", "while :; do :; done"]) as neighbour:
        # Spins between its steps, so it is preempted while runnable.
        done = subprocess.run(
            [*pin, str(get_program()), "train", "steps=30", "loader_us=5000", "kernels=1"],
            capture_output=True, check=True,
        )  # fmt: skip
        neighbour.kill()
    assert done.stdout
    kept = [engine.rings["off_cpus"].empty()]
    engine.drain({"off_cpus": lambda view: kept.append(view.copy())})
    rows = BUILDERS["off_cpus"](np.concatenate(kept), 0)
    preempted = rows[(rows["reason"] == 1) & (rows["other_pid"] == neighbour.pid)]
    assert len(preempted) > 0
    assert (preempted["wait_ns"] == preempted["duration_ns"]).all()
