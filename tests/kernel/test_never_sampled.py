"""What judges has a record of every call, whatever the sampling and whatever else happens. Real probes, real storms."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ingero.agent.capture.discover.gpu_views import read_gpu_view
from ingero.agent.capture.kernel.abi import Flag, Stacks
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.model.events import CudaOp, HostOp, Source
from ingero.model.sampling import NEVER_SAMPLED, is_never_sampled
from ingero.recording.store.reader import load_recording
from ingero.sim.runner import SimSettings, Simulation

pytestmark = pytest.mark.kernel

INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
HARD = {"keep_one_in": 997, "keep_first": 0}
FLOOD = 16_384


def test_allocations_frees_and_waits_keep_every_record_while_launches_are_sampled(trace_sim):
    settings = EngineSettings(host_probes=("sched",), **HARD)
    traced = trace_sim("leak", settings=settings, steps=400)
    (account,) = traced.accounts
    pid = account["pid"]
    for op, n_calls in ((CudaOp.MALLOC, 400), (CudaOp.FREE, 300), (CudaOp.DEVICE_SYNC, 400)):
        records = traced.calls(pid, Source.CUDA, op)
        assert len(records) == traced.count(pid, Source.CUDA, op)["seen"] == n_calls
        assert set(records["weight"]) == {1}
        assert (records["flags"] & Flag.EXACT).all()
    switches = traced.count(pid, Source.HOST, HostOp.SCHED_SWITCH)
    spans = traced.records["off_cpus"]
    assert (spans["pid"] == pid).sum() == switches["seen"] == switches["emitted"]
    launches = traced.calls(pid, Source.CUDA, CudaOp.LAUNCH_KERNEL)
    assert len(launches) < 400


def test_a_storm_of_launches_cannot_push_a_wait_out_of_its_ring(trace_sim):
    settings = EngineSettings(host_probes=(), ring_bytes=4096)
    traced = trace_sim("train", settings=settings, steps=50, kernels=200)
    (account,) = traced.accounts
    lost = traced.keys[traced.counts["lost"] > 0]
    assert traced.counts["lost"].sum() > 1000
    assert not is_never_sampled(lost["source"], lost["op"]).any()
    waits = [key for key in traced.keys if (int(key["source"]), int(key["op"])) in NEVER_SAMPLED]
    assert len(waits) >= 2
    for key in waits:
        count = traced.count(*key[["pid", "source", "op"]].tolist())
        assert count["emitted"] == count["seen"], key
    assert account["pid"] in {int(key["pid"]) for key in waits}


def test_a_flood_of_what_is_never_sampled_is_limited_and_counted_as_lost(trace_sim):
    traced = trace_sim("cost", settings=EngineSettings(host_probes=()), launches=300_000)
    (account,) = traced.accounts
    count = traced.count(account["pid"], Source.CUDA, CudaOp.EVENT_RECORD)
    assert count["lost"] > 0 == count["sampled"]
    assert count["seen"] == count["emitted"] + count["lost"] >= 300_000
    records = traced.calls(account["pid"], Source.CUDA, CudaOp.EVENT_RECORD)
    assert len(records) == count["emitted"]
    windows = records["header"]["mono_ns"] >> 30
    _, n_records = np.unique(np.stack([windows, records["cpu"]]), axis=1, return_counts=True)
    assert n_records.max() <= FLOOD


@pytest.mark.parametrize(("n_bytes", "n_kept"), [(1 << 20, 300), ((1 << 20) - 1, 0)])
def test_large_copies_are_kept_and_small_ones_sampled(trace_sim, n_bytes, n_kept):
    settings = EngineSettings(host_probes=(), **HARD)
    traced = trace_sim("train", settings=settings, steps=300, loader_us=0, batch_bytes=n_bytes)
    (account,) = traced.accounts
    records = traced.calls(account["pid"], Source.CUDA, CudaOp.MEMCPY_ASYNC)
    is_large = (records["flags"] & Flag.LARGE) != 0
    assert is_large.sum() == n_kept
    slow = (records["flags"] & Flag.SLOW) != 0
    assert len(records) <= n_kept + slow.sum() + 300 // 997 * (os.cpu_count() or 1)


def test_a_slow_or_failed_call_carries_its_stack_and_an_ordinary_one_does_not(trace_sim):
    settings = EngineSettings(host_probes=(), stacks=Stacks.NOTABLE)
    traced = trace_sim("primes", settings=settings)
    failed = traced.calls(traced.accounts[0]["pid"], Source.CUDA, CudaOp.MALLOC, "failed_calls")
    assert len(failed) == 3
    assert failed["stack_id"].all()
    for ring in ("calls", "kept_calls"):
        records = traced.records[ring]
        assert len(records)
        is_slow = (records["flags"] & Flag.SLOW) != 0
        assert not records["stack_id"][~is_slow].any()
        assert records["stack_id"][is_slow].all()


def test_when_tracing_is_over_counts_and_records_agree_although_the_program_goes_on(
    start_engine, read
):
    engine = start_engine(EngineSettings(host_probes=("sched",)))
    with Simulation(SimSettings("train", {"steps": 100_000_000, "kernels": 3})) as simulation:
        seen = 0
        while seen < 2000:
            seen = int(engine.state.read_counts()[1]["seen"].sum())
        engine.control.end()
        traced = read(engine, [])
        again = read(engine, [])
        assert simulation.pids
    assert traced.counts["seen"].sum() == again.counts["seen"].sum() >= 2000
    n_records = sum(
        len(traced.records[ring]) + len(again.records[ring])
        for ring in ("calls", "kept_calls", "failed_calls", "off_cpus")
    )
    assert n_records == again.counts["emitted"].sum()


def test_a_recording_holds_every_collective_and_its_weights_add_up_to_every_call(tmp_path):
    database = tmp_path / "r.db"
    command = (*INGERO, "trace", "--json", "--db", database, "--")
    program = (
        *INGERO,
        "sim",
        "run",
        "ranks",
        "--ranks",
        2,
        "steps=500",
        "kernels=40",
        "wait_us=300000",
    )
    result = subprocess.run(
        [*map(str, command), *map(str, program)], capture_output=True, text=True, env=PLAIN, check=True
    )  # fmt: skip
    counts = [
        line for line in map(json.loads, result.stdout.splitlines()) if line["type"] == "counts"
    ]
    recording = load_recording(Path(database))
    events, aggregates = recording.events, recording.aggregates
    assert (aggregates["source"] == Source.NCCL).any()
    exact = aggregates[is_never_sampled(aggregates["source"], aggregates["op"])]
    # Of all minutes: a call is counted with the next totals, which may be in the minute after its row's.
    _, kind = np.unique(exact[["source", "op", "pid"]], return_inverse=True)
    count, stored = (np.bincount(kind, exact[name]) for name in ("count", "stored"))
    is_counted = count > 0  # starts and ends of processes have rows alone
    assert is_counted.sum() > 4
    assert count[is_counted].tolist() == stored[is_counted].tolist()
    assert not exact["lost"].any()
    launches = [line for line in counts if line["op"] == "cudaLaunchKernel"]
    assert len(launches) == 2
    shown = read_gpu_view(Path("/proc/self"), {})
    assert [recording.gpu_views[0, line["pid"]] for line in launches] == [shown, shown]
    for line in launches:
        rows = events[
            (events["pid"] == line["pid"])
            & (events["source"] == Source.CUDA)
            & (events["op"] == CudaOp.LAUNCH_KERNEL)
        ]
        assert line["seen"] == 500 * 40
        assert len(rows) < line["seen"]
        # What waits in the kernel for the next record that will carry it is less than one in a thousand and 24 on each
        # CPU.
        pending = line["seen"] - line["lost"] - int(rows["weight"].sum())
        assert 0 <= pending < 1024 * (os.cpu_count() or 1)
