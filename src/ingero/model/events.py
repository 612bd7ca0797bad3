"""What a node saw: one row per call, off-CPU span, disk request or kernel fact.

The integers are those of the recordings that exist (schema v0.8 to v0.10), so a recording of either generation reads
the same. Codes are stored and exchanged: append only.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import BoolArray, Records


class Source(IntEnum):
    """Which part of the system a row comes from."""

    CUDA = 1  # CUDA runtime API
    HOST = 3  # kernel scheduler, memory and process life
    DRIVER = 4  # CUDA driver API
    IO = 5  # block devices
    TCP = 6
    NET = 7  # socket system calls
    CUDA_GRAPH = 8
    NCCL = 9  # arg0 bytes, arg1 communicator hash, arg2 sequence number, arg3 rank << 32 | ranks
    GPU = 10  # facts from NVML; duration is how long the fact held
    GLOO = 11  # PyTorch's collectives on the CPU; arguments as those of NCCL


class CudaOp(IntEnum):
    """Runtime calls.

    Allocation: arg0 bytes, arg1 pointer. Copy: arg0 bytes, arg1 `CopyKind`, arg2 stream, arg3 `HostMemory`.
    Launch: arg0 function, arg1 stream, arg2 blocks, arg3 threads per block.
    """

    MALLOC = 1
    FREE = 2  # arg0 pointer, arg1 bytes when the allocation was seen
    LAUNCH_KERNEL = 3
    MEMCPY = 4
    STREAM_SYNC = 5  # arg0 stream
    DEVICE_SYNC = 6
    MEMCPY_ASYNC = 7
    MALLOC_MANAGED = 8
    MEMCPY_2D = 9
    MEMCPY_2D_ASYNC = 10
    MEMCPY_PEER = 11
    MEMCPY_PEER_ASYNC = 12
    MALLOC_ASYNC = 13
    FREE_ASYNC = 14
    EVENT_SYNC = 15  # arg0 event
    HOST_ALLOC = 16
    FREE_HOST = 17
    MEMSET = 18
    MODULE_LOAD = 19
    SET_DEVICE = 20
    EVENT_RECORD = 21  # entry only
    STREAM_WAIT_EVENT = 22  # entry only
    EVENT_QUERY = 23
    STREAM_QUERY = 24
    PREFETCH = 25
    MEMCPY_BATCH = 26  # arg1 number of copies
    MEMCPY_3D = 27
    MEMCPY_SYMBOL = 28
    DEVICE_RESET = 29


class DriverOp(IntEnum):
    """Driver calls; arguments as in `CudaOp`."""

    LAUNCH_KERNEL = 1
    MEMCPY = 2
    MEMCPY_ASYNC = 3
    CTX_SYNC = 4
    MEM_ALLOC = 5
    MEM_ALLOC_MANAGED = 6
    MEM_FREE = 7
    STREAM_SYNC = 8
    EVENT_SYNC = 9
    MEM_ALLOC_ASYNC = 10
    MEM_FREE_ASYNC = 11
    MODULE_LOAD = 12
    MEM_CREATE = 13
    MEM_RELEASE = 14
    MEMCPY_HTOD = 15
    MEMCPY_DTOH = 16
    MEMCPY_DTOD = 17
    MEMCPY_HTOD_ASYNC = 18
    MEMCPY_DTOH_ASYNC = 19
    MEMCPY_DTOD_ASYNC = 20
    MEMCPY_PEER = 21
    HOST_ALLOC = 22
    FREE_HOST = 23
    MEM_MAP = 24
    MEM_UNMAP = 25
    MEMSET = 26
    CTX_SET_CURRENT = 27
    PRIMARY_CTX_RETAIN = 28
    MODULE_GET_FUNCTION = 29
    MEMCPY_2D = 30
    MEMCPY_2D_ASYNC = 31
    MEMCPY_3D = 32
    LINK = 33  # of code that is compiled at run time


class HostOp(IntEnum):
    """Kernel facts about tasks and memory."""

    # A task came back on a CPU after `duration`; arg1 its own pid in old recordings.
    SCHED_SWITCH = 1
    SCHED_WAKEUP = 2
    PAGE_ALLOC = 3  # arg0 bytes
    OOM_KILL = 4  # arg1 victim pid
    EXEC = 5
    EXIT = 6
    FORK = 7  # arg1 child pid
    POD_RESTART = 10
    POD_EVICTION = 11
    POD_OOM_KILL = 12
    PAGE_ALLOC_SUMMARY = 20  # arg0 events, arg1 bytes
    SCHED_SWITCH_SUMMARY = 21  # arg0 events, arg1 ns off CPU
    PAGE_FAULT = 30  # a major fault kept the thread for `duration`
    DIRECT_RECLAIM = 31
    CGROUP_THROTTLE = 32  # the cgroup's CPU quota was used up for `duration`


class IoOp(IntEnum):
    """Block requests: arg0 sectors of 512 bytes, arg1 first sector. pid and tid are the issuer's."""

    READ = 1
    WRITE = 2
    DISCARD = 3
    FLUSH = 4  # no sectors
    OTHER = 5  # zeroes, erasure, zones, commands of the driver


