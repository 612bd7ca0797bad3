"""NVIDIA's own libraries from PyPI: every listed symbol is probed there, arguments and return codes are the real ones.

Without a driver every call fails; the code it fails with is what the caller got. NCCL's library is that which `make test-libraries`
fetches; calls of it that succeed are in test_nccl_releases.py.
"""

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files

import pytest
from tests.ncclprof.releases import get_library

from ingero.agent.capture.kernel.abi import Flag
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.symbols.cuda_graph import GRAPH_RUNTIME
from ingero.agent.capture.symbols.cuda_runtime import CUDA_RUNTIME
from ingero.agent.capture.symbols.nccl import NCCL
from ingero.config.environment import ProbeMode
from ingero.model.events import CudaOp, GraphOp, NcclOp, Source

pytestmark = pytest.mark.kernel

RUNTIMES = {"libcudart.so.12": "nvidia-cuda-runtime-cu12", "libcudart.so.13": "nvidia-cuda-runtime"}

CALLS = """
import ctypes, json, os, sys
lib = ctypes.CDLL(sys.argv[1])
class Dim3(ctypes.Structure):
    _fields_ = [(a, ctypes.c_uint) for a in "xyz"]
u64, ptr, i32 = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
out, buffer = ptr(), ctypes.create_string_buffer(64)
launch = (ptr(0x1234), Dim3(7, 5, 3), Dim3(32, 2, 4), ptr(0), u64(96), ptr(0x5678))
rcs = {}
def call(name, *arguments):
    rcs.setdefault(name, []).append(getattr(lib, name)(*arguments))
for i in range(17):
    call("cudaMalloc", ctypes.byref(out), u64(4099 + i))
for i in range(13):
    call("cudaMemcpy", buffer, buffer, u64(61), i32(i % 4))
for i in range(11):
    call("cudaLaunchKernel", *launch)
for i in range(5):
    call("__cudaLaunchKernel", *launch)
for i in range(7):
    call("cudaMemcpy2DAsync", buffer, u64(64), buffer, u64(64), u64(31), u64(3), i32(2), ptr(0x99))
for i in range(3):
    call("cudaStreamBeginCapture", ptr(0x77), i32(1))
call("cudaDeviceSynchronize")
call("cudaSetDevice", i32(2))
print(json.dumps({"pid": os.getpid(), "rcs": rcs}))
"""


def find_library(package, name):
    try:
        (path,) = [file.locate() for file in files(package) if file.name == name]
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    return path


