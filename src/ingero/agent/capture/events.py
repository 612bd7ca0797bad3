"""Kernel records to the model's rows, as whole arrays."""

from __future__ import annotations

import errno
from collections.abc import Collection
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.agent.capture.kernel.abi import Flag, ProcessEvent
from ingero.model.arrays import Records
from ingero.model.events import (
    EVENT,
    CopyKind,
    CudaOp,
    DriverOp,
    EventFlag,
    Events,
    GraphOp,
    HostOp,
    OffCpuReason,
    Source,
    TcpOp,
)
from ingero.model.operations import OpKind, find_kinds

_SECTOR_BYTES: Final = 512
_KEPT: Final = Flag.ERROR | Flag.SLOW | Flag.FIRST | Flag.LARGE

_KIND_BY_DRIVER_OP: Final = {
    DriverOp.MEMCPY: CopyKind.DEFAULT,
    DriverOp.MEMCPY_ASYNC: CopyKind.DEFAULT,
    DriverOp.MEMCPY_HTOD: CopyKind.HOST_TO_DEVICE,
    DriverOp.MEMCPY_HTOD_ASYNC: CopyKind.HOST_TO_DEVICE,
    DriverOp.MEMCPY_DTOH: CopyKind.DEVICE_TO_HOST,
    DriverOp.MEMCPY_DTOH_ASYNC: CopyKind.DEVICE_TO_HOST,
    DriverOp.MEMCPY_DTOD: CopyKind.DEVICE_TO_DEVICE,
    DriverOp.MEMCPY_DTOD_ASYNC: CopyKind.DEVICE_TO_DEVICE,
    DriverOp.MEMCPY_PEER: CopyKind.DEVICE_TO_DEVICE,
    DriverOp.MEMCPY_2D: CopyKind.UNKNOWN,
    DriverOp.MEMCPY_2D_ASYNC: CopyKind.UNKNOWN,
    DriverOp.MEMCPY_3D: CopyKind.UNKNOWN,
}
_KIND_BY_CUDA_OP: Final = {
    CudaOp.MEMCPY_PEER: CopyKind.DEVICE_TO_DEVICE,
    CudaOp.MEMCPY_PEER_ASYNC: CopyKind.DEVICE_TO_DEVICE,
    CudaOp.MEMSET: CopyKind.UNKNOWN,
    CudaOp.PREFETCH: CopyKind.UNKNOWN,
}


_AS_GIVEN: Final = -1
_SHAPE: Final = (16, 64)


def _build_copy_kinds() -> npt.NDArray[np.int8]:
    """Copy kind by source and operation; -1 where the call says it itself."""
    kinds = np.full(_SHAPE, _AS_GIVEN, np.int8)
    for source, known in ((Source.DRIVER, _KIND_BY_DRIVER_OP), (Source.CUDA, _KIND_BY_CUDA_OP)):
        for op, kind in known.items():
            kinds[source, op] = kind
    return kinds


_COPY_KINDS: Final = _build_copy_kinds()


def _begin(records: Records, offset_ns: int) -> Events:
    """Rows with what every probed call has."""
    events = np.zeros(len(records), EVENT)
    events["start_ns"] = records["header"]["mono_ns"].astype(np.int64) + offset_ns
    for name in ("duration_ns", "pid", "tid", "source", "op", "weight", "cgroup_id"):
        events[name] = records[name]
    events["ret_code"] = records["rc"]
    events["gpu_id"] = np.maximum(records["device"], 0)
    events["flags"] = _build_flags(records["flags"])
    return events


