"""The probe engine: loads the objects, attaches libraries and host probes, and hands out what they saw.

One engine per agent. Closing it removes every probe: links live as long as their descriptors.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import numpy as np

from ingero.agent.capture.discover.processes import FileId
from ingero.agent.capture.kernel.abi import N_COPY_KINDS, Stacks, get_dtype
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.agent.capture.kernel.objects import BpfObject
from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.kernel.ring import Ring
from ingero.agent.capture.probes.hooks import attach_host_probe, load_host_probe
from ingero.agent.capture.probes.host import PROBES, HostProbe, find_software_events
from ingero.agent.capture.probes.links import attach_file, close_links, leave_links
from ingero.agent.capture.probes.modes import choose_way, load_calls
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.symbols.libraries import build_descriptors
from ingero.config.probing import ProbeMode, read_probe_mode
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records
from ingero.model.sampling import NEVER_SAMPLED

_KEY_0: Final = bytes(4)
_CALL_RINGS: Final = {
    "calls": "call",
    "kept_calls": "call",
    "failed_calls": "call",
    "collectives": "collective",
    "stacks": "stack",
}
_SHARED: Final = (
    "settings",
    "filter_pids",
    "filter_cgroups",
    "gpu_pids",
    "pythons",
    "threads",
    "counts",
    "losses",
)
_BY_PROCESS: Final = (
    ("counts", "count_key"),
    ("allocations", "handle_key"),
    ("communicators", "handle_key"),
)
_IN_FLIGHT: Final = (
    ("tid", "<u4"),
    ("pid", "<u4"),
    ("device", "<i4"),
    ("group_id", "<u4"),
    ("pointer", "<u8"),
    ("depth", "<u4"),
)
FILTER_PIDS: Final = 1
FILTER_CGROUPS: Final = 2
FILTER_UID: Final = 4


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine runs.

    Attributes:
        host_probes: Names of the host probes to start.
        ring_bytes: Size of the calls ring, a power of two; 0 for the compiled one.
        keep_one_in: Records kept among the calls of kinds that are sampled.
        keep_first: Records always kept per process, operation and CPU.
        probe_mode: How to probe library functions; as the environment says unless given.
        stacks: Which records of calls carry the stack they were made from.
        copies_bytes: Size of the ring of copied stacks, a power of two; one page without stacks.
    """

    host_probes: tuple[str, ...] = tuple(probe.name for probe in PROBES)
    ring_bytes: int = 0
    keep_one_in: int = 1
    keep_first: int = 64
    probe_mode: ProbeMode = field(default_factory=read_probe_mode)
    stacks: Stacks = Stacks.NONE
    copies_bytes: int = 4 << 20


@dataclass(slots=True)
class _Live:
    """Live settings as the kernel has them."""

    filter: int = 0
    uid: int = 0
    keep_one_in: int = 1
    keep_first: int = 64
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """A part that this machine refused."""

    name: str
    reason: str
    hint: str
    costs: str


@dataclass(slots=True)
class _Attached:
    target: ProbeTarget
    links: list[int] = field(default_factory=list)


