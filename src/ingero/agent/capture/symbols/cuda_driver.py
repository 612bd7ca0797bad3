"""The CUDA driver API.

Source: prototypes of ``cuda.h`` in CUDA 12.9 and 13.0, with the exported ``_v2`` names that the header's macros choose;
field offsets of ``CUlaunchConfig``, ``CUDA_MEMCPY2D``, ``CUDA_MEMCPY3D`` and ``CUDA_MEMCPY3D_PEER`` from the same file.

``cuEventRecord`` and ``cuStreamWaitEvent`` are left out: the runtime's functions of the same names call them, only the
entry of those is probed, and a call inside one of them would not be marked as nested and would be counted twice.
"""

from __future__ import annotations

import functools
from typing import Final

from ingero.agent.capture.kernel.abi import Act
from ingero.agent.capture.symbols.table import Function, row
from ingero.model.events import DriverOp, Source

_PTSZ: Final = ("_ptsz",)
_PTDS: Final = ("_ptds",)
_2D_BYTES: Final = "p@112*p@120"  # width in bytes and height of CUDA_MEMCPY2D
_3D_BYTES: Final = (
    "p@176*p@184*p@192"  # width in bytes, height and depth, of CUDA_MEMCPY3D_PEER too
)
_DIMS: Final = "f:ptr gx:i32 gy:i32 gz:i32 bx:i32 by:i32 bz:i32 smem:i32 stream:ptr"

_driver = functools.partial(row, Source.DRIVER)
_launch = functools.partial(
    _driver,
    DriverOp.LAUNCH_KERNEL,
    suffixes=_PTSZ,
    handle="f",
    stream="stream",
    grid="gx*gy*gz",
    block="bx*by*bz",
)
_alloc = functools.partial(_driver, act=Act.ALLOC, size="size", out="p")
_free = functools.partial(_driver, act=Act.FREE, handle="p")

LAUNCHES: Final = (
    _launch("cuLaunchKernel", _DIMS),
    _launch("cuLaunchCooperativeKernel", _DIMS),
    # What Triton's launcher looks up.
    _driver(
        DriverOp.LAUNCH_KERNEL,
        "cuLaunchKernelEx",
        "config:ptr f:ptr params:ptr extra:ptr",
        suffixes=_PTSZ,
        handle="f",
        stream="config@32",
        grid="config@0:i32*config@4:i32*config@8:i32",
        block="config@12:i32*config@16:i32*config@20:i32",
    ),
)