def _build_flags(flags: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """`EventFlag` of the kernel's flags."""
    is_exemplar = ((flags & _KEPT) != 0) & ((flags & Flag.EXACT) == 0)
    built: npt.NDArray[np.uint8] = (
        np.where(flags & Flag.NESTED, EventFlag.NESTED, 0)
        | np.where(flags & Flag.SLOW, EventFlag.SLOW, 0)
        | np.where(is_exemplar, EventFlag.EXEMPLAR, 0)
    ).astype(np.uint8)
    return built


def build_call_events(records: Records, offset_ns: int) -> Events:
    """Rows of CUDA runtime, driver and graph calls.

    Args:
        records: ``struct ig_call``.
        offset_ns: Wall clock minus monotonic clock.
    """
    events = _begin(records, offset_ns)
    kinds = find_kinds(records["source"], records["op"])
    # Until its kind says otherwise: what is waited for, then its stream.
    events["arg0"] = np.where(records["handle"] == 0, records["stream"], records["handle"])
    events["arg1"] = records["stream"]
    for kind in np.unique(kinds):
        if fill := _FILLERS.get(OpKind(kind)):
            fill(events, records, np.flatnonzero(kinds == kind))
    return events


def _fill_launches(events: Events, records: Records, chosen: npt.NDArray[np.intp]) -> None:
    launches = records[chosen]
    events["arg0"][chosen] = launches["handle"]
    for name, part in (("arg2", "grid"), ("arg3", "block")):
        product = launches[f"{part}_x"].astype(np.int64)
        events[name][chosen] = product * launches[f"{part}_y"] * launches[f"{part}_z"]


def _fill_copies(events: Events, records: Records, chosen: npt.NDArray[np.intp]) -> None:
    copies = records[chosen]
    kinds = _COPY_KINDS[copies["source"], copies["op"]].astype(np.int64)
    events["arg0"][chosen] = copies["bytes"]
    events["arg1"][chosen] = np.where(kinds == _AS_GIVEN, copies["aux"].astype(np.int64), kinds)
    events["arg2"][chosen] = copies["stream"]


def _fill_allocations(events: Events, records: Records, chosen: npt.NDArray[np.intp]) -> None:
    events["arg0"][chosen] = records["bytes"][chosen]
    events["arg1"][chosen] = records["handle"][chosen]


def _fill_frees(events: Events, records: Records, chosen: npt.NDArray[np.intp]) -> None:
    events["arg0"][chosen] = records["handle"][chosen]
    events["arg1"][chosen] = records["bytes"][chosen]


def _fill_graphs(events: Events, records: Records, chosen: npt.NDArray[np.intp]) -> None:
    instances = chosen[records["op"][chosen] == GraphOp.INSTANTIATE]
    events["arg1"][instances] = records["aux"][instances]


_FILLERS: Final = {
    OpKind.LAUNCH: _fill_launches,
    OpKind.COPY: _fill_copies,
    OpKind.FILL: _fill_copies,
    OpKind.ALLOC: _fill_allocations,
    OpKind.HOST_ALLOC: _fill_allocations,
    OpKind.MAP: _fill_allocations,
    OpKind.FREE: _fill_frees,
    OpKind.HOST_FREE: _fill_frees,
    OpKind.UNMAP: _fill_frees,
    OpKind.GRAPH: _fill_graphs,
}
"""What fills the arguments of a kind; of all others they are as waits have them."""


def build_collective_events(records: Records, offset_ns: int) -> Events:
    """Rows of NCCL calls; the arguments are those of `ingero.model.events.Source.NCCL`."""
    events = _begin(records, offset_ns)
    events["arg0"] = records["bytes"]
    events["arg1"] = records["comm_hash"].astype(np.int64)
    events["arg2"] = records["seq"]
    is_known = (records["rank"] >= 0) & (records["nranks"] >= 0)
    place = (records["rank"].astype(np.int64) << 32) | records["nranks"].astype(np.int64)
    events["arg3"] = np.where(is_known, place, 0)
    return events


def build_off_cpu_events(records: Records, offset_ns: int) -> Events:
    """Rows of off-CPU spans; ``other_pid`` is who took the CPU, or for a sleeper who woke it."""
    events = np.zeros(len(records), EVENT)
    events["start_ns"] = records["header"]["mono_ns"].astype(np.int64) + offset_ns
    events["duration_ns"] = records["off_ns"]
    for name in ("pid", "tid", "wait_ns", "reason", "weight", "cgroup_id"):
        events[name] = records[name]
    events["source"], events["op"] = Source.HOST, HostOp.SCHED_SWITCH
    events["flags"] = _build_flags(records["flags"])
    is_preempted = records["reason"] == OffCpuReason.PREEMPTED
    events["other_pid"] = np.where(is_preempted, records["other_pid"], records["waker_pid"])
    return events


def find_preemptors(records: Records, known: Collection[int]) -> dict[int, str]:
    """Names of the tasks that took a CPU and are not known yet, as the kernel read them then.

    Args:
        records: ``struct ig_off_cpu``.
        known: Process ids that need no name.
    """
    taken = records[records["reason"] == OffCpuReason.PREEMPTED]
    pids, at = np.unique(taken["other_pid"], return_index=True)
    is_new = ~np.isin(pids, list(known)) & (pids != 0)
    return {
        pid: comm.tobytes().partition(b"\0")[0].decode(errors="replace")
        for pid, comm in zip(pids[is_new].tolist(), taken["other_comm"][at[is_new]], strict=True)
    }


def _build_errnos() -> npt.NDArray[np.int32]:
    """What processes get for each ``blk_status_t``, as ``block/blk-core.c`` has it.

    Numbers above 13 are of other statuses before Linux 6.10 than since, so they are left at what stands for all others.
    """
    known = {
        0: 0,
        1: errno.EOPNOTSUPP,
        2: errno.ETIMEDOUT,
        3: errno.ENOSPC,
        4: errno.ENOLINK,
        5: errno.EREMOTEIO,
        6: errno.EBADE,
        7: errno.ENODATA,
        8: errno.EILSEQ,
        9: errno.ENOMEM,
        11: errno.EREMCHG,
        12: errno.EAGAIN,
        13: errno.EBUSY,
    }
    return np.array([-known.get(status, errno.EIO) for status in range(256)], np.int32)


_ERRNOS: Final = _build_errnos()


def _find_errnos(errors: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Negative errnos of failed requests: Linux 5.15 has them, and newer ones a ``blk_status_t``, which is positive."""
    return np.where(errors > 0, _ERRNOS[np.clip(errors, 0, len(_ERRNOS) - 1)], errors)


def build_block_events(records: Records, offset_ns: int) -> Events:
    """Rows of block requests; the queued part leads."""
    events = np.zeros(len(records), EVENT)
    started = records["header"]["mono_ns"].astype(np.int64) - records["queue_ns"].astype(np.int64)
    events["start_ns"] = started + offset_ns
    events["duration_ns"] = records["queue_ns"] + records["device_ns"]
    events["wait_ns"] = records["queue_ns"]
    for name in ("pid", "op", "weight", "cgroup_id"):
        events[name] = records[name]
    events["tid"] = records["pid"]
    events["source"] = Source.IO
    events["ret_code"] = _find_errnos(records["error"])
    events["flags"] = _build_flags(records["flags"])
    events["arg0"] = records["bytes"] // _SECTOR_BYTES
    events["arg1"] = records["sector"]
    return events


def build_process_events(records: Records, offset_ns: int) -> Events:
    """Rows of processes that began, ended or were killed; a fork is filed under the parent."""
    events = np.zeros(len(records), EVENT)
    events["start_ns"] = records["header"]["mono_ns"].astype(np.int64) + offset_ns
    is_fork = records["event"] == ProcessEvent.FORK
    events["pid"] = np.where(is_fork, records["other_pid"], records["pid"])
    events["tid"] = events["pid"]
    events["source"], events["op"] = Source.HOST, records["event"]
    events["arg1"] = np.where(is_fork | (records["event"] == ProcessEvent.OOM), records["pid"], 0)
    events["ret_code"] = records["exit_code"]
    events["weight"] = 1
    events["cgroup_id"] = records["cgroup_id"]
    return events


def build_tcp_events(records: Records, offset_ns: int) -> Events:
    """Rows of retransmitted segments; IPv4 addresses and ports in arg0 and arg1 as older recordings pack them."""
    events = np.zeros(len(records), EVENT)
    events["start_ns"] = records["header"]["mono_ns"].astype(np.int64) + offset_ns
    events["source"], events["op"], events["weight"] = Source.TCP, TcpOp.RETRANSMIT, 1
    events["pid"] = events["tid"] = records["pid"]
    for name, shift in (("local", 32), ("remote", 0)):
        # First four bytes in network order: the whole address for IPv4, its prefix for IPv6.
        raw = np.ascontiguousarray(records[name][:, :4]).view(">u4")[:, 0].astype(np.int64)
        events["arg0"] |= raw << shift
    ports = records["local_port"].astype(np.int64) << 16 | records["remote_port"]
    events["arg1"] = ports
    return events


def build_span_events(records: Records, offset_ns: int) -> Events:
    """Rows of what a process did in the kernel: bytes on sockets, direct reclaim, page faults; arg1 is bytes."""
    events = np.zeros(len(records), EVENT)
    events["start_ns"] = records["header"]["mono_ns"].astype(np.int64) + offset_ns
    for name in ("duration_ns", "pid", "tid", "source", "op", "weight", "cgroup_id"):
        events[name] = records[name]
    events["ret_code"] = records["rc"]
    events["arg1"] = records["amount"]
    events["arg2"] = records["family"]
    events["flags"] = _build_flags(records["flags"])
    return events


BUILDERS: Final = {
    "calls": build_call_events,
    "kept_calls": build_call_events,
    "failed_calls": build_call_events,
    "collectives": build_collective_events,
    "off_cpus": build_off_cpu_events,
    "blocks": build_block_events,
    "processes": build_process_events,
    "victims": build_process_events,
    "retransmits": build_tcp_events,
    "sockets": build_span_events,
    "reclaims": build_span_events,
    "faults": build_span_events,
}
"""How each ring's records become rows."""