class Engine:
    """Every program that is loaded, and their maps.

    Args:
        settings: How to run.

    Attributes:
        missing: Host probes that could not start, with the reason.
        rings: Open rings by name.
        stack_copies: The ring of copied stacks, which is read after that of the stacks and by nobody else.
        mode: How library functions are probed; never `ProbeMode.AUTO`.

    Raises:
        UnsupportedError: Not even the engine's own object could be loaded.
    """

    def __init__(self, settings: EngineSettings | None = None) -> None:
        self._settings = settings or EngineSettings()
        self.missing: list[Missing] = []
        self.rings: dict[str, Ring] = {}
        self._objects: list[BpfObject] = []
        self._departures: BpfMap | None = None
        self._links: list[int] = []
        self._attached: dict[FileId, _Attached] = {}
        self._live = _Live(
            keep_one_in=self._settings.keep_one_in, keep_first=self._settings.keep_first
        )
        self.mode, self._calls = self._load_calls()
        self._objects.append(self._calls)
        self.maps: Mapping[str, BpfMap] = self._calls.maps
        self._write_descriptors()
        self._write_settings()
        for ring, record in _CALL_RINGS.items():
            self.rings[ring] = Ring(self.maps[ring], get_dtype(record))
        self.stack_copies = Ring(self.maps["stack_copies"], get_dtype("stack_copy"))

    def _load_calls(self) -> tuple[ProbeMode, BpfObject]:
        copies_bytes = self._settings.copies_bytes
        sizes = {"stack_copies": copies_bytes if self.with_stacks else mmap.PAGESIZE}
        if self._settings.ring_bytes:
            sizes["calls"] = self._settings.ring_bytes
        way = choose_way(self._settings.probe_mode)
        return way.mode, load_calls(way, sizes)

    def _write_descriptors(self) -> None:
        for index, descriptor in enumerate(build_descriptors()):
            self.maps["descriptors"].update(index.to_bytes(4, "little"), descriptor.tobytes())

    def _write_settings(self) -> None:
        settings = np.zeros(1, get_dtype("settings"))
        settings["stacks"] = self._settings.stacks
        for source, op in NEVER_SAMPLED:
            settings["exact"][0, source] |= np.uint64(1 << op)
        for name in ("filter", "uid", "keep_one_in", "keep_first", "is_over"):
            settings[name] = getattr(self._live, name)
        self.maps["settings"].update(_KEY_0, settings.tobytes())

    @property
    def with_stacks(self) -> bool:
        """Whether any record of a call carries the stack it was made from."""
        return self._settings.stacks != Stacks.NONE

    def start_host_probes(self, events: PerfEvents | None = None) -> None:
        """Load and attach the host probes; one that this machine refuses goes to `missing`.

        Say first whom to watch: some programs are needed for that alone.

        Args:
            events: With the software events of `find_software_events`; they may be closed afterwards. None opens them now.
        """
        names = self._settings.host_probes
        if events is None:
            with contextlib.closing(PerfEvents(find_software_events(names))) as own:
                self.start_host_probes(own)
            return
        for probe in PROBES:
            if probe.name not in names:
                continue
            try:
                self._start(probe, events)
            except UnsupportedError as error:
                self.missing.append(Missing(probe.name, error.message, error.hint, probe.costs))

    def _start(self, probe: HostProbe, events: PerfEvents) -> None:
        found = load_host_probe(
            probe, self._calls.subset(_SHARED), is_filtered=bool(self._live.filter)
        )
        loaded = found.loaded
        links, unattached = attach_host_probe(probe, found, events)
        self.missing += [
            Missing(probe.name, one.reason, "", one.costs) for one in (*found.refusals, *unattached)
        ]
        if not links:
            loaded.close()
            return
        self._links += links
        self._objects.append(loaded)
        self._departures = loaded.maps.get("departures", self._departures)
        for ring, record in ((probe.ring, probe.record), *probe.more_rings):
            self.rings[ring] = Ring(loaded.maps[ring], get_dtype(record))

    def attach(self, target: ProbeTarget, reach: str = "") -> bool:
        """Probe a file, or a further part of one, in every process; False when that is probed already.

        Args:
            target: What to probe in it: all of it, or a part that has nothing in common with the others.
            reach: A path that leads to the file now; empty for the target's own.

        Raises:
            UnsupportedError: The kernel refuses.
        """
        known = self._attached.get(target.file)
        if known is not None and set(target.probes) <= set(known.target.probes):
            return False
        links = attach_file(self.mode, self._calls.programs, target, reach or target.path)
        attached = _Attached(target, links)
        if known is not None:
            attached = _Attached(known.target.join(target), known.links + attached.links)
        self._attached[target.file] = attached
        return True

    @property
    def targets(self) -> tuple[ProbeTarget, ...]:
        """The files that are probed."""
        return tuple(attached.target for attached in list(self._attached.values()))

    def is_attached(self, file: FileId) -> bool:
        """Whether a file is probed."""
        return file in self._attached

    def watch_pid(self, pid: int) -> None:
        """Watch this process and its later children; the first call ends watching everything."""
        self.maps["filter_pids"].update(pid.to_bytes(4, "little"), b"\1")
        self._set(filter=self._live.filter | FILTER_PIDS)

    def watch_uid(self, uid: int) -> None:
        """Watch every process of a user."""
        self._set(filter=self._live.filter | FILTER_UID, uid=uid)

    def watch_cgroup(self, cgroup_id: int) -> None:
        """Watch every process directly in a cgroup."""
        self.maps["filter_cgroups"].update(cgroup_id.to_bytes(8, "little"), b"\1")
        self._set(filter=self._live.filter | FILTER_CGROUPS)

    def is_watched_pid(self, pid: int) -> bool:
        """Whether a process is watched by its pid: it was named, or it is a child of one that was."""
        return (
            self.maps["filter_pids"].lookup(pid.to_bytes(4, "little"), np.dtype("u1")) is not None
        )

    def read_watched_pids(self) -> frozenset[int]:
        """Processes that are watched by their pid and have not ended."""
        pids, _ = self.maps["filter_pids"].read_all(np.dtype("<u4"), np.dtype("u1"))
        return frozenset(pids.tolist())

    def forget_pid(self, pid: int) -> None:
        """Stop watching a process by its pid: it ended and no record said so."""
        self.maps["filter_pids"].delete(pid.to_bytes(4, "little"))

    @property
    def keep_one_in(self) -> int:
        """Of how many calls of a kind that is sampled one becomes a record."""
        return self._live.keep_one_in

    def set_keep_one_in(self, number: int) -> None:
        """Change the sampling of the kinds that are sampled; counts stay exact."""
        self._set(keep_one_in=number)

    def end(self) -> None:
        """Count nothing any more: what was counted has its record in a ring, and what has not returned stays in flight."""
        self._set(is_over=True)

    def _set(self, **changes: int | bool) -> None:
        for name, value in changes.items():
            setattr(self._live, name, value)
        self._write_settings()

    def drain(self, consume: Mapping[str, Callable[[Records], None]]) -> int:
        """Read every ring once; ``consume`` gets a view per ring name, and what it does not name is discarded."""
        return sum(
            ring.drain(consume.get(name, lambda _: None)) for name, ring in self.rings.items()
        )

    def read_counts(self) -> tuple[Records, Records]:
        """Exact counts of every (process, source, operation) so far, summed over the CPUs.

        Returns:
            Keys (``pid op source``) and values (``struct ig_count``), shape (n,) each.
        """
        keys, per_cpu = self.maps["counts"].read_all(get_dtype("count_key"), get_dtype("count"))
        totals = np.zeros(len(keys), get_dtype("count"))
        for name in totals.dtype.names or ():
            if name == "max_ns":
                totals[name] = per_cpu[name].max(axis=1, initial=0)
            elif name == "min_ns":
                never = np.iinfo(np.uint64).max
                lowest = np.where(per_cpu[name] == 0, never, per_cpu[name]).min(
                    axis=1, initial=never
                )
                totals[name] = np.where(lowest == never, 0, lowest)
            else:
                totals[name] = per_cpu[name].sum(axis=1)
        return keys, totals

    def read_copies(self) -> Records:
        """Exact counts so far of copies that succeeded, by direction, summed over processes and CPUs.

        Returns:
            ``struct ig_count`` with ``seen``, ``bytes``, ``total_ns`` and ``hist`` filled; shape (N_COPY_KINDS,), by
            `CopyKind`. A copy that another copy made, as the runtime's does in the driver, is counted with that one.
        """
        totals = np.zeros(N_COPY_KINDS, get_dtype("count"))
        for kind in range(N_COPY_KINDS):
            per_cpu = self.maps["copies"].lookup(kind.to_bytes(4, "little"), totals.dtype)
            assert per_cpu is not None  # an array map has all its entries
            for name in ("seen", "bytes", "total_ns", "hist"):
                totals[name][kind] = per_cpu[name].sum(axis=0)
        return totals

    def forget(self, pids: Collection[int]) -> None:
        """Drop what is kept of processes that ended: counts (read them first), allocations and communicators."""
        if not pids:
            return
        ended = np.fromiter(pids, np.uint32)
        for name, key in _BY_PROCESS:
            held = self.maps[name]
            # Values are not looked at, only their size counts.
            keys, _ = held.read_all(get_dtype(key), np.dtype(f"V{held.value_bytes}"))
            # As plain bytes: NumPy does not copy what lies between a structure's fields.
            for entry in keys.view(f"V{held.key_bytes}")[np.isin(keys["pid"], ended)]:
                held.delete(entry.tobytes())

    def read_losses(self) -> dict[str, int]:
        """Losses that belong to no operation, by name; all zero when nothing was lost."""
        per_cpu = self.maps["losses"].lookup(_KEY_0, get_dtype("losses"))
        assert per_cpu is not None  # an array map has its one entry
        return {name: int(per_cpu[name].sum()) for name in per_cpu.dtype.names or ()}

    def read_unwinding(self) -> dict[str, int]:
        """How the native frames of stacks were found so far, by name: ``struct ig_unwinding``."""
        per_cpu = self.maps["unwinding"].lookup(_KEY_0, get_dtype("unwinding"))
        assert per_cpu is not None  # an array map has its one entry
        return {name: int(per_cpu[name].sum()) for name in per_cpu.dtype.names or ()}

    def read_departures(self, tids: Iterable[int]) -> dict[int, np.void]:
        """Which of these threads are off the CPU now: ``struct ig_departure`` by thread; none without the scheduler's probe."""
        if self._departures is None:
            return {}
        found = {}
        for tid in tids:
            left = self._departures.lookup(tid.to_bytes(4, "little"), get_dtype("departure"))
            if left is not None:
                found[tid] = left[0]
        return found

    def read_in_flight(self) -> Records:
        """Calls that were entered and have not returned.

        Returns:
            Frames with their thread, outermost first: fields ``tid``, ``pid``, ``device``, ``group_id``, ``pointer``
            (``struct ig_thread``), ``depth`` and ``frame`` (``struct ig_frame``).
        """
        tids, threads = self.maps["threads"].read_all(np.dtype("<u4"), get_dtype("thread"))
        rows, columns = np.nonzero(
            np.arange(threads["frames"].shape[1])[None, :] < threads["depth"][:, None]
        )
        result = np.zeros(len(rows), [*_IN_FLIGHT, ("frame", get_dtype("frame"))])
        result["tid"] = tids[rows]
        for name in ("pid", "device", "group_id", "pointer"):
            result[name] = threads[name][rows]
        result["depth"] = columns
        result["frame"] = threads["frames"][rows, columns]
        return result[result["frame"]["entry_ns"] > 0]

    def close(self) -> None:
        """Remove every probe and free every object; safe to call twice."""
        close_links(self._links)
        if self.mode is ProbeMode.EVENT and self._attached:
            self.end()  # until they are gone, the probes do nothing
        leave = leave_links if self.mode is ProbeMode.EVENT else close_links
        leave([link for attached in self._attached.values() for link in attached.links])
        self._attached.clear()
        for ring in (*self.rings.values(), self.stack_copies):
            ring.close()
        self.rings.clear()
        for loaded in reversed(self._objects):
            loaded.close()
        self._objects.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
