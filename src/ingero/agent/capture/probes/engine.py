"""The probe engine: loads the objects, attaches libraries and host probes, and hands out what they saw.

One engine per agent. Closing it removes every probe: links live as long as their descriptors.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingero.agent.capture.discover.processes import FileId
from ingero.agent.capture.kernel.abi import Stacks, get_dtype
from ingero.agent.capture.kernel.descriptors import raise_descriptor_limit
from ingero.agent.capture.kernel.maps import BpfMap
from ingero.agent.capture.kernel.objects import BpfObject
from ingero.agent.capture.kernel.perf import LateEvents, PerfEvents
from ingero.agent.capture.kernel.ring import Ring
from ingero.agent.capture.probes.control import ProbeControl
from ingero.agent.capture.probes.hooks import attach_host_probe, attach_late, load_host_probe
from ingero.agent.capture.probes.host import PROBES, HostProbe, find_software_events
from ingero.agent.capture.probes.links import (
    attach_file,
    close_links,
    remove_links,
)
from ingero.agent.capture.probes.modes import CallPrograms, choose_way, load_calls
from ingero.agent.capture.probes.state import KernelState
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.symbols.libraries import build_descriptors
from ingero.closing import Closing
from ingero.config.environment import ProbeMode, read_probe_mode
from ingero.errors import UnsupportedError
from ingero.model.arrays import Records

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


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How the engine runs.

    Attributes:
        host_probes: Names of the host probes to start.
        ring_bytes: Size of the calls ring, a power of two; 0 for the compiled one.
        keep_one_in: Records kept among the calls of kinds that are sampled.
        keep_first: Records always kept per process and operation.
        probe_mode: How to probe library functions; as the environment says unless given.
        stacks: Which records of calls carry the stack they were made from.
        copies_bytes: Size of the ring of copied stacks, a power of two; one page without stacks.
        keeps_copies: Whether every copy has a record, not only those of `NEVER_SAMPLED`: a server's result is a copy.
        probes_calls: Whether `Engine.attach` may be used. Without it the programs of calls are not loaded, which the
            kernel takes more than a second of a processor to verify.
    """

    host_probes: tuple[str, ...] = tuple(probe.name for probe in PROBES)
    ring_bytes: int = 0
    keep_one_in: int = 1
    keep_first: int = 64
    probe_mode: ProbeMode = field(default_factory=read_probe_mode)
    stacks: Stacks = Stacks.NONE
    copies_bytes: int = 4 << 20
    keeps_copies: bool = False
    probes_calls: bool = True


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


