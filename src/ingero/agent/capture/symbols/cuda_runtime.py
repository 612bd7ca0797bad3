"""The CUDA runtime: launches, copies, memory, waiting, devices.

Source: prototypes of ``cuda_runtime_api.h`` in CUDA 12.9 and 13.0; field offsets of ``cudaLaunchConfig_t`` and
``cudaMemcpy3DParms`` from ``driver_types.h`` there. ``_ptsz`` and ``_ptds`` are the exports for code compiled with the
per-thread default stream.
"""

from __future__ import annotations

import functools
from typing import Final

from ingero.agent.capture.kernel.abi import Act
from ingero.agent.capture.symbols.table import Function, row
from ingero.model.events import CudaOp, Source

_PTSZ: Final = ("_ptsz",)
_PTDS: Final = ("_ptds",)
_LAUNCH: Final = "func:ptr grid:dim3 block:dim3 args:ptr smem:u64 stream:ptr"
_LAUNCH_CONFIG_GRID: Final = "config@0:i32*config@4:i32*config@8:i32"
_LAUNCH_CONFIG_BLOCK: Final = "config@12:i32*config@16:i32*config@20:i32"
_COPY: Final = "dst:ptr src:ptr count:u64 kind:i32"
_COPY_2D: Final = "dst:ptr dpitch:u64 src:ptr spitch:u64 width:u64 height:u64 kind:i32"
_COPY_PEER: Final = "dst:ptr dst_device:i32 src:ptr src_device:i32 count:u64"
_SYMBOL_TO: Final = "symbol:ptr src:ptr count:u64 offset:u64 kind:i32"
_3D_BYTES: Final = (
    "p@128*p@136*p@144"  # extent of cudaMemcpy3DParms; elements, not bytes, for an array
)

_cuda = functools.partial(row, Source.CUDA)
_launch = functools.partial(
    _cuda, CudaOp.LAUNCH_KERNEL, suffixes=_PTSZ, handle="func", stream="stream"
)
_copy = functools.partial(_cuda, act=Act.COPY, size="count", aux="kind")

LAUNCHES: Final = (
    _launch("cudaLaunchKernel", _LAUNCH, grid="grid", block="block"),
    # What <<<>>> compiles to with CUDA 13's nvcc.
    _launch("__cudaLaunchKernel", _LAUNCH, grid="grid", block="block"),
    _launch("cudaLaunchCooperativeKernel", _LAUNCH, grid="grid", block="block"),
    _cuda(
        CudaOp.LAUNCH_KERNEL,
        "cudaLaunchKernelExC",
        "config:ptr func:ptr args:ptr",
        suffixes=_PTSZ,
        handle="func",
        stream="config@32",
        grid=_LAUNCH_CONFIG_GRID,
        block=_LAUNCH_CONFIG_BLOCK,
    ),
)

COPIES: Final = (
    _copy(CudaOp.MEMCPY, "cudaMemcpy", _COPY, suffixes=_PTDS),
    _copy(
        CudaOp.MEMCPY_ASYNC,
        "cudaMemcpyAsync",
        f"{_COPY} stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _cuda(
        CudaOp.MEMCPY_2D,
        "cudaMemcpy2D",
        _COPY_2D,
        act=Act.COPY,
        suffixes=_PTDS,
        size="width*height",
        aux="kind",
    ),
    _cuda(
        CudaOp.MEMCPY_2D_ASYNC,
        "cudaMemcpy2DAsync",
        f"{_COPY_2D} stream:ptr",
        act=Act.COPY,
        suffixes=_PTSZ,
        size="width*height",
        aux="kind",
        stream="stream",
    ),
    _cuda(
        CudaOp.MEMCPY_PEER,
        "cudaMemcpyPeer",
        _COPY_PEER,
        act=Act.COPY_D2D,
        size="count",
        aux="dst_device",
    ),
    _cuda(
        CudaOp.MEMCPY_PEER_ASYNC,
        "cudaMemcpyPeerAsync",
        f"{_COPY_PEER} stream:ptr",
        act=Act.COPY_D2D,
        size="count",
        aux="dst_device",
        stream="stream",
    ),
    _cuda(
        CudaOp.MEMCPY_3D,
        "cudaMemcpy3D",
        "p:ptr",
        act=Act.COPY,
        suffixes=_PTDS,
        size=_3D_BYTES,
        aux="p@152:i32",
    ),
    _cuda(
        CudaOp.MEMCPY_3D,
        "cudaMemcpy3DAsync",
        "p:ptr stream:ptr",
        act=Act.COPY,
        suffixes=_PTSZ,
        size=_3D_BYTES,
        aux="p@152:i32",
        stream="stream",
    ),
    # Sizes are an array: only how many copies there were is read.
    _cuda(
        CudaOp.MEMCPY_BATCH,
        "cudaMemcpyBatchAsync",
        "dsts:ptr srcs:ptr sizes:ptr count:u64",
        suffixes=_PTSZ,
        aux="count",
    ),
    _copy(CudaOp.MEMCPY_SYMBOL, "cudaMemcpyToSymbol", _SYMBOL_TO, suffixes=_PTDS),
    _copy(CudaOp.MEMCPY_SYMBOL, "cudaMemcpyFromSymbol", _SYMBOL_TO, suffixes=_PTDS),
    _cuda(CudaOp.MEMSET, "cudaMemset", "p:ptr value:i32 count:u64", suffixes=_PTDS, size="count"),
    _cuda(
        CudaOp.MEMSET,
        "cudaMemsetAsync",
        "p:ptr value:i32 count:u64 stream:ptr",
        suffixes=_PTSZ,
        size="count",
        stream="stream",
    ),
    _cuda(CudaOp.PREFETCH, "cudaMemPrefetchAsync", "p:ptr count:u64", suffixes=_PTSZ, size="count"),
)

