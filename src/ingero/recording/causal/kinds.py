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


class Kind(IntEnum):
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
    _TABLE[[Source.CUDA, Source.DRIVER, Source.CUDA_GRAPH, Source.NCCL], :] = Kind.OTHER_CALL
    _TABLE[Source.CUDA_GRAPH, :] = Kind.GRAPH
    _TABLE[Source.NCCL, _COLLECTIVES] = Kind.COLLECTIVE
    _TABLE[Source.NET, :] = Kind.NETWORK
    _TABLE[Source.TCP, :] = Kind.RETRANSMIT
    _TABLE[Source.GPU, :] = Kind.FACT
    for (source, op), kind in _ROLES.items():
        _TABLE[source, op] = kind


_ROLES: Final[dict[tuple[Source, int], Kind]] = {
    (Source.CUDA, CudaOp.MALLOC): Kind.ALLOC,
    (Source.CUDA, CudaOp.MALLOC_MANAGED): Kind.ALLOC,
    (Source.CUDA, CudaOp.MALLOC_ASYNC): Kind.ALLOC,
    (Source.CUDA, CudaOp.HOST_ALLOC): Kind.ALLOC,
    (Source.CUDA, CudaOp.FREE): Kind.FREE,
    (Source.CUDA, CudaOp.FREE_ASYNC): Kind.FREE,
    (Source.CUDA, CudaOp.FREE_HOST): Kind.FREE,
    (Source.CUDA, CudaOp.LAUNCH_KERNEL): Kind.LAUNCH,
    (Source.CUDA, CudaOp.MEMCPY): Kind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_ASYNC): Kind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_2D): Kind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_2D_ASYNC): Kind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_PEER): Kind.COPY,
    (Source.CUDA, CudaOp.MEMCPY_PEER_ASYNC): Kind.COPY,
    (Source.CUDA, CudaOp.STREAM_SYNC): Kind.SYNC,
    (Source.CUDA, CudaOp.DEVICE_SYNC): Kind.SYNC,
    (Source.CUDA, CudaOp.EVENT_SYNC): Kind.SYNC,
    (Source.CUDA, CudaOp.MODULE_LOAD): Kind.MODULE,
    (Source.DRIVER, DriverOp.LAUNCH_KERNEL): Kind.LAUNCH,
    (Source.DRIVER, DriverOp.MEMCPY): Kind.COPY,
    (Source.DRIVER, DriverOp.MEMCPY_ASYNC): Kind.COPY,
    (Source.DRIVER, DriverOp.CTX_SYNC): Kind.SYNC,
    (Source.DRIVER, DriverOp.STREAM_SYNC): Kind.SYNC,
    (Source.DRIVER, DriverOp.EVENT_SYNC): Kind.SYNC,
    (Source.DRIVER, DriverOp.MEM_ALLOC): Kind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_ALLOC_MANAGED): Kind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_ALLOC_ASYNC): Kind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_CREATE): Kind.ALLOC,
    (Source.DRIVER, DriverOp.MEM_FREE): Kind.FREE,
    (Source.DRIVER, DriverOp.MEM_FREE_ASYNC): Kind.FREE,
    (Source.DRIVER, DriverOp.MEM_RELEASE): Kind.FREE,
    (Source.DRIVER, DriverOp.MODULE_LOAD): Kind.MODULE,
    (Source.CUDA_GRAPH, GraphOp.LAUNCH): Kind.GRAPH_LAUNCH,
    (Source.HOST, HostOp.SCHED_SWITCH): Kind.OFF_CPU,
    (Source.HOST, HostOp.PAGE_FAULT): Kind.FAULT,
    (Source.HOST, HostOp.DIRECT_RECLAIM): Kind.RECLAIM,
    (Source.HOST, HostOp.CGROUP_THROTTLE): Kind.QUOTA,
    (Source.HOST, HostOp.OOM_KILL): Kind.FACT,
    (Source.HOST, HostOp.POD_RESTART): Kind.FACT,
    (Source.HOST, HostOp.POD_EVICTION): Kind.FACT,
    (Source.HOST, HostOp.POD_OOM_KILL): Kind.FACT,
    (Source.HOST, HostOp.EXEC): Kind.LIFE,
    (Source.HOST, HostOp.EXIT): Kind.LIFE,
    (Source.HOST, HostOp.FORK): Kind.LIFE,
    (Source.IO, IoOp.READ): Kind.READ,
    (Source.IO, IoOp.WRITE): Kind.WRITE,
    (Source.GPU, GpuOp.XID): Kind.FACT,
}

_fill()

LAST_CALL: Final = Kind.OTHER_CALL
CALLS: Final = tuple(kind for kind in Kind if Kind.OTHER < kind <= LAST_CALL)
"""Roles of calls towards the GPU."""
BLOCKING_OPS: Final = frozenset((
    (Source.CUDA, CudaOp.MEMCPY),
    (Source.CUDA, CudaOp.MEMCPY_2D),
    (Source.CUDA, CudaOp.MEMCPY_PEER),
    (Source.DRIVER, DriverOp.MEMCPY),
))
"""Copies that return when they are done."""


@functools.cache
def find_codes(kinds: tuple[Kind, ...]) -> frozenset[int]:
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