class Engine(Closing):
    """Every program that is loaded, and their maps.

    Args:
        settings: How to run.

    Attributes:
        missing: Host probes that could not start, and ways to probe that did not work, with the reason.
        rings: Open rings by name.
        control: Whom the programs watch, and how many calls become records.
        state: What their maps hold.
        stack_copies: The ring of copied stacks, which is read after that of the stacks and by nobody else.
        mode: How library functions are probed; never `ProbeMode.AUTO`.

    Raises:
        UnsupportedError: Not even the engine's own object could be loaded, or no function may be probed.
    """

    def __init__(self, settings: EngineSettings | None = None) -> None:
        raise_descriptor_limit()
        self._settings = settings or EngineSettings()
        self.missing: list[Missing] = []
        self.rings: dict[str, Ring] = {}
        self._objects: list[BpfObject | CallPrograms] = []
        self._links: list[int] = []
        self._attached: dict[FileId, _Attached] = {}
        self._calls = self._load_calls()
        self.mode = self._calls.mode
        self._objects.append(self._calls)
        self.maps: Mapping[str, BpfMap] = self._calls.maps
        self._write_descriptors()
        settings = self._settings
        self.control = ProbeControl(
            self.maps,
            settings.stacks,
            settings.keep_one_in,
            settings.keep_first,
            keeps_copies=settings.keeps_copies,
        )
        self.state = KernelState(self.maps)
        for ring, record in _CALL_RINGS.items():
            self.rings[ring] = Ring(self.maps[ring], get_dtype(record))
        self.stack_copies = Ring(self.maps["stack_copies"], get_dtype("stack_copy"))

    def _load_calls(self) -> CallPrograms:
        copies_bytes = self._settings.copies_bytes
        sizes = {"stack_copies": copies_bytes if self.with_stacks else mmap.PAGESIZE}
        if self._settings.ring_bytes:
            sizes["calls"] = self._settings.ring_bytes
        # A ring of less than a page is refused, and a page may have 64 KiB.
        sizes = {name: max(n_bytes, mmap.PAGESIZE) for name, n_bytes in sizes.items()}
        if not self._settings.probes_calls:
            way = choose_way(self._settings.probe_mode)
            return CallPrograms(way.mode, BpfObject(way.probe, {}, sizes=sizes))
        way, calls, refused = load_calls(self._settings.probe_mode, sizes)
        self.missing += [
            Missing(
                one.way.description,
                one.error.message,
                one.error.hint,
                f"calls are probed by {way.description}",
            )
            for one in refused
        ]
        return CallPrograms(way.mode, calls)

    def _write_descriptors(self) -> None:
        for index, descriptor in enumerate(build_descriptors()):
            self.maps["descriptors"].update(index.to_bytes(4, "little"), descriptor.tobytes())

    @property
    def with_stacks(self) -> bool:
        """Whether any record of a call carries the stack it was made from."""
        return self._settings.stacks != Stacks.NONE

    def start_host_probes(self, events: PerfEvents | None = None) -> None:
        """Load and attach the host probes; one that this machine refuses goes to `missing`.

        Say first whom to watch: some programs are needed for that alone.

        Args:
            events: With the software events of `find_software_events`; they may be closed afterwards. None opens them
                now.
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
            probe, self._calls.calls.subset(_SHARED), is_filtered=self.control.is_filtered
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
        self.state.departures = loaded.maps.get("departures", self.state.departures)
        for ring, record in ((probe.ring, probe.record), *probe.more_rings):
            self.rings[ring] = Ring(loaded.maps[ring], get_dtype(record))

    def follow_late(self, late: LateEvents) -> None:
        """Have the programs of software events run on processors that came online, too."""
        for probe in PROBES if late.software else ():
            for loaded in self._objects:
                if isinstance(loaded, BpfObject) and loaded.probe == probe.name:
                    self._links += attach_late(probe, loaded, late)

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
        links = attach_file(self.mode, self._calls.find(target), target, reach or target.path)
        attached = _Attached(target, links)
        if known is not None:
            attached = _Attached(known.target.join(target), known.links + attached.links)
        self._attached[target.file] = attached
        return True

    def detach(self, file: FileId) -> None:
        """Remove every probe of a file, if it has any; those by perf events are gone some time later."""
        attached = self._attached.get(file)
        if attached is None:
            return
        try:
            remove_links(self.mode, attached.links)
        except OSError:  # no process can be started that removes them: wait for each
            close_links(attached.links)
        del self._attached[file]

    @property
    def targets(self) -> tuple[ProbeTarget, ...]:
        """The files that are probed."""
        return tuple(attached.target for attached in list(self._attached.values()))

    def find_target(self, file: FileId) -> ProbeTarget | None:
        """What is probed in a file; None for nothing."""
        attached = self._attached.get(file)
        return None if attached is None else attached.target

    def is_attached(self, file: FileId) -> bool:
        """Whether a file is probed."""
        return file in self._attached

    def drain(self, consume: Mapping[str, Callable[[Records], None]]) -> int:
        """Read every ring once; ``consume`` gets a view per ring name, and what it does not name is discarded."""
        return sum(
            ring.drain(consume.get(name, lambda _: None)) for name, ring in self.rings.items()
        )

    def close(self) -> None:
        """Remove every probe and free every object; safe to call twice."""
        close_links(self._links)
        if self.mode is ProbeMode.EVENT and self._attached:
            self.control.end()  # until they are gone, the probes do nothing
        remove_links(
            self.mode, [link for attached in self._attached.values() for link in attached.links]
        )
        self._attached.clear()
        for ring in (*self.rings.values(), self.stack_copies):
            ring.close()
        self.rings.clear()
        for loaded in reversed(self._objects):
            loaded.close()
        self._objects.clear()