_alloc = functools.partial(_cuda, act=Act.ALLOC, size="size", out="p")
_free = functools.partial(_cuda, act=Act.FREE, handle="p")

MEMORY: Final = (
    _alloc(CudaOp.MALLOC, "cudaMalloc", "p:ptr size:u64"),
    _cuda(
        CudaOp.MALLOC,
        "cudaMallocPitch",
        "p:ptr pitch:ptr width:u64 height:u64",
        act=Act.ALLOC,
        size="width*height",
        out="p",
    ),
    _free(CudaOp.FREE, "cudaFree", "p:ptr"),
    _alloc(CudaOp.MALLOC_MANAGED, "cudaMallocManaged", "p:ptr size:u64 flags:i32", aux="flags"),
    _alloc(
        CudaOp.MALLOC_ASYNC,
        "cudaMallocAsync",
        "p:ptr size:u64 stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _alloc(
        CudaOp.MALLOC_ASYNC,
        "cudaMallocFromPoolAsync",
        "p:ptr size:u64 pool:ptr stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _free(CudaOp.FREE_ASYNC, "cudaFreeAsync", "p:ptr stream:ptr", suffixes=_PTSZ, stream="stream"),
    _alloc(CudaOp.HOST_ALLOC, "cudaMallocHost", "p:ptr size:u64"),
    _alloc(CudaOp.HOST_ALLOC, "cudaHostAlloc", "p:ptr size:u64 flags:i32", aux="flags"),
    _free(CudaOp.FREE_HOST, "cudaFreeHost", "p:ptr"),
)

WAITS: Final = (
    _cuda(
        CudaOp.STREAM_SYNC,
        "cudaStreamSynchronize",
        "stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _cuda(CudaOp.DEVICE_SYNC, "cudaDeviceSynchronize", ""),
    _cuda(CudaOp.EVENT_SYNC, "cudaEventSynchronize", "event:ptr", handle="event"),
)

# Cheap and frequent: the entry alone is probed.
MARKS: Final = tuple(
    Function(
        name,
        Source.CUDA,
        op,
        "a:ptr b:ptr",
        {"handle": handle, "stream": stream},
        suffixes=_PTSZ,
        needs_return=False,
    )
    for name, op, handle, stream in (
        ("cudaEventRecord", CudaOp.EVENT_RECORD, "a", "b"),
        ("cudaEventRecordWithFlags", CudaOp.EVENT_RECORD, "a", "b"),
        ("cudaStreamWaitEvent", CudaOp.STREAM_WAIT_EVENT, "b", "a"),
    )
)

DEVICES: Final = (
    _cuda(CudaOp.SET_DEVICE, "cudaSetDevice", "device:i32", act=Act.SET_DEVICE, aux="device"),
    _cuda(CudaOp.DEVICE_RESET, "cudaDeviceReset", ""),
    _cuda(CudaOp.MODULE_LOAD, "cudaLibraryLoadData", "p:ptr code:ptr", act=Act.OUT, out="p"),
    _cuda(CudaOp.MODULE_LOAD, "cudaLibraryLoadFromFile", "p:ptr name:ptr", act=Act.OUT, out="p"),
    _cuda(CudaOp.EVENT_QUERY, "cudaEventQuery", "event:ptr", handle="event"),
    _cuda(CudaOp.STREAM_QUERY, "cudaStreamQuery", "stream:ptr", suffixes=_PTSZ, stream="stream"),
)

CUDA_RUNTIME: Final[tuple[Function, ...]] = (
    *LAUNCHES,
    *COPIES,
    *MEMORY,
    *WAITS,
    *MARKS,
    *DEVICES,
)