COPIES: Final = (
    _driver(
        DriverOp.MEMCPY,
        "cuMemcpy",
        "dst:ptr src:ptr size:u64",
        act=Act.COPY_DEFAULT,
        suffixes=_PTDS,
        size="size",
    ),
    _driver(
        DriverOp.MEMCPY_ASYNC,
        "cuMemcpyAsync",
        "dst:ptr src:ptr size:u64 stream:ptr",
        act=Act.COPY_DEFAULT,
        suffixes=_PTSZ,
        size="size",
        stream="stream",
    ),
    *(
        _driver(op, name, "dst:ptr src:ptr size:u64", act=act, suffixes=_PTDS, size="size")
        for name, op, act in (
            ("cuMemcpyHtoD_v2", DriverOp.MEMCPY_HTOD, Act.COPY_H2D),
            ("cuMemcpyDtoH_v2", DriverOp.MEMCPY_DTOH, Act.COPY_D2H),
            ("cuMemcpyDtoD_v2", DriverOp.MEMCPY_DTOD, Act.COPY_D2D),
        )
    ),
    *(
        _driver(
            op,
            name,
            "dst:ptr src:ptr size:u64 stream:ptr",
            act=act,
            suffixes=_PTSZ,
            size="size",
            stream="stream",
        )
        for name, op, act in (
            ("cuMemcpyHtoDAsync_v2", DriverOp.MEMCPY_HTOD_ASYNC, Act.COPY_H2D),
            ("cuMemcpyDtoHAsync_v2", DriverOp.MEMCPY_DTOH_ASYNC, Act.COPY_D2H),
            ("cuMemcpyDtoDAsync_v2", DriverOp.MEMCPY_DTOD_ASYNC, Act.COPY_D2D),
        )
    ),
    _driver(
        DriverOp.MEMCPY_PEER,
        "cuMemcpyPeer",
        "dst:ptr dst_ctx:ptr src:ptr src_ctx:ptr size:u64",
        act=Act.COPY_D2D,
        suffixes=_PTDS,
        size="size",
    ),
    _driver(
        DriverOp.MEMCPY_PEER,
        "cuMemcpyPeerAsync",
        "dst:ptr dst_ctx:ptr src:ptr src_ctx:ptr size:u64 stream:ptr",
        act=Act.COPY_D2D,
        suffixes=_PTSZ,
        size="size",
        stream="stream",
    ),
    # Which memory each side is says the structure, in two fields: the direction is not read.
    *(
        _driver(op, name, "p:ptr", suffixes=_PTDS, size=size)
        for name, op, size in (
            ("cuMemcpy2D_v2", DriverOp.MEMCPY_2D, _2D_BYTES),
            ("cuMemcpy2DUnaligned_v2", DriverOp.MEMCPY_2D, _2D_BYTES),
            ("cuMemcpy3D_v2", DriverOp.MEMCPY_3D, _3D_BYTES),
            ("cuMemcpy3DPeer", DriverOp.MEMCPY_3D, _3D_BYTES),
        )
    ),
    *(
        _driver(op, name, "p:ptr stream:ptr", suffixes=_PTSZ, size=size, stream="stream")
        for name, op, size in (
            ("cuMemcpy2DAsync_v2", DriverOp.MEMCPY_2D_ASYNC, _2D_BYTES),
            ("cuMemcpy3DAsync_v2", DriverOp.MEMCPY_3D, _3D_BYTES),
            ("cuMemcpy3DPeerAsync", DriverOp.MEMCPY_3D, _3D_BYTES),
        )
    ),
    _driver(
        DriverOp.MEMSET,
        "cuMemsetD8_v2",
        "dst:ptr value:i32 size:u64",
        suffixes=_PTDS,
        size="size",
    ),
    _driver(
        DriverOp.MEMSET,
        "cuMemsetD8Async",
        "dst:ptr value:i32 size:u64 stream:ptr",
        suffixes=_PTSZ,
        size="size",
        stream="stream",
    ),
    # Their last argument counts elements of two or four bytes, which a size cannot be made of: the bytes stay 0.
    *(
        _driver(DriverOp.MEMSET, name, "dst:ptr value:i32 n:u64", suffixes=_PTDS)
        for name in ("cuMemsetD16_v2", "cuMemsetD32_v2")
    ),
    *(
        _driver(
            DriverOp.MEMSET,
            name,
            "dst:ptr value:i32 n:u64 stream:ptr",
            suffixes=_PTSZ,
            stream="stream",
        )
        for name in ("cuMemsetD16Async", "cuMemsetD32Async")
    ),
)

