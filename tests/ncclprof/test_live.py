"""`ingero fleet-push` on a node that it probes, with a job that has the plug-in: each collective reaches Fleet once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ingero.model.collectives import ClockKind, CollectiveOp
from ingero.sim.runner import get_program
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import read_collectives

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
PROGRAM = "from ingero.cli.main import main; main()"
STEPS = 30
RANK_NUMBER = os.getpid()
"""The agent sees every job of the machine; nobody else's has this rank."""
NCCL_COMM = 0xFEED_0000_0000_0009

RANK = """
import ctypes, json, os, sys, time
from tests.ncclprof.nccl import Plugin
folder, n_steps, comm_hash = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
cuda, nccl = ctypes.CDLL(folder + "/libcudart.so.12"), ctypes.CDLL(folder + "/libnccl.so.2")
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
unique, comm, stream = Id(), ctypes.c_void_p(), ctypes.c_void_p()
sys.stdin.readline()
assert nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0
assert nccl.ncclCommInitRank(ctypes.byref(comm), 1, unique, 0) == 0
assert cuda.cudaStreamCreate(ctypes.byref(stream)) == 0
told = Plugin().init(comm=comm_hash, rank=0, n_ranks=1)
buffer, count = ctypes.c_void_p(4096), ctypes.c_size_t(1000)
for step in range(n_steps):
    time.sleep(0.01)
    assert nccl.ncclAllReduce(buffer, buffer, count, 7, 0, comm, stream) == 0
    start_ns = (step + 1) * 20_000_000
    told.play(start_ns, start_ns + 5_000_000)
    assert cuda.cudaStreamSynchronize(stream) == 0
# Of this one the plug-in says nothing, as of those that NCCL leaves to the copy engine.
assert nccl.ncclBroadcast(buffer, buffer, count, 7, 0, comm, stream) == 0
assert cuda.cudaStreamSynchronize(stream) == 0
print(json.dumps({"pid": os.getpid()}), flush=True)
sys.stdin.readline()
"""


def runs_of_rank(collector, rank):
    runs = [run for export in collector.logs for run in read_collectives(export).runs]
    return [run for run in runs if run.rank.rank == rank]


def ops_of(runs, clock):
    return [tuple(op) for run in runs if run.clock is clock for op in run.ops.tolist()]


def test_device_times_replace_the_hosts_and_nothing_is_counted_twice(collector, rings, tmp_path):
    agent = subprocess.Popen(
        [
            *(sys.executable, "-c", PROGRAM, "fleet-push", "--json"),
            *("--fleet-endpoint", f"127.0.0.1:{collector.port}", "--fleet-insecure"),
            *("--fleet-cluster-id", "c", "--fleet-node-id", "n"),
            *("--fleet-push-interval", "1s", "--fleet-timeout", "1s"),
            *("--fleet-protocol", "http/protobuf"),
            *("--fleet-persist-path", str(tmp_path / "baseline.json")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = subprocess.Popen(
        [sys.executable, "-c", RANK, str(get_program().parent), str(STEPS), str(NCCL_COMM)],
        env={**os.environ, "RANK": str(RANK_NUMBER)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        collector.wait_for(1)  # counts are read, so the probes wait
        job.stdin.write("go\n")
        job.stdin.flush()
        assert json.loads(job.stdout.readline())["pid"] == job.pid
        wait_until(
            lambda: len(ops_of(runs_of_rank(collector, RANK_NUMBER), ClockKind.DEVICE)) >= STEPS
        )
        wait_until(lambda: ops_of(runs_of_rank(collector, RANK_NUMBER), ClockKind.SYNC))
        runs = runs_of_rank(collector, RANK_NUMBER)
        device = [run for run in runs if run.clock is ClockKind.DEVICE]
        assert {(run.comm, run.comm_rank, run.n_ranks) for run in device} == {
            (f"{NCCL_COMM:016x}", 0, 1)
        }
        ops = ops_of(runs, ClockKind.DEVICE)
        assert [op[0] for op in ops] == list(range(1, STEPS + 1))
        assert [op[2] for op in ops] == [5_000_000] * STEPS
        assert [op[3] for op in ops] == [-1] + [15_000_000] * (STEPS - 1)
        by_host = ops_of(runs, ClockKind.SYNC) + ops_of(runs, ClockKind.ENQUEUE)
        assert [op[5] for op in by_host] == [CollectiveOp.BROADCAST]
    finally:
        for process in (job, agent):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=120)
