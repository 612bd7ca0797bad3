"""What the kernel's maps hold: exact counts, losses, and calls that have not returned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.abi import N_COPY_KINDS, get_dtype
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.model.arrays import Records

_KEY_0: Final = bytes(4)
_BY_PROCESS: Final = (
    ("counts", "count_key"),
    ("allocations", "handle_key"),
    ("communicators", "handle_key"),
    ("contexts", "handle_key"),
)
_IN_FLIGHT: Final = (
    ("tid", "<u4"),
    ("pid", "<u4"),
    ("device", "<i4"),
    ("group_id", "<u4"),
    ("pointer", "<u8"),
    ("depth", "<u4"),
)


def build_in_flight(n: int = 0) -> Records:
    """Rows as `KernelState.read_in_flight` gives them, all zero."""
    return np.zeros(n, [*_IN_FLIGHT, ("frame", get_dtype("frame"))])


class KernelState:
    """Reads the maps of an engine.

    Args:
        maps: The kernel's maps.

    Attributes:
        departures: The map of threads off the CPU; None without the scheduler's probe.
    """

    def __init__(self, maps: Mapping[str, BpfMap]) -> None:
        self.departures: BpfMap | None = None
        self._maps = maps

    def read_counts(self) -> tuple[Records, Records]:
        """Exact counts of every (process, source, operation) so far.

        Returns:
            Keys (``pid op source``) and values (``struct ig_count``), shape (n,) each.
        """
        keys, counts = self._maps["counts"].read_all(get_dtype("count_key"), get_dtype("count"))
        counts = counts.copy()
        # One CPU may be between two of these now, so that it counts as written what it then leaves out.
        counts["emitted"] = counts["seen"] - counts["sampled"] - counts["lost"]
        return keys, counts

    def read_copies(self) -> Records:
        """Exact counts so far of copies that succeeded, by direction, summed over processes and CPUs.

        Returns:
            ``struct ig_count`` with ``seen``, ``bytes``, ``total_ns`` and ``hist`` filled; shape (N_COPY_KINDS,), by
            `CopyKind`. A copy that another copy made, as the runtime's does in the driver, is counted with that one.
        """
        totals = np.zeros(N_COPY_KINDS, get_dtype("count"))
        for kind in range(N_COPY_KINDS):
            per_cpu = self._maps["copies"].lookup(kind.to_bytes(4, "little"), totals.dtype)
            assert per_cpu is not None  # an array map has all its entries
            for name in ("seen", "bytes", "total_ns", "hist"):
                totals[name][kind] = per_cpu[name].sum(axis=0)
        return totals

    def forget(self, pids: Collection[int]) -> None:
        """Drop what is kept of processes that ended: their counts, which are to be read first, and their handles."""
        if not pids:
            return
        ended = np.fromiter(pids, np.uint32)
        for name, key in _BY_PROCESS:
            held = self._maps[name]
            # Values are not looked at, only their size counts.
            keys, _ = held.read_all(get_dtype(key), np.dtype(f"V{held.value_bytes}"))
            # As plain bytes: NumPy does not copy what lies between a structure's fields.
            for entry in keys.view(f"V{held.key_bytes}")[np.isin(keys["pid"], ended)]:
                held.delete(entry.tobytes())

    def read_losses(self) -> dict[str, int]:
        """Losses that belong to no operation, by name; all zero when nothing was lost."""
        per_cpu = self._maps["losses"].lookup(_KEY_0, get_dtype("losses"))
        assert per_cpu is not None  # an array map has its one entry
        return {name: int(per_cpu[name].sum()) for name in per_cpu.dtype.names or ()}

    def read_unwinding(self) -> dict[str, int]:
        """How the native frames of stacks were found so far, by name: ``struct ig_unwinding``."""
        per_cpu = self._maps["unwinding"].lookup(_KEY_0, get_dtype("unwinding"))
        assert per_cpu is not None  # an array map has its one entry
        return {name: int(per_cpu[name].sum()) for name in per_cpu.dtype.names or ()}

    def read_departures(self, tids: Iterable[int]) -> dict[int, np.void]:
        """Which of these threads are off the CPU now: ``struct ig_departure`` by thread.

        None without the scheduler's probe.
        """
        if self.departures is None:
            return {}
        found = {}
        for tid in tids:
            left = self.departures.lookup(tid.to_bytes(4, "little"), get_dtype("departure"))
            if left is not None:
                found[tid] = left[0]
        return found

    def read_in_flight(self) -> Records:
        """Calls that were entered and have not returned.

        Returns:
            Frames with their thread, outermost first: fields ``tid``, ``pid``, ``device``, ``group_id``, ``pointer``
            (``struct ig_thread``), ``depth`` and ``frame`` (``struct ig_frame``).
        """
        tids, threads = self._maps["threads"].read_all(np.dtype("<u4"), get_dtype("thread"))
        rows, columns = np.nonzero(
            np.arange(threads["frames"].shape[1])[None, :] < threads["depth"][:, None]
        )
        result = build_in_flight(len(rows))
        result["tid"] = tids[rows]
        for name in ("pid", "device", "group_id", "pointer"):
            result[name] = threads[name][rows]
        result["depth"] = columns
        result["frame"] = threads["frames"][rows, columns]
        return result[result["frame"]["entry_ns"] > 0]