class TcpOp(IntEnum):
    """Transport facts."""

    RETRANSMIT = 1


class NetOp(IntEnum):
    """Socket calls: arg0 descriptor, arg1 bytes."""

    SEND = 1
    RECV = 2


class GraphOp(IntEnum):
    """CUDA graph calls.

    arg0 executable (instantiate, launch) or graph (end capture), arg1 stream (graph, for instantiate).
    """

    BEGIN_CAPTURE = 1
    END_CAPTURE = 2
    INSTANTIATE = 3
    LAUNCH = 4
    DESTROY = 5
    EXEC_UPDATE = 6
    EXEC_DESTROY = 7


class NcclOp(IntEnum):
    """Collectives and point-to-point operations."""

    COMM_INIT = 1
    COMM_DESTROY = 2
    ALL_REDUCE = 3
    ALL_GATHER = 4
    REDUCE_SCATTER = 5
    BROADCAST = 6
    SEND = 7
    RECV = 8
    COMM_INIT_ALL = 9
    REDUCE = 10
    ALL_TO_ALL = 11
    BARRIER = 12
    COMM_SPLIT = 13
    COMM_SHRINK = 14
    COMM_ABORT = 15
    COMM_FINALIZE = 16
    COMM_REVOKE = 17
    GATHER = 18
    SCATTER = 19
    GROUP_START = 20
    GROUP_END = 21
    COMM_USER_RANK = 22
    COMM_COUNT = 23


class GlooOp(IntEnum):
    """Collectives and waits for point-to-point operations; the numbers are those of `NcclOp`."""

    GROUP = 1  # a process group is made
    ALL_REDUCE = 3
    ALL_GATHER = 4
    BROADCAST = 6
    SEND = 7
    RECV = 8
    REDUCE = 10
    ALL_TO_ALL = 11
    BARRIER = 12
    GATHER = 18
    SCATTER = 19
    CONNECT = 24  # this and the next three are probed and have no rows
    CLOSE = 25
    CAUGHT = 26
    NEXT = 27


class GpuOp(IntEnum):
    """NVML facts: clocks held down while `duration` passed; errors carry arg0 = Xid or error count."""

    THROTTLE_POWER = 1
    THROTTLE_THERMAL = 2
    THROTTLE_HARDWARE = 3
    XID = 4
    ECC_UNCORRECTED = 5


class CopyKind(IntEnum):
    """cudaMemcpyKind (CUDA runtime `driver_types.h`), and 5 for a direction the probe did not read."""

    HOST_TO_HOST = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    DEFAULT = 4
    UNKNOWN = 5


class HostMemory(IntEnum):
    """What the host side of a copy was; 0 in a recording that does not say."""

    UNKNOWN = 0
    PAGEABLE = 1
    PINNED = 2
    MANAGED = 3


class OffCpuReason(IntEnum):
    """Why a thread was off the CPU; 0 in a recording whose probe did not read the task's state."""

    UNKNOWN = 0
    PREEMPTED = 1  # left while runnable; other_pid took the CPU
    BLOCKED_IO = 2  # uninterruptible or in iowait
    SLEEP = 3  # interruptible: timers, futex, epoll
    THROTTLED = 4  # its cgroup had no quota left
    STOPPED = 5


