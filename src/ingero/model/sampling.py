"""Which operations are never sampled: every call has a row of its own, or is counted as lost.

The one definition: the kernel's probes, the recorder, the rules that read a recording, and the tests use it. An
operation that judges (what a rank waited for, what a process holds, what failed) is never sampled. What is sampled is
frequent and says little call by call; its rows carry in ``weight`` the calls they stand for. ``cudaEventRecord`` and
``cudaStreamWaitEvent`` are among the never sampled because they say what a later wait waited for.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import BoolArray
from ingero.model.events import (
    CudaOp,
    DriverOp,
    GlooOp,
    GraphOp,
    HostOp,
    IoOp,
    NcclOp,
    NetOp,
    Source,
    TcpOp,
)

LARGE_BYTES: Final = 1 << 20
"""A copy, or a transfer on a socket, of this size or more is kept although its kind is sampled."""
LONG_REQUEST_NS: Final = 10_000_000
"""A block request that took this long or longer, queued and served, is kept although its kind is sampled."""

_SAMPLED: Final[dict[Source, tuple[IntEnum, ...]]] = {
    Source.CUDA: (
        CudaOp.LAUNCH_KERNEL,
        CudaOp.MEMCPY_ASYNC,
        CudaOp.MEMCPY_2D_ASYNC,
        CudaOp.MEMCPY_PEER_ASYNC,
        CudaOp.MEMCPY_BATCH,
        CudaOp.MEMSET,
        CudaOp.PREFETCH,
        CudaOp.SET_DEVICE,
        CudaOp.EVENT_QUERY,
        CudaOp.STREAM_QUERY,
    ),
    Source.DRIVER: (
        DriverOp.LAUNCH_KERNEL,
        DriverOp.MEMCPY_ASYNC,
        DriverOp.MEMCPY_HTOD_ASYNC,
        DriverOp.MEMCPY_DTOH_ASYNC,
        DriverOp.MEMCPY_DTOD_ASYNC,
        DriverOp.MEMCPY_2D_ASYNC,
        DriverOp.MEMSET,
        DriverOp.CTX_SET_CURRENT,
    ),
    Source.HOST: (HostOp.PAGE_ALLOC,),  # counted only: none of them has a row
    Source.IO: tuple(IoOp),
    Source.NET: tuple(NetOp),
}
_PROBED: Final[dict[Source, tuple[IntEnum, ...]]] = {
    Source.CUDA: tuple(CudaOp),
    Source.DRIVER: tuple(DriverOp),
    Source.HOST: (
        HostOp.SCHED_SWITCH,
        HostOp.OOM_KILL,
        HostOp.EXEC,
        HostOp.EXIT,
        HostOp.FORK,
        HostOp.PAGE_FAULT,
        HostOp.DIRECT_RECLAIM,
    ),
    Source.TCP: tuple(TcpOp),
    Source.CUDA_GRAPH: tuple(GraphOp),
    Source.NCCL: tuple(NcclOp),
    Source.GLOO: tuple(GlooOp),
}

NEVER_SAMPLED: Final[frozenset[tuple[int, int]]] = frozenset(
    (int(source), int(op))
    for source, ops in _PROBED.items()
    for op in ops
    if op not in _SAMPLED.get(source, ())
)
"""Source and operation of every kind of call that is never sampled.

In a recording of this version such a kind is complete where the sum of ``lost`` over its rows of AGGREGATE is 0.
"""

_SHAPE: Final = (256, 256)


def _build_table() -> BoolArray:
    table = np.zeros(_SHAPE, bool)
    for source, op in NEVER_SAMPLED:
        table[source, op] = True
    return table


_TABLE: Final = _build_table()


def is_never_sampled(sources: npt.NDArray[np.uint8], ops: npt.NDArray[np.uint8]) -> BoolArray:
    """Which rows are of kinds that are never sampled."""
    chosen: BoolArray = _TABLE[sources, ops]
    return chosen
