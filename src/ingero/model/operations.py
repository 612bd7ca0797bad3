"""What an operation does: the one table that the recorder, its counters, the rules and the queries read."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ingero.model.events import (
    OP_NAMES,
    CudaOp,
    DriverOp,
    GlooOp,
    GpuOp,
    GraphOp,
    HostOp,
    IoOp,
    NcclOp,
    Source,
)


class OpKind(IntEnum):
    """What an operation does. Those from LAUNCH to OTHER_CALL are calls that a thread makes towards the GPU."""

    OTHER = 0
    LAUNCH = 1
    COPY = 2
    SYNC = 3
    ALLOC = 4  # of device memory, managed memory among it
    FREE = 5
    MODULE = 6
    GRAPH_LAUNCH = 7
    GRAPH = 8
    COLLECTIVE = 9
    FILL = 10  # memory that is written or moved without a host side: no copy to the rules
    MAP = 11  # address ranges, which hold no memory of their own
    UNMAP = 12
    HOST_ALLOC = 13  # of pinned host memory: the host's, whatever the device holds
    HOST_FREE = 14
    OTHER_CALL = 15
    OFF_CPU = 20
    FAULT = 21
    RECLAIM = 22
    QUOTA = 23
    READ = 24
    WRITE = 25
    NETWORK = 26
    RETRANSMIT = 27
    FACT = 28
    LIFE = 29


LAST_CALL: Final = OpKind.OTHER_CALL
CALLS: Final = tuple(kind for kind in OpKind if OpKind.OTHER < kind <= LAST_CALL)
"""Kinds of calls towards the GPU."""
GPU_SOURCES: Final = (Source.CUDA, Source.DRIVER, Source.CUDA_GRAPH, Source.NCCL)
"""Where calls towards the GPU come from."""

_BY_SOURCE: Final = {
    Source.CUDA: OpKind.OTHER_CALL,
    Source.DRIVER: OpKind.OTHER_CALL,
    Source.NCCL: OpKind.OTHER_CALL,
    Source.GLOO: OpKind.OTHER_CALL,
    Source.CUDA_GRAPH: OpKind.GRAPH,
    Source.NET: OpKind.NETWORK,
    Source.TCP: OpKind.RETRANSMIT,
    Source.GPU: OpKind.FACT,
}
"""What an operation is that `_BY_OPERATION` does not name."""

_SOURCES: Final[dict[type[IntEnum], Source]] = {
    CudaOp: Source.CUDA, DriverOp: Source.DRIVER, GraphOp: Source.CUDA_GRAPH, NcclOp: Source.NCCL,
    HostOp: Source.HOST, IoOp: Source.IO, GpuOp: Source.GPU, GlooOp: Source.GLOO,
}  # fmt: skip

_BY_OPERATION: Final[dict[OpKind, tuple[IntEnum, ...]]] = {
    OpKind.LAUNCH: (CudaOp.LAUNCH_KERNEL, DriverOp.LAUNCH_KERNEL),
    OpKind.GRAPH_LAUNCH: (GraphOp.LAUNCH,),
    OpKind.COPY: (
        CudaOp.MEMCPY, CudaOp.MEMCPY_ASYNC, CudaOp.MEMCPY_2D, CudaOp.MEMCPY_2D_ASYNC, CudaOp.MEMCPY_PEER,
        CudaOp.MEMCPY_PEER_ASYNC, CudaOp.MEMCPY_BATCH, CudaOp.MEMCPY_3D, CudaOp.MEMCPY_SYMBOL,
        DriverOp.MEMCPY, DriverOp.MEMCPY_ASYNC, DriverOp.MEMCPY_HTOD, DriverOp.MEMCPY_DTOH, DriverOp.MEMCPY_DTOD,
        DriverOp.MEMCPY_HTOD_ASYNC, DriverOp.MEMCPY_DTOH_ASYNC, DriverOp.MEMCPY_DTOD_ASYNC, DriverOp.MEMCPY_PEER,
        DriverOp.MEMCPY_2D, DriverOp.MEMCPY_2D_ASYNC, DriverOp.MEMCPY_3D,
    ),
    OpKind.FILL: (CudaOp.MEMSET, CudaOp.PREFETCH, DriverOp.MEMSET),
    OpKind.SYNC: (
        CudaOp.STREAM_SYNC, CudaOp.DEVICE_SYNC, CudaOp.EVENT_SYNC,
        DriverOp.CTX_SYNC, DriverOp.STREAM_SYNC, DriverOp.EVENT_SYNC,
    ),
    OpKind.ALLOC: (
        CudaOp.MALLOC, CudaOp.MALLOC_MANAGED, CudaOp.MALLOC_ASYNC,
        DriverOp.MEM_ALLOC, DriverOp.MEM_ALLOC_MANAGED, DriverOp.MEM_ALLOC_ASYNC, DriverOp.MEM_CREATE,
    ),
    OpKind.FREE: (
        CudaOp.FREE, CudaOp.FREE_ASYNC, DriverOp.MEM_FREE, DriverOp.MEM_FREE_ASYNC, DriverOp.MEM_RELEASE,
    ),
    OpKind.HOST_ALLOC: (CudaOp.HOST_ALLOC, DriverOp.HOST_ALLOC),
    OpKind.HOST_FREE: (CudaOp.FREE_HOST, DriverOp.FREE_HOST),
    OpKind.MAP: (DriverOp.MEM_MAP,),
    OpKind.UNMAP: (DriverOp.MEM_UNMAP,),
    OpKind.MODULE: (CudaOp.MODULE_LOAD, DriverOp.MODULE_LOAD, DriverOp.MODULE_GET_FUNCTION, DriverOp.LINK),
    # What every rank of a communicator calls under one number; sends and receives have none.
    OpKind.COLLECTIVE: (
        NcclOp.ALL_REDUCE, NcclOp.ALL_GATHER, NcclOp.REDUCE_SCATTER, NcclOp.BROADCAST, NcclOp.REDUCE,
        NcclOp.ALL_TO_ALL, NcclOp.BARRIER, NcclOp.GATHER, NcclOp.SCATTER,
        GlooOp.ALL_REDUCE, GlooOp.ALL_GATHER, GlooOp.BROADCAST, GlooOp.REDUCE, GlooOp.ALL_TO_ALL, GlooOp.BARRIER,
        GlooOp.GATHER, GlooOp.SCATTER,
    ),
    OpKind.OFF_CPU: (HostOp.SCHED_SWITCH,),
    OpKind.FAULT: (HostOp.PAGE_FAULT,),
    OpKind.RECLAIM: (HostOp.DIRECT_RECLAIM,),
    OpKind.QUOTA: (HostOp.CGROUP_THROTTLE,),
    OpKind.FACT: (HostOp.OOM_KILL, HostOp.POD_RESTART, HostOp.POD_EVICTION, HostOp.POD_OOM_KILL),
    OpKind.LIFE: (HostOp.EXEC, HostOp.EXIT, HostOp.FORK),
    OpKind.READ: (IoOp.READ,),
    OpKind.WRITE: (IoOp.WRITE,),
}  # fmt: skip


def code_of(op: IntEnum) -> int:
    """An operation as one number, source << 8 | op."""
    return int(_SOURCES[type(op)]) << 8 | int(op)


def _build_table() -> npt.NDArray[np.uint8]:
    table = np.zeros((256, 256), np.uint8)
    for source, kind in _BY_SOURCE.items():
        table[source, :] = kind
    for kind, ops in _BY_OPERATION.items():
        for op in ops:
            table.flat[code_of(op)] = kind
    return table


_TABLE: Final = _build_table()

_NOT_READY: Final = 600  # cudaErrorNotReady
_IN_PROGRESS: Final = 7  # ncclInProgress: the communicator does not block


def _build_pending() -> npt.NDArray[np.int32]:
    codes = np.zeros((256, 256), np.int32)
    codes[Source.NCCL, :] = _IN_PROGRESS
    for op in (CudaOp.EVENT_QUERY, CudaOp.STREAM_QUERY):
        codes.flat[code_of(op)] = _NOT_READY
    return codes


_PENDING: Final = _build_pending()

BLOCKING_COPIES: Final = frozenset(
    map(
        code_of,
        (CudaOp.MEMCPY, CudaOp.MEMCPY_2D, CudaOp.MEMCPY_PEER, DriverOp.MEMCPY, DriverOp.MEMCPY_2D),
    )
)
"""Codes of copies that return when they are done."""


@functools.cache
def find_codes(kinds: tuple[OpKind, ...]) -> frozenset[int]:
    """Operations of these kinds, as source << 8 | op; codes without a name are left out."""
    return frozenset(
        int(source) << 8 | op
        for source, ops in OP_NAMES.items()
        for op in ops
        if _TABLE[source, op] in kinds
    )


def find_kinds(sources: npt.NDArray[Any], ops: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Kind of each operation, from its source and code; codes below 256."""
    kinds: npt.NDArray[np.uint8] = _TABLE[sources, ops]
    return kinds


def get_pending_code(source: int, op: int) -> int:
    """The return code, other than 0, with which an operation has not failed; 0 where there is none."""
    return int(_PENDING[source, op])


def find_failures(
    sources: npt.NDArray[Any], ops: npt.NDArray[Any], codes: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    """Whether each call failed, from its source, operation and return code."""
    is_failure: npt.NDArray[np.bool_] = (codes != 0) & (codes != _PENDING[sources, ops])
    return is_failure