class EventFlag(IntFlag):
    """Facts about a row that are not its arguments."""

    # A driver call inside a runtime call of the same thread: counted once, with its parent.
    NESTED = 1
    EXEMPLAR = 2  # kept although its kind was being sampled (first, slow, failed)
    # Had not returned when recording ended: `duration_ns` is until then, `ret_code` unknown, not in any count.
    IN_FLIGHT = 4
    SLOW = 8  # took eight times the mean of its kind or more


EVENT: Final = np.dtype([
    ("start_ns", "<i8"),  # Unix time of entry: monotonic time plus the session's first clock sample
    ("duration_ns", "<i8"),
    ("pid", "<i4"),  # thread group
    ("tid", "<i4"),
    ("source", "u1"),
    ("op", "u1"),
    ("reason", "u1"),  # OffCpuReason
    ("flags", "u1"),  # EventFlag
    ("gpu_id", "<i2"),
    ("node", "<u2"),  # index into Recording.nodes
    ("ret_code", "<i4"),
    ("other_pid", "<i4"),  # who took the CPU, or who woke this thread; 0 unknown
    ("weight", "<i4"),  # calls this row stands for; 1 when every call was stored
    ("wait_ns", "<i8"),  # off-CPU: trailing part spent runnable; block request: leading part queued
    ("arg0", "<i8"),  # handles and pointers as the same 64 bits, signed
    ("arg1", "<i8"),
    ("arg2", "<i8"),
    ("arg3", "<i8"),
    ("stack_hash", "<i8"),
    ("cgroup_id", "<i8"),
])
"""One row, 112 bytes. A thread's rows do not have to be in order; `Recording` sorts by start."""

Events = Records
"""Rows of EVENT, shape (n,)."""

_STORED_AT_END: Final = frozenset((Source.HOST, Source.IO, Source.TCP, Source.NET))
"""Sources whose stored ``timestamp`` is the completion; the others store the entry.

Source: recordings of schema v0.8 and v0.9: off-CPU spans and block reads line up only when read so.
"""

OP_NAMES: Final[dict[int, dict[int, str]]] = {
    Source.CUDA: {
        1: "cudaMalloc", 2: "cudaFree", 3: "cudaLaunchKernel", 4: "cudaMemcpy", 5: "cudaStreamSync",
        6: "cudaDeviceSync", 7: "cudaMemcpyAsync", 8: "cudaMallocManaged", 9: "cudaMemcpy2D",
        10: "cudaMemcpy2DAsync", 11: "cudaMemcpyPeer", 12: "cudaMemcpyPeerAsync", 13: "cudaMallocAsync",
        14: "cudaFreeAsync", 15: "cudaEventSync", 16: "cudaHostAlloc", 17: "cudaFreeHost",
        18: "cudaMemset", 19: "cudaModuleLoad", 20: "cudaSetDevice", 21: "cudaEventRecord",
        22: "cudaStreamWaitEvent", 23: "cudaEventQuery", 24: "cudaStreamQuery",
        25: "cudaMemPrefetchAsync", 26: "cudaMemcpyBatchAsync", 27: "cudaMemcpy3D",
        28: "cudaMemcpySymbol", 29: "cudaDeviceReset",
    },
    Source.HOST: {
        1: "sched_switch", 2: "sched_wakeup", 3: "mm_page_alloc", 4: "oom_kill", 5: "process_exec",
        6: "process_exit", 7: "process_fork", 10: "pod_restart", 11: "pod_eviction", 12: "pod_oom_kill",
        20: "mm_page_alloc_summary", 21: "sched_switch_summary", 30: "page_fault",
        31: "direct_reclaim", 32: "cgroup_throttle",
    },
    Source.DRIVER: {
        1: "cuLaunchKernel", 2: "cuMemcpy", 3: "cuMemcpyAsync", 4: "cuCtxSynchronize", 5: "cuMemAlloc",
        6: "cuMemAllocManaged", 7: "cuMemFree", 8: "cuStreamSynchronize", 9: "cuEventSynchronize",
        10: "cuMemAllocAsync", 11: "cuMemFreeAsync", 12: "cuModuleLoad", 13: "cuMemCreate",
        14: "cuMemRelease", 15: "cuMemcpyHtoD", 16: "cuMemcpyDtoH", 17: "cuMemcpyDtoD",
        18: "cuMemcpyHtoDAsync", 19: "cuMemcpyDtoHAsync", 20: "cuMemcpyDtoDAsync", 21: "cuMemcpyPeer",
        22: "cuMemHostAlloc", 23: "cuMemFreeHost", 24: "cuMemMap", 25: "cuMemUnmap", 26: "cuMemset",
        27: "cuCtxSetCurrent", 28: "cuDevicePrimaryCtxRetain", 29: "cuModuleGetFunction",
        30: "cuMemcpy2D", 31: "cuMemcpy2DAsync", 32: "cuMemcpy3D", 33: "cuLink",
    },
    Source.IO: {1: "block_read", 2: "block_write", 3: "block_discard", 4: "block_flush", 5: "block_other"},
    Source.TCP: {1: "tcp_retransmit"},
    Source.NET: {1: "net_send", 2: "net_recv"},
    Source.CUDA_GRAPH: {
        1: "graphBeginCapture", 2: "graphEndCapture", 3: "graphInstantiate", 4: "graphLaunch",
        5: "graphDestroy", 6: "graphExecUpdate", 7: "graphExecDestroy",
    },
    Source.NCCL: {
        1: "ncclCommInitRank", 2: "ncclCommDestroy", 3: "ncclAllReduce", 4: "ncclAllGather",
        5: "ncclReduceScatter", 6: "ncclBcast", 7: "ncclSend", 8: "ncclRecv", 9: "ncclCommInitAll",
        10: "ncclReduce", 11: "ncclAllToAll", 12: "ncclBarrier", 13: "ncclCommSplit",
        14: "ncclCommShrink", 15: "ncclCommAbort", 16: "ncclCommFinalize", 17: "ncclCommRevoke",
        18: "ncclGather", 19: "ncclScatter", 20: "ncclGroupStart", 21: "ncclGroupEnd",
        22: "ncclCommUserRank", 23: "ncclCommCount",
    },
    Source.GLOO: {
        1: "glooGroup", 3: "glooAllReduce", 4: "glooAllGather", 6: "glooBroadcast", 7: "glooSend",
        8: "glooRecv", 10: "glooReduce", 11: "glooAllToAll", 12: "glooBarrier", 18: "glooGather",
        19: "glooScatter", 24: "glooConnect", 25: "glooClose", 26: "glooCaught", 27: "glooNext",
    },
    Source.GPU: {
        1: "throttle_power", 2: "throttle_thermal", 3: "throttle_hardware", 4: "xid",
        5: "ecc_uncorrected",
    },
}  # fmt: skip
"""Names as the existing recordings and replies spell them, by source and op."""

