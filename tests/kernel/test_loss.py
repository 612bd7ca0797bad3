"""Nothing is lost without being counted, and sampling keeps totals true. Real storms, a real full ring."""

import contextlib
import ctypes
import mmap
import os
import signal
import subprocess

import numpy as np
import pytest

from ingero.agent.capture.kernel import syscalls
from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.model.events import CudaOp, Source
from ingero.sim.runner import SimSettings, Simulation, get_program

pytestmark = pytest.mark.kernel

LAUNCHES = 50_021


def test_seen_is_emitted_plus_sampled_plus_lost_when_the_ring_overflows(trace_sim):
    settings = EngineSettings(host_probes=(), ring_bytes=4096)
    traced = trace_sim("storm", settings=settings, launches=LAUNCHES)
    (account,) = traced.accounts
    count = traced.count(account["pid"], Source.CUDA, CudaOp.LAUNCH_KERNEL)
    assert count["seen"] == LAUNCHES
    assert count["emitted"] + count["sampled"] + count["lost"] == LAUNCHES
    assert count["lost"] > LAUNCHES // 2
    n_records = sum(len(traced.records[ring]) for ring in ("calls", "kept_calls"))
    assert n_records == traced.counts["emitted"].sum()
    assert count["hist"].sum() == LAUNCHES  # counts do not need the ring


def test_weights_of_a_sampled_stream_add_up_to_every_call(trace_sim):
    settings = EngineSettings(host_probes=(), keep_one_in=101, keep_first=7)
    traced = trace_sim("storm", settings=settings, launches=LAUNCHES)
    (account,) = traced.accounts
    count = traced.count(account["pid"], Source.CUDA, CudaOp.LAUNCH_KERNEL)
    records = traced.calls(account["pid"], Source.CUDA, CudaOp.LAUNCH_KERNEL)
    assert count["lost"] == 0
    assert len(records) == count["emitted"] < LAUNCHES // 50
    assert count["emitted"] + count["sampled"] == LAUNCHES
    assert records["weight"].sum(dtype=np.int64) == LAUNCHES - count["pending"]
    assert set(records["weight"]) <= {1, 101}


def test_failed_calls_survive_a_storm_of_good_ones(trace_sim):
    settings = EngineSettings(host_probes=(), ring_bytes=4096)
    traced = trace_sim("primes", settings=settings)
    (account,) = traced.accounts
    failed = traced.calls(account["pid"], Source.CUDA, CudaOp.MALLOC, "failed_calls")
    assert failed["rc"].tolist() == [2, 2, 2]
    assert traced.count(account["pid"], Source.CUDA, CudaOp.LAUNCH_KERNEL)["lost"] > 0


def test_a_call_that_hangs_is_visible_while_it_hangs_and_gone_when_killed(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)))
    with Simulation(SimSettings("hang")) as simulation:
        assert simulation.read_line() == "hanging\n"
        pid = simulation.pids[0]
        flying = engine.state.read_in_flight()
        while not (flying["pid"] == pid).any():
            flying = engine.state.read_in_flight()
        flying = flying[flying["pid"] == pid]
        (call,) = flying
        assert int(call["frame"]["op"]) == CudaOp.DEVICE_SYNC
        assert int(call["tid"]) == pid
        os.kill(pid, signal.SIGKILL)
    assert not (engine.state.read_in_flight()["pid"] == pid).any()
    keys, counts = engine.state.read_counts()
    (count,) = counts[
        (keys["pid"] == pid) & (keys["op"] == CudaOp.DEVICE_SYNC) & (keys["source"] == 1)
    ]
    assert (count["entered"], count["seen"]) == (1, 0)