MEMORY: Final = (
    _alloc(DriverOp.MEM_ALLOC, "cuMemAlloc_v2", "p:ptr size:u64"),
    _driver(
        DriverOp.MEM_ALLOC,
        "cuMemAllocPitch_v2",
        "p:ptr pitch:ptr width:u64 height:u64 element:i32",
        act=Act.ALLOC,
        size="width*height",
        out="p",
    ),
    _alloc(
        DriverOp.MEM_ALLOC_MANAGED, "cuMemAllocManaged", "p:ptr size:u64 flags:i32", aux="flags"
    ),
    _free(DriverOp.MEM_FREE, "cuMemFree_v2", "p:ptr"),
    _alloc(
        DriverOp.MEM_ALLOC_ASYNC,
        "cuMemAllocAsync",
        "p:ptr size:u64 stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _alloc(
        DriverOp.MEM_ALLOC_ASYNC,
        "cuMemAllocFromPoolAsync",
        "p:ptr size:u64 pool:ptr stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _free(
        DriverOp.MEM_FREE_ASYNC,
        "cuMemFreeAsync",
        "p:ptr stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _alloc(DriverOp.HOST_ALLOC, "cuMemAllocHost_v2", "p:ptr size:u64"),
    _alloc(DriverOp.HOST_ALLOC, "cuMemHostAlloc", "p:ptr size:u64 flags:i32", aux="flags"),
    _free(DriverOp.FREE_HOST, "cuMemFreeHost", "p:ptr"),
    # Virtual memory management: what PyTorch's expandable segments are made of.
    _alloc(DriverOp.MEM_CREATE, "cuMemCreate", "p:ptr size:u64 prop:ptr flags:u64"),
    _free(DriverOp.MEM_RELEASE, "cuMemRelease", "p:ptr"),
    _driver(
        DriverOp.MEM_MAP,
        "cuMemMap",
        "p:ptr size:u64 offset:u64 handle:ptr flags:u64",
        handle="handle",
        size="size",
    ),
    _driver(DriverOp.MEM_UNMAP, "cuMemUnmap", "p:ptr size:u64", handle="p", size="size"),
)

WAITS: Final = (
    _driver(
        DriverOp.STREAM_SYNC,
        "cuStreamSynchronize",
        "stream:ptr",
        suffixes=_PTSZ,
        stream="stream",
    ),
    _driver(DriverOp.EVENT_SYNC, "cuEventSynchronize", "event:ptr", handle="event"),
    _driver(DriverOp.CTX_SYNC, "cuCtxSynchronize", ""),
    _driver(DriverOp.CTX_SYNC, "cuCtxSynchronize_v2", "ctx:ptr", handle="ctx"),
)

CONTEXTS: Final = (
    # JAX, among others, names its devices by these two alone.
    _driver(
        DriverOp.CTX_SET_CURRENT, "cuCtxSetCurrent", "ctx:ptr", act=Act.SET_CONTEXT, handle="ctx"
    ),
    _driver(
        DriverOp.PRIMARY_CTX_RETAIN,
        "cuDevicePrimaryCtxRetain",
        "p:ptr device:i32",
        act=Act.OPEN_CONTEXT,
        out="p",
        aux="device",
    ),
    *(
        _driver(DriverOp.MODULE_LOAD, name, "p:ptr image:ptr", act=Act.OUT, out="p")
        for name in (
            "cuModuleLoad",
            "cuModuleLoadData",
            "cuModuleLoadDataEx",
            "cuModuleLoadFatBinary",
            "cuLibraryLoadData",
            "cuLibraryLoadFromFile",
        )
    ),
    # Where code is loaded lazily, the load itself is in here.
    _driver(
        DriverOp.MODULE_GET_FUNCTION,
        "cuModuleGetFunction",
        "p:ptr module:ptr name:ptr",
        act=Act.OUT,
        out="p",
    ),
)

# Adding PTX compiles it, and completing links: either may take seconds.
LINKS: Final = tuple(
    _driver(DriverOp.LINK, name, prototype, handle="link")
    for name, prototype in (
        ("cuLinkAddData_v2", "link:ptr type:i32 data:ptr size:u64 name:ptr n_options:i32"),
        ("cuLinkAddFile_v2", "link:ptr type:i32 path:ptr n_options:i32"),
        ("cuLinkComplete", "link:ptr image:ptr size:ptr"),
    )
)

CUDA_DRIVER: Final[tuple[Function, ...]] = (
    *LAUNCHES,
    *COPIES,
    *MEMORY,
    *WAITS,
    *CONTEXTS,
    *LINKS,
)