_UNKNOWN_OP: Final = {
    3: "host_op",
    4: "driver_op",
    5: "io_op",
    6: "tcp_op",
    7: "net_op",
    8: "graph_op",
}


def is_stored_at_end(sources: npt.NDArray[np.uint8]) -> BoolArray:
    """Which rows carry their completion as the stored timestamp (start = timestamp - duration)."""
    return np.isin(sources, list(_STORED_AT_END))


def source_name(source: int) -> str:
    """Lower-case name of a source; ``unknown(n)`` for a code this version does not know."""
    return _SOURCE_NAMES.get(source) or f"unknown({source})"


def find_source(name: str) -> int | None:
    """The code of a source by its name, in any case; None when no source is called that."""
    return next((code for code, known in _SOURCE_NAMES.items() if known == name.lower()), None)


def op_name(source: int, op: int) -> str:
    """Name of an operation; ``op(n)``, ``host_op(n)`` … for a code this version does not know."""
    name = OP_NAMES.get(source, {}).get(op)
    return name if name is not None else f"{_UNKNOWN_OP.get(source, 'op')}({op})"


def find_op(name: str) -> tuple[int, int] | None:
    """Source and op of a name, in any case; None when no operation is called that."""
    wanted = _ALIASES.get(name.lower(), name.lower())
    for source, ops in OP_NAMES.items():
        for op, op_text in ops.items():
            if op_text.lower() == wanted:
                return int(source), op
    return None


_SOURCE_NAMES: Final = {int(source): source.name.lower() for source in Source}
_ALIASES: Final = {
    "cumemallocv2": "cumemalloc",
    "cumemallocmanagedv2": "cumemallocmanaged",
    "cudastreamsynchronize": "cudastreamsync",
    "cudadevicesynchronize": "cudadevicesync",
    "cudaeventsynchronize": "cudaeventsync",
}