def test_a_process_that_ended_leaves_nothing_behind(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process", "sched")))
    with Simulation(SimSettings("leak", {"steps": 40})) as leaking:
        leaking.wait()
    with Simulation(SimSettings("hang")) as killed:
        assert killed.read_line() == "hanging\n"
    with Simulation(SimSettings("primes")) as opening:
        opening.wait()
    keys, _ = engine.state.read_counts()
    assert set(leaking.pids) <= set(keys["pid"])
    opened, _ = engine.maps["contexts"].read_all(get_dtype("handle_key"), np.dtype("<i4"))
    assert set(opened["pid"]) == set(opening.pids)
    pids = {*leaking.pids, *killed.pids, *opening.pids}
    engine.state.forget(pids)
    of_handles = ((name, "handle_key") for name in ("allocations", "contexts"))
    for name, key in (("counts", "count_key"), *of_handles):
        kept, _ = engine.maps[name].read_all(
            get_dtype(key), np.dtype(f"V{engine.maps[name].value_bytes}")
        )
        assert not set(kept["pid"]) & pids, name
    tids, _ = engine.maps["threads"].read_all(np.dtype("<u4"), get_dtype("thread"))
    assert not set(tids) & pids


def test_only_watched_processes_and_their_children_are_counted(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)), watch_own=False)
    # A shell that waits for a line, so that it is watched before it starts the workload.
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"read line; {get_program()} sync steps=11 & wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    engine.control.watch_pid(shell.pid)
    with Simulation(SimSettings("sync", {"steps": 5})) as unwatched:
        unwatched.wait()
    shell.communicate(b"go\n")
    keys, counts = engine.state.read_counts()
    is_sync = (keys["op"] == CudaOp.DEVICE_SYNC) & (keys["source"] == Source.CUDA)
    assert counts["seen"][is_sync].tolist() == [11]
    assert unwatched.pids[0] not in keys["pid"]


def fill(bpf_map):
    """Put in numbers that no process has, nor a request as its address, until the map takes no more."""
    with contextlib.suppress(OSError):
        for number in range(2 * bpf_map.max_entries):
            key = (2**22 + 1 + number).to_bytes(bpf_map.key_bytes, "little")
            bpf_map.update(key, bytes(bpf_map.value_bytes))


def test_a_process_of_which_the_host_s_events_will_be_missing_is_counted(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)))
    fill(engine.maps["gpu_pids"])
    assert engine.state.read_losses()["pids_full"] == 0
    with Simulation(SimSettings("sync", {"steps": 5})) as simulation:
        simulation.wait()
    assert engine.state.read_losses()["pids_full"] >= 1


def test_a_context_whose_device_will_not_be_known_is_counted(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)))
    fill(engine.maps["contexts"])
    assert engine.state.read_losses()["contexts_full"] == 0
    with Simulation(SimSettings("primes")) as simulation:
        simulation.wait()
    assert engine.state.read_losses()["contexts_full"] == 1


def test_a_child_that_cannot_be_watched_is_counted(start_engine):
    engine = start_engine(EngineSettings(host_probes=("process",)))
    fill(engine.maps["filter_pids"])
    subprocess.run(["/bin/true"], check=True)
    assert engine.state.read_losses()["pids_full"] >= 1


def test_a_block_request_that_finds_no_place_is_counted(start_engine, tmp_path):
    engine = start_engine(EngineSettings(host_probes=("block",)), attach=False)
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("the temporary folder is not on a block device")
    (requests,) = (one.maps["requests"] for one in engine._objects if "requests" in one.maps)
    assert engine.state.read_losses()["requests_full"] == 0
    fd = os.open(tmp_path / "written", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        with mmap.mmap(-1, 4096) as page:
            # Until a write finds it full: others' requests make room when they end. The test's timeout is the limit.
            while not engine.state.read_losses()["requests_full"]:
                fill(requests)
                os.pwrite(fd, page, 0)
    finally:
        os.close(fd)


def test_a_table_that_is_full_is_said_once_while_it_is_traced():
    said, rounds = [], []
    settings = TraceSettings(engine=EngineSettings(host_probes=("process",)), pids=(os.getpid(),))
    with TraceSession(settings, [], notify=said.append) as session:
        fill(session.engine.maps["filter_pids"])

        def is_over():
            rounds.append(subprocess.run(["/bin/true"], check=True))
            return len(rounds) > 25  # of a tenth of a second

        session.run(is_over)
    assert len([line for line in said if line.startswith("a table of processes is full")]) == 1


def loaded_programs():
    """Ids of every BPF program in the kernel (BPF_PROG_GET_NEXT_ID)."""

    class Next(ctypes.Structure):
        _fields_ = (
            ("start", ctypes.c_uint32),
            ("next", ctypes.c_uint32),
            ("flags", ctypes.c_uint32),
        )

    attr, ids = Next(), set()
    while True:
        try:
            syscalls.bpf(11, attr)
        except FileNotFoundError:
            return ids
        ids.add(attr.next)
        attr.start = attr.next


def test_closing_the_engine_removes_every_program_and_probe(start_engine):
    before = loaded_programs()
    engine = start_engine(EngineSettings())
    ours = loaded_programs() - before
    assert len(ours) >= 10
    engine.close()
    engine.close()
    while ours & loaded_programs():  # freed after a grace period of the kernel's
        pass
