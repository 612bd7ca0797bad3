"""Calls that have not returned, as records and with the stack they wait in.

A stack is read from outside once its call has lasted a second, and of all calls when tracing ends: a process that is
killed in a call cannot be asked any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from ingero.agent.capture.events import build_call_events, build_collective_events
from ingero.agent.capture.kernel.abi import Flag, get_dtype
from ingero.agent.capture.probes.engine import Engine
from ingero.agent.capture.stack_keeper import StackKeeper
from ingero.agent.capture.stacks.control_block import IS_ARM
from ingero.agent.capture.stacks.outside import OpenCall
from ingero.model.arrays import Records
from ingero.model.events import EventFlag, Events, OffCpuReason, Source
from ingero.units import NS_PER_S

RING: Final = "in_flight"
"""The name under which observers get them: ``struct ig_call`` or ``struct ig_collective``, as their fields say."""
MIN_AGE_NS: Final = NS_PER_S
MAX_READ: Final = 64
"""Stacks read at once; the rest the next time."""
MAX_READ_AT_END: Final = 256
# From a probed function's return address to its first argument in memory: on x86-64 the former lies on the stack.
_ADDRESS_BYTES: Final = 0 if IS_ARM else 8
_SLOW: Final = 8
_MIN_SEEN: Final = 32


class OpenCalls:
    """What is known of calls in flight, and of those whose thread ended.

    Args:
        engine: The probes.
        stacks: Reads stacks; reads none when they were not asked for.
    """

    def __init__(self, engine: Engine, stacks: StackKeeper) -> None:
        self._engine = engine
        self._stacks = stacks
        self._known: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}
        self._ended: list[Records] = []

    def take_ended(self, records: Records) -> None:
        """Keep ``struct ig_unfinished`` records until they are asked for."""
        self._ended.append(records.copy())

    def read_due_stacks(self, now_ns: int, *, is_last: bool = False) -> None:
        """Read the stacks that are due.

        Args:
            now_ns: Monotonic clock.
            is_last: Tracing ends: calls of any age are due.
        """
        if not self._stacks.is_on:
            return
        calls = self._engine.state.read_in_flight()
        known = self._before | self._known
        self._before = self._known
        self._known = {key: known[key] for key in _keys_of(calls) if key in known}
        least_ns, most = (0, MAX_READ_AT_END) if is_last else (MIN_AGE_NS, MAX_READ)
        entries = calls["frame"]["entry_ns"].astype(np.int64)
        is_due = (calls["frame"]["return_pc"] != 0) & (entries + least_ns <= now_ns)
        n_read = 0
        for i in np.flatnonzero(is_due)[np.argsort(entries[is_due], kind="stable")].tolist():
            key = int(calls["tid"][i]), int(entries[i])
            if key in self._known:
                continue
            if n_read == most:
                return
            n_read += 1
            found = self._stacks.read_open(int(calls["pid"][i]), _open_call(calls, i))
            # What was read is of this call only if it has not returned meanwhile.
            if found and self._is_open(key, int(calls["depth"][i])):
                self._known[key] = found

    def _is_open(self, key: tuple[int, int], depth: int) -> bool:
        thread = self._engine.maps["threads"].lookup(
            key[0].to_bytes(4, "little"), get_dtype("thread")
        )
        return (
            thread is not None
            and int(thread["depth"][0]) > depth
            and int(thread["frames"][0, depth]["entry_ns"]) == key[1]
        )

    def pop_ended(self) -> Records:
        """Calls whose thread ended since the last time: ``struct ig_unfinished``."""
        ended, self._ended = self._ended, []
        return np.concatenate([np.zeros(0, get_dtype("unfinished")), *ended])

    def read_open(self, end_ns: int, find_cgroup: Callable[[int], int]) -> Records:
        """Calls in flight as ``struct ig_unfinished``.

        Args:
            end_ns: Until when, on the monotonic clock.
            find_cgroup: Id of the cgroup of a process; 0 where it is not known.
        """
        calls = self._engine.state.read_in_flight()
        records = np.zeros(len(calls), get_dtype("unfinished"))
        for name in ("pid", "tid", "device", "depth", "frame"):
            records[name] = calls[name]
        records["group_id"] = np.where(calls["frame"]["flags"] & Flag.GROUPED, calls["group_id"], 0)
        records["header"]["mono_ns"] = calls["frame"]["entry_ns"]
        records["ended_ns"] = end_ns
        for i, (pid, tid) in enumerate(
            zip(calls["pid"].tolist(), calls["tid"].tolist(), strict=True)
        ):
            records["comm"][i] = _read_name(pid, tid)
            records["cgroup_id"][i] = find_cgroup(pid)
        return records

    def build_stopped(self, unfinished: Records, end_ns: int) -> Records:
        """Threads inside of calls that are stopped, traced or frozen, as ``struct ig_off_cpu`` until now.

        Why else a thread waits its call says; that it may not run says who keeps the others waiting.

        Args:
            unfinished: ``struct ig_unfinished``, as `read_open` gives them.
            end_ns: Until when, on the monotonic clock.
        """
        threads = {int(one["tid"]): one for one in unfinished}
        left = self._engine.state.read_departures(threads)
        stopped = {tid: one for tid, one in left.items() if one["reason"] == OffCpuReason.STOPPED}
        records = np.zeros(len(stopped), get_dtype("off_cpu"))
        for i, (tid, one) in enumerate(sorted(stopped.items())):
            records["header"]["mono_ns"][i] = one["left_ns"]
            records["off_ns"][i] = max(end_ns - int(one["left_ns"]), 0)
            records["tid"][i], records["pid"][i] = tid, threads[tid]["pid"]
            for name in ("other_pid", "waker_pid", "reason", "other_comm"):
                records[name][i] = one[name]
            for name in ("comm", "cgroup_id"):
                records[name][i] = threads[tid][name]
        records["weight"] = 1
        return records

    def build(
        self, unfinished: Records, keys: Records, counts: Records, offset_ns: int
    ) -> Iterator[tuple[Records, Events]]:
        """Records and rows of calls that did not return, those of NCCL apart.

        Args:
            unfinished: ``struct ig_unfinished``.
            keys: Process, source and operation of what was counted so far.
            counts: ``struct ig_count`` of these.
            offset_ns: Wall clock minus monotonic clock.
        """
        means = {
            (int(key["pid"]), int(key["source"]), int(key["op"])): count["total_ns"] / count["seen"]
            for key, count in zip(keys, counts, strict=True)
            if count["seen"] >= _MIN_SEEN
        }
        is_nccl = np.isin(unfinished["frame"]["source"], (Source.NCCL, Source.GLOO))
        for is_it, name, build in (
            (is_nccl, "collective", build_collective_events),
            (~is_nccl, "call", build_call_events),
        ):
            if not is_it.any():
                continue
            records = _build_records(unfinished[is_it], name, means)
            events = build(records, offset_ns)
            events["flags"] |= np.uint8(EventFlag.IN_FLIGHT)
            known = self._before | self._known
            events["stack_hash"] = [known.get(key, 0) for key in _keys_of(unfinished[is_it])]
            yield records, events


def _build_records(
    unfinished: Records, name: str, means: Mapping[tuple[int, int, int], float]
) -> Records:
    """As ``struct ig_<name>``, as if they returned when they ended; the return code is 0, which nobody knows."""
    frames = unfinished["frame"]
    records = np.zeros(len(unfinished), get_dtype(name))
    taken = (records.dtype.names or (), frames.dtype.names or (), unfinished.dtype.names or ())
    for field in taken[0]:
        if field in taken[1]:
            records[field] = frames[field]
        elif field in taken[2]:
            records[field] = unfinished[field]
    entries = frames["entry_ns"].astype(np.int64)
    records["header"]["mono_ns"] = entries
    records["duration_ns"] = np.maximum(unfinished["ended_ns"].astype(np.int64) - entries, 0)
    records["weight"] = 1
    for i, (pid, source, op, lasted_ns) in enumerate(
        zip(*(records[n].tolist() for n in ("pid", "source", "op", "duration_ns")), strict=True)
    ):
        mean_ns = means.get((pid, source, op))
        if mean_ns is not None and lasted_ns > _SLOW * mean_ns:
            records["flags"][i] |= np.uint8(Flag.SLOW)
    return records


def _keys_of(calls: Records) -> list[tuple[int, int]]:
    """Thread and entry, which name a call."""
    return list(zip(calls["tid"].tolist(), calls["frame"]["entry_ns"].tolist(), strict=True))


def _open_call(calls: Records, i: int) -> OpenCall:
    """One of `KernelState.read_in_flight`, with where the kernel replaced return addresses of its thread."""
    frame = calls["frame"][i]
    same = calls["frame"][calls["tid"] == calls["tid"][i]]
    returns = {
        sp - _ADDRESS_BYTES: pc
        for sp, pc in zip(same["sp"].tolist(), same["return_pc"].tolist(), strict=True)
    }
    return OpenCall(
        int(calls["tid"][i]), int(frame["entry_ns"]), int(frame["return_pc"]), int(frame["sp"]),
        int(frame["bp"]), int(calls["pointer"][i]), returns,
    )  # fmt: skip


def _read_name(pid: int, tid: int) -> bytes:
    """What a thread calls itself; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/task/{tid}/comm").read_bytes().rstrip(b"\n")
    except OSError:
        return b""
