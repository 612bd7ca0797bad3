"""What judges is never sampled, and every probed function is one or the other on purpose."""

import numpy as np

from ingero.agent.capture.symbols.libraries import FUNCTIONS
from ingero.model.events import CudaOp, DriverOp, GraphOp, HostOp, IoOp, NcclOp, NetOp, Source
from ingero.model.sampling import NEVER_SAMPLED, is_never_sampled

SAMPLED_FUNCTIONS = {
    (Source.CUDA, "LAUNCH_KERNEL"), (Source.CUDA, "MEMCPY_ASYNC"), (Source.CUDA, "MEMCPY_2D_ASYNC"),
    (Source.CUDA, "MEMCPY_PEER_ASYNC"), (Source.CUDA, "MEMCPY_BATCH"), (Source.CUDA, "MEMSET"),
    (Source.CUDA, "PREFETCH"), (Source.CUDA, "SET_DEVICE"),
    (Source.CUDA, "EVENT_QUERY"), (Source.CUDA, "STREAM_QUERY"), (Source.DRIVER, "LAUNCH_KERNEL"),
    (Source.DRIVER, "MEMCPY_ASYNC"), (Source.DRIVER, "MEMCPY_HTOD_ASYNC"), (Source.DRIVER, "MEMCPY_DTOH_ASYNC"),
    (Source.DRIVER, "MEMCPY_DTOD_ASYNC"), (Source.DRIVER, "MEMCPY_2D_ASYNC"), (Source.DRIVER, "MEMSET"), (Source.DRIVER, "CTX_SET_CURRENT"),
}  # fmt: skip


def test_a_new_function_is_never_sampled_unless_somebody_decides_otherwise():
    sampled = {(f.source, f.op.name) for f in FUNCTIONS if (f.source, f.op) not in NEVER_SAMPLED}
    assert sampled == SAMPLED_FUNCTIONS


def test_collectives_waits_memory_graphs_and_process_life_are_never_sampled():
    for source, ops in (
        (Source.NCCL, NcclOp),
        (Source.CUDA_GRAPH, GraphOp),
        (Source.CUDA, (CudaOp.DEVICE_SYNC, CudaOp.STREAM_SYNC, CudaOp.EVENT_SYNC, CudaOp.MEMCPY, CudaOp.FREE)),
        (Source.CUDA, (CudaOp.MALLOC, CudaOp.MALLOC_MANAGED, CudaOp.HOST_ALLOC, CudaOp.FREE_HOST, CudaOp.MODULE_LOAD)),
        (Source.DRIVER, (DriverOp.CTX_SYNC, DriverOp.MEM_ALLOC, DriverOp.MEM_CREATE, DriverOp.MEMCPY_HTOD)),
        (Source.HOST, (HostOp.SCHED_SWITCH, HostOp.OOM_KILL, HostOp.EXIT, HostOp.DIRECT_RECLAIM, HostOp.PAGE_FAULT)),
    ):  # fmt: skip
        assert {(source, op) for op in ops} <= NEVER_SAMPLED
    assert (
        not {(Source.HOST, HostOp.PAGE_ALLOC), (Source.IO, IoOp.READ), (Source.NET, NetOp.SEND)}
        & NEVER_SAMPLED
    )


def test_rows_are_told_apart_at_once_also_of_codes_that_nobody_knows():
    sources = np.array([1, 1, 9, 255], np.uint8)
    ops = np.array([3, 1, 3, 255], np.uint8)
    assert is_never_sampled(sources, ops).tolist() == [False, True, True, False]
