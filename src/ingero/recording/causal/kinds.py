"""What a row is to the engine: forty operation codes, a dozen roles."""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.events import (
    OP_NAMES,
    CudaOp,
    DriverOp,
    GpuOp,
    GraphOp,
    HostOp,
    IoOp,
    NcclOp,
    Source,
)


class CallKind(IntEnum):
    """Role of a row. Those below OFF_CPU are calls that a thread makes towards the GPU."""

    OTHER = 0
    LAUNCH = 1
    COPY = 2
    SYNC = 3
    ALLOC = 4
    FREE = 5
    MODULE = 6
    GRAPH_LAUNCH = 7
    GRAPH = 8
    COLLECTIVE = 9
    OTHER_CALL = 10
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


_TABLE: Final[npt.NDArray[np.uint8]] = np.zeros((256, 256), np.uint8)


_COLLECTIVES: Final = [
    NcclOp.ALL_REDUCE,
    NcclOp.ALL_GATHER,
    NcclOp.REDUCE_SCATTER,
    NcclOp.BROADCAST,
    NcclOp.REDUCE,
    NcclOp.ALL_TO_ALL,
    NcclOp.BARRIER,
    NcclOp.GATHER,
    NcclOp.SCATTER,
]
"""What every rank of a communicator calls under one number; sends and receives have none."""


def _fill() -> None:
    _TABLE[[Source.CUDA, Source.DRIVER, Source.CUDA_GRAPH, Source.NCCL], :] = CallKind.OTHER_CALL
    _TABLE[Source.CUDA_GRAPH, :] = CallKind.GRAPH
    _TABLE[Source.NCCL, _COLLECTIVES] = CallKind.COLLECTIVE
    _TABLE[Source.NET, :] = CallKind.NETWORK
    _TABLE[Source.TCP, :] = CallKind.RETRANSMIT
    _TABLE[Source.GPU, :] = CallKind.FACT
    for (source, op), kind in _ROLES.items():
        _TABLE[source, op] = kind


_ROLES: Final[dict[tuple[Source, int], CallKind]] = {
    (Source.CUDA, CudaOp.MALLOC): CallKind.ALLOC,
    (Source.CUDA, CudaOp.MALLOC_MANAGED): CallKind.ALLOC,
    (Source.CUDA, CudaOp.MALLOC_ASYNC): CallKind.ALLOC,
    (Source.CUDA, CudaOp.HOST_ALLOC): CallKind.ALLOC,
    (Source.CUDA, CudaOp.FREE): CallKind.FREE,
    (Source.CUDA, CudaOp.FREE_ASYNC): CallKind.FREE,
    (Source.CUDA, CudaOp.FREE_HOST): CallKind.FREE,
    (Source.CUDA, CudaOp.LAUNCH_KERNEL): CallKind.LAUNCH,
    (Source.CUDA, CudaOp.MEMCPY): CallKind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_ASYNC): CallKind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_2D): CallKind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_2D_ASYNC): CallKind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_PEER): CallKind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_PEER_ASYNC): CallKind.COPY,
    (Source.CUDA, CudaOp.STREAM_SYNC): CallKind.SYNC,
    (Source.CUDA, CudaOp.DEVICE_SYNC): CallKind.SYNC,
    (Source.CUDA, CudaOp.EVENT_SYNC): CallKind.SYNC,
    (Source.CUDA, CudaOp.MODULE_LOAD): CallKind.MODULE,
    (Source.DRIVER, DriverOp.LAUNCH_KERNEL): CallKind.LAUNCH,
    (Source.DRIVER, DriverOp.MEMCPY): CallKind.COPY,
    (Source.DRIVER, DriverOp.MEMCPY_ASYNC): CallKind.COPY,
    (Source.DRIVER, DriverOp.CTX_SYNC): CallKind.SYNC,
    (Source.DRIVER, DriverOp.STREAM_SYNC): CallKind.SYNC,
    (Source.DRIVER, DriverOp.EVENT_SYNC): CallKind.SYNC,
    (Source.DRIVER, DriverOp.MEM_ALLOC): CallKind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_ALLOC_MANAGED): CallKind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_ALLOC_ASYNC): CallKind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_CREATE): CallKind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_FREE): CallKind.FREE,
    (Source.DRIVER, DriverOp.MEM_FREE_ASYNC): CallKind.FREE,
    (Source.DRIVER, DriverOp.MEM_RELEASE): CallKind.FREE,
    (Source.DRIVER, DriverOp.MODULE_LOAD): CallKind.MODULE,
    (Source.CUDA_GRAPH, GraphOp.LAUNCH): CallKind.GRAPH_LAUNCH,
    (Source.HOST, HostOp.SCHED_SWITCH): CallKind.OFF_CPU,
    (Source.HOST, HostOp.PAGE_FAULT): CallKind.FAULT,
    (Source.HOST, HostOp.DIRECT_RECLAIM): CallKind.RECLAIM,
    (Source.HOST, HostOp.CGROUP_THROTTLE): CallKind.QUOTA,
    (Source.HOST, HostOp.OOM_KILL): CallKind.FACT,
    (Source.HOST, HostOp.POD_RESTART): CallKind.FACT,
    (Source.HOST, HostOp.POD_EVICTION): CallKind.FACT,
    (Source.HOST, HostOp.POD_OOM_KILL): CallKind.FACT,
    (Source.HOST, HostOp.EXEC): CallKind.LIFE,
    (Source.HOST, HostOp.EXIT): CallKind.LIFE,
    (Source.HOST, HostOp.FORK): CallKind.LIFE,
    (Source.IO, IoOp.READ): CallKind.READ,
    (Source.IO, IoOp.WRITE): CallKind.WRITE,
    (Source.GPU, GpuOp.XID): CallKind.FACT,
}

_fill()

LAST_CALL: Final = CallKind.OTHER_CALL
CALLS: Final = tuple(kind for kind in CallKind if CallKind.OTHER < kind <= LAST_CALL)
"""Roles of calls towards the GPU."""
BLOCKING_OPS: Final = frozenset((
    (Source.CUDA, CudaOp.MEMCPY),
    (Source.CUDA, CudaOp.MEMCPY_2D),
    (Source.CUDA, CudaOp.MEMCPY_PEER),
    (Source.DRIVER, DriverOp.MEMCPY),
))
"""Copies that return when they are done."""


@functools.cache
def find_codes(kinds: tuple[CallKind, ...]) -> frozenset[int]:
    """Operations that have one of these roles, as source << 8 | op; codes without a name are left out."""
    return frozenset(
        int(source) << 8 | op
        for source, ops in OP_NAMES.items()
        for op in ops
        if _TABLE[source, op] in kinds
    )


def find_kinds(sources: npt.NDArray[np.uint8], ops: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Role of each row."""
    kinds: npt.NDArray[np.uint8] = _TABLE[sources, ops]
    return kinds
