"""Real CUDA, PyTorch and NCCL on a real GPU: what is traced equals what the program says it did."""

import json
import subprocess
import sys

import pytest

from ingero.config.torch import find_torch_python

pytestmark = [pytest.mark.gpu, pytest.mark.kernel, pytest.mark.torch]

RUNTIME = """
import ctypes, glob, json, os, sys, time
import torch
path = next(p for line in open("/proc/self/maps") if "libcudart" in (p := line.split()[-1]))
lib = ctypes.CDLL(path)
ptr, u64, i32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
def check(rc): assert rc == 0, rc
host = ctypes.create_string_buffer(1 << 20)
buffers = []
for i in range(13):
    out = ptr(); check(lib.cudaMalloc(ctypes.byref(out), u64((1 << 20) + i))); buffers.append(out)
for i in range(11):
    check(lib.cudaMemcpy(buffers[0], host, u64(1 << 20), i32(1)))
for i in range(7):
    check(lib.cudaMemcpy(host, buffers[0], u64(1 << 19), i32(2)))
stream = ptr(); check(lib.cudaStreamCreate(ctypes.byref(stream)))
for i in range(5):
    check(lib.cudaStreamSynchronize(stream))
assert lib.cudaMalloc(ctypes.byref(ptr()), u64(1 << 50)) == 2
for buffer in buffers:
    check(lib.cudaFree(buffer))
print(json.dumps({"pid": os.getpid()}))
"""

TORCH = """
import json, os
import torch
x = torch.ones(1009, device="cuda")
torch.cuda.synchronize()
for _ in range(101):
    x.add_(1.0)
torch.cuda.synchronize()
assert float(x[0]) == 102.0
print(json.dumps({"pid": os.getpid()}))
"""

NCCL = """
import json, os
import torch, torch.distributed as dist
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
store = dist.HashStore()
dist.init_process_group("nccl", store=store, rank=0, world_size=1)
x = torch.ones(4099, device="cuda")
for _ in range(17):
    dist.all_reduce(x)
out = torch.empty(4099, device="cuda")
for _ in range(7):
    dist.all_gather_into_tensor(out, x)
torch.cuda.synchronize()
dist.destroy_process_group()
print(json.dumps({"pid": os.getpid()}))
"""


def trace(script, tmp_path):
    """Counts by (source, op) of the program, and its events."""
    program = tmp_path / "program.py"
    program.write_text(script)
    run = subprocess.run(
        [sys.executable, "-m", "ingero", "trace", "--json", "--no-record", "--record-all",
         "--sampling-rate", "1", "--", str(find_torch_python()), str(program)],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    said = [line for line in run.stderr.splitlines() if line.startswith('{"pid"')]
    pid = json.loads(said[-1])["pid"]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    counts = {
        (line["source"], line["op"]): line
        for line in lines
        if line["type"] == "counts" and line["pid"] == pid
    }
    events = [line for line in lines if line["type"] == "event" and line["pid"] == pid]
    (coverage,) = [line for line in lines if line["type"] == "coverage"]
    assert coverage["seen"] == coverage["emitted"] + coverage["sampled"] + coverage["lost"]
    return counts, events


def test_runtime_calls_are_counted_with_their_bytes_and_errors(tmp_path):
    counts, _ = trace(RUNTIME, tmp_path)
    malloc = counts["cuda", "cudaMalloc"]
    assert malloc["seen"] >= 14
    assert malloc["errors"] == 1
    copies = counts["cuda", "cudaMemcpy"]
    assert copies["seen"] == 18
    assert copies["bytes"] == 11 * (1 << 20) + 7 * (1 << 19)
    assert counts["cuda", "cudaStreamSync"]["seen"] >= 5
    assert counts["cuda", "cudaFree"]["seen"] >= 13


def test_each_kernel_that_torch_launches_is_seen_once(tmp_path):
    counts, _ = trace(TORCH, tmp_path)
    launches = sum(
        line["seen"] - line["nested"]
        for (source, op), line in counts.items()
        if op.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    )
    # ones, 101 additions, and what reading x[0] and start-up launch
    assert 102 <= launches <= 112
    assert counts["cuda", "cudaLaunchKernel"]["nested"] == 0


def test_collectives_of_torch_carry_bytes_rank_and_size(tmp_path):
    counts, events = trace(NCCL, tmp_path)
    reduce = counts["nccl", "ncclAllReduce"]
    gather = counts["nccl", "ncclAllGather"]
    assert (reduce["seen"], gather["seen"]) == (17, 7)
    assert reduce["bytes"] == 17 * 4099 * 4
    seen = [line for line in events if line["op"] == "ncclAllReduce"]
    assert {(line["comm_rank"], line["nranks"]) for line in seen} == {(0, 1)}
    assert [line["seq"] for line in seen] == sorted(line["seq"] for line in seen)