def run_calls(script, library):
    done = subprocess.run(
        [sys.executable, "-c", script, str(library)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mode", [mode for mode in ProbeMode if mode is not ProbeMode.AUTO])
@pytest.mark.parametrize("name", RUNTIMES)
def test_calls_of_the_real_runtime_carry_their_arguments_and_return_codes(
    start_engine, read, target_of, name, mode
):
    path = find_library(RUNTIMES[name], name)
    engine = start_engine(EngineSettings(host_probes=(), probe_mode=mode), attach=False)
    target = target_of(path)
    wanted = {n for function in (*CUDA_RUNTIME, *GRAPH_RUNTIME) for n in function.names()}
    assert target.libraries == ("cudart",)
    assert len(target.probes) >= len(wanted) - 10  # a few share one body
    assert engine.attach(target)
    account = run_calls(CALLS, path)
    traced = read(engine, [account])

    def failed(op, source=Source.CUDA):
        return traced.calls(account["pid"], source, op, "calls", "kept_calls", "failed_calls")

    rcs = account["rcs"]
    mallocs = failed(CudaOp.MALLOC)
    assert mallocs["bytes"].tolist() == [4099 + i for i in range(17)]
    assert mallocs["rc"].tolist() == rcs["cudaMalloc"]
    assert set(mallocs["rc"]) <= {35, 100}  # insufficient driver, no device
    copies = failed(CudaOp.MEMCPY)
    assert copies["aux"].tolist() == [i % 4 for i in range(13)]
    assert set(copies["bytes"]) == {61}
    assert copies["rc"].tolist() == rcs["cudaMemcpy"]
    launches = failed(CudaOp.LAUNCH_KERNEL)
    # CUDA 13's __cudaLaunchKernel jumps to cudaLaunchKernel.
    assert len(launches) == 16
    assert set(launches["depth"]) == {0}
    assert launches["rc"].tolist() == rcs["cudaLaunchKernel"] + rcs["__cudaLaunchKernel"]
    assert {int(r["handle"]) for r in launches} == {0x1234}
    assert {int(r["stream"]) for r in launches} == {0x5678}
    dims = [f"{d}_{a}" for d in ("grid", "block") for a in "xyz"]
    assert {tuple(int(r[d]) for d in dims) for r in launches} == {(7, 5, 3, 32, 2, 4)}
    flat = failed(CudaOp.MEMCPY_2D_ASYNC)
    assert flat["rc"].tolist() == rcs["cudaMemcpy2DAsync"]
    assert {(int(r["bytes"]), int(r["aux"]), int(r["stream"])) for r in flat} == {(93, 2, 0x99)}
    begun = failed(GraphOp.BEGIN_CAPTURE, Source.CUDA_GRAPH)
    assert {(int(r["stream"]), int(r["aux"])) for r in begun} == {(0x77, 1)}
    assert begun["rc"].tolist() == rcs["cudaStreamBeginCapture"]
    assert failed(CudaOp.DEVICE_SYNC)["rc"].tolist() == rcs["cudaDeviceSynchronize"]
    assert (failed(CudaOp.SET_DEVICE)["aux"][0], failed(CudaOp.SET_DEVICE)["device"][0]) == (2, -1)


NCCL_CALLS = """
import ctypes, json, os, sys
lib = ctypes.CDLL(sys.argv[1])
class Id(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint64 * 16)]
identity = Id((ctypes.c_uint64 * 16)(*range(1000, 1016)))
comm = ctypes.c_void_p()
rcs = [
    lib.ncclCommInitRank(ctypes.byref(comm), 5, identity, 3),
    lib.ncclCommInitRankConfig(ctypes.byref(comm), 7, identity, 6, None),
]
print(json.dumps({"pid": os.getpid(), "rcs": rcs}))
"""


def hash_of(words):
    """The documented hash of a unique id, spelled out."""
    mask = (1 << 64) - 1
    value = 0x9E3779B97F4A7C15
    for word in words:
        value ^= word
        value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ value >> 27) * 0x94D049BB133111EB & mask
        value ^= value >> 31
    return value


@pytest.mark.slow
def test_calls_of_the_real_nccl_carry_rank_size_and_identity(start_engine, read, target_of):
    path = get_library("2.32.3")
    engine = start_engine(attach=False)
    target = target_of(path)
    # It carries a static copy of the CUDA runtime, whose calls are seen too.
    assert "nccl" in target.libraries
    assert len(target.probes) >= len(NCCL) - 10
    assert engine.attach(target)
    account = run_calls(NCCL_CALLS, path)
    traced = read(engine, [account])
    made = traced.calls(account["pid"], Source.NCCL, NcclOp.COMM_INIT, "collectives")
    made = made[made["depth"] == 0]
    assert made["rank"].tolist() == [3, 6]
    assert made["nranks"].tolist() == [5, 7]
    assert made["rc"].tolist() == account["rcs"]
    assert {int(h) for h in made["comm_hash"]} == {hash_of(range(1000, 1016))}


REFUSED_CALLS = """
import ctypes, json, os, sys
lib = ctypes.CDLL(sys.argv[1])
ptr, u64 = ctypes.c_void_p, ctypes.c_uint64
out, word = ptr(), ctypes.c_int()
buffers = ptr(0x10), ptr(0x20), u64(257), 8
no_comm, stream, redop, root, config = None, ptr(0x88), 2, 1, None
calls = {}
def call(name, *arguments):
    calls[name] = getattr(lib, name)(*arguments)
for name, extra in (
    ("AllReduce", (redop,)), ("ReduceScatter", (redop,)), ("AllGather", ()), ("AlltoAll", ()), ("Broadcast", (root,)),
    ("Gather", (root,)), ("Scatter", (root,)), ("Reduce", (redop, root)),
):
    call(f"nccl{name}", *buffers, *extra, no_comm, stream)
    call(f"nccl{name}Config", *buffers, *extra, no_comm, stream, config)
for name in ("ncclBcast", "ncclSend", "ncclRecv"):
    call(name, *buffers[1:], root, no_comm, stream)
call("ncclGroupEnd")  # of no group
call("ncclGroupStart")
call("ncclGroupSimulateEnd", None)
call("ncclCommUserRank", no_comm, ctypes.byref(word))
call("ncclCommCount", no_comm, ctypes.byref(word))
for name in ("ncclCommDestroy", "ncclCommAbort", "ncclCommFinalize"):
    call(name, no_comm)
call("ncclCommRevoke", no_comm, 0)
call("ncclCommSplit", no_comm, 0, 0, ctypes.byref(out), None)
call("ncclCommInitAll", ctypes.byref(out), 1, None)
print(json.dumps({"pid": os.getpid(), "calls": calls}))
"""


@pytest.mark.slow
def test_every_function_of_the_real_nccl_is_seen_with_what_it_returned(
    start_engine, read, target_of
):
    path = get_library("2.32.3")
    engine = start_engine(EngineSettings(host_probes=(), keep_first=1 << 20), attach=False)
    assert engine.attach(target_of(path))
    account = run_calls(REFUSED_CALLS, path)
    traced = read(engine, [account])
    records = traced.records["collectives"]
    records = records[(records["pid"] == account["pid"]) & (records["depth"] == 0)]
    functions = {function.name: function for function in NCCL}
    # ncclCommShrink takes no null communicator, and the other ways to make one have a test of their own.
    left_out = {
        "ncclCommInitRank", "ncclCommInitRankConfig", "ncclCommInitRankScalable", "ncclCommShrink",
    }  # fmt: skip
    assert account["calls"].keys() == functions.keys() - left_out
    # One record a call, in the order of the calls.
    assert [(int(r["op"]), int(r["rc"])) for r in records] == [
        (functions[name].op, rc) for name, rc in account["calls"].items()
    ]
    for record, name in zip(records, account["calls"], strict=True):
        told = functions[name].roles
        if "count" in told:
            assert (record["count"], record["bytes"], record["dtype"]) == (257, 257 * 8, 8)
            assert int(record["stream"]) == 0x88
            assert record["redop"] == (2 if "redop" in told else -1)
            assert record["peer"] == (1 if "peer" in told else -1)
    assert {int(r["rc"]) for r in records[:15]} == {4}  # invalid argument
    assert account["calls"]["ncclGroupSimulateEnd"] == 0
    after = list(account["calls"]).index("ncclGroupSimulateEnd")
    assert not (records["flags"][after:] & Flag.GROUPED).any()
