"""What the ports of the RDMA devices showed that a process has open: readings of their counters for some seconds.

The counters are those of this host's own sysfs. Of the process only the names of its open files count: its mounts are
its own, and a file that it made there could wait forever to be looked at.

Sources: Linux, Documentation/ABI/stable/sysfs-class-infiniband (``uverbsN/ibdev``, ``ports/N``), drivers/infiniband/
core/sysfs.c (``N/A (no PMA)`` stands for a counter that a device lacks).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final, TypeAlias

from ingero.agent.capture.discover.processes import iter_open_files
from ingero.agent.diagnosis.connections import LOOK_S
from ingero.model.port_counters import COUNTERS, GREATEST, NOTED, RECEIVED, SENT, TIMERS
from ingero.model.ports import ACTIVE, RdmaPort, RdmaTraffic
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S

MAX_PORTS: Final = 32
PACE_S: Final = 0.025
"""Between two readings of what was sent and of timers: the shortest of these run out after tens of milliseconds."""
_UVERBS: Final = re.compile(r"/dev/infiniband/(uverbs\d+)")
_RATE: Final = re.compile(r"\d+(\.\d+)?")
_FOLDERS: Final = ("counters", "hw_counters")
_PACKETS: Final = (*SENT, *RECEIVED)
_PACE: Final = frozenset({*_PACKETS, *TIMERS, *(other for other in TIMERS.values() if other)})
_KNOWN: Final = frozenset({*_PACE, *COUNTERS, *NOTED})

LookAtPorts: TypeAlias = Callable[[int, threading.Event], RdmaTraffic]
"""Process, what ends it early → the ports of its devices in about `LOOK_S`."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of one port.

    Attributes:
        mono_ns: When.
        counters: Those that could be read.
        unreadable: Those that are there and could not.
        state: Of the port; empty where it cannot be read.
    """

    mono_ns: int
    counters: Mapping[str, int]
    unreadable: frozenset[str]
    state: str


@dataclass(frozen=True, slots=True)
class PortFiles:
    """Where the kernel tells it.

    Attributes:
        devices: A folder a device.
        verbs: A folder a file of ``/dev/infiniband``, with the name of its device.
        proc: ``/proc``.
        clock: When a reading was taken.
    """

    devices: Path = Path("/sys/class/infiniband")
    verbs: Path = Path("/sys/class/infiniband_verbs")
    proc: Path = Path("/proc")
    clock: Clock = field(default_factory=SystemClock)

    def look(self, pid: int, stop: threading.Event) -> RdmaTraffic:
        """Read the ports of a process's devices for `LOOK_S`, or less where asked to stop."""
        try:
            ports = sorted(self._iter_ports(pid))[:MAX_PORTS]
        except OSError as error:
            reason = f"its open files cannot be read: {error.strerror or error}"
            return RdmaTraffic(reason=reason)
        if not ports:
            return RdmaTraffic()
        firsts = [self._read(port) for port in ports]
        paces = [[first] for first in firsts]
        ends_ns = self.clock.mono_ns() + round(LOOK_S * NS_PER_S)
        while not stop.wait(PACE_S) and self.clock.mono_ns() < ends_ns:
            for port, first, pace in zip(ports, firsts, paces, strict=True):
                pace.append(self._read(port, _PACE & first.counters.keys()))
        built = (
            self._build(port, first, self._read(port), pace)
            for port, first, pace in zip(ports, firsts, paces, strict=True)
        )
        return RdmaTraffic(tuple(built))

    def _iter_ports(self, pid: int) -> Iterator[Path]:
        found = (_UVERBS.fullmatch(name) for name in iter_open_files(pid, self.proc))
        for verbs in {one[1] for one in found if one is not None}:
            device = _read_text(self.verbs / verbs / "ibdev")
            if device:
                yield from _list(self.devices / device / "ports")

    def _read(self, port: Path, wanted: Iterable[str] = _KNOWN) -> _Reading:
        mono_ns = self.clock.mono_ns()
        counters, unreadable = dict[str, int](), set[str]()
        for folder in _FOLDERS:
            for name in wanted:
                try:
                    text = (port / folder / name).read_text(encoding="ascii", errors="replace")
                except FileNotFoundError:
                    continue
                except OSError:
                    unreadable.add(name)
                    continue
                if text.strip().isdecimal():
                    counters[name] = int(text)
                elif not text.startswith("N/A"):
                    unreadable.add(name)
        state = _read_word(port / "state")
        return _Reading(mono_ns, counters, frozenset(unreadable - counters.keys()), state)

    def _build(
        self, port: Path, first: _Reading, last: _Reading, pace: Sequence[_Reading]
    ) -> RdmaPort:
        rises, unknown = _compare(first, last)
        busy_ns, stalled_ns = _share_out([*pace, last])
        device = port.parent.parent
        return RdmaPort(
            name=f"{device.name} port {port.name}",
            state=last.state,
            phys_state=_read_word(port / "phys_state"),
            rate_gbps=_read_rate(port),
            best_gbps=self._find_best(port),
            window_ns=last.mono_ns - first.mono_ns,
            busy_ns=busy_ns,
            stalled_ns=stalled_ns,
            counts=rises,
            totals={name: first.counters[name] for name in rises},
            unknown=tuple(sorted(unknown)),
            was_active=first.state == ACTIVE,
        )

    def _find_best(self, port: Path) -> float:
        """The greatest rate of the other active ports of the same board; ports for storage are of another as a rule."""
        device = port.parent.parent
        kind, layer = _read_text(device / "board_id"), _read_text(port / "link_layer")
        rates = [
            _read_rate(other)
            for beside in _list(self.devices)
            if kind and _read_text(beside / "board_id") == kind
            for other in _list(beside / "ports")
            if other != port and _read_text(other / "link_layer") == layer
            if _read_word(other / "state") == ACTIVE
        ]
        return max(rates, default=0.0)


def look_at_ports(pid: int, stop: threading.Event) -> RdmaTraffic:
    """What the ports of this host's devices show that a process has open."""
    return PortFiles().look(pid, stop)


def _compare(first: _Reading, last: _Reading) -> tuple[dict[str, int], set[str]]:
    """By how much counters rose, and those of which that is not known."""
    rises, unknown = dict[str, int](), {*first.unreadable, *last.unreadable}
    unknown |= first.counters.keys() ^ last.counters.keys()
    for name in first.counters.keys() & last.counters.keys():
        rise = last.counters[name] - first.counters[name]
        if rise < 0 or (rise == 0 and last.counters[name] == GREATEST.get(name)):
            unknown.add(name)
        else:
            rises[name] = rise
    return rises, unknown - rises.keys()


def _share_out(readings: Sequence[_Reading]) -> tuple[int, int]:
    """Time with packets, stalls included, and time in which nothing was sent before a timer ran out."""
    busy_ns = stalled_ns = silent_ns = idle_ns = 0
    for then, now in pairwise(readings):
        took_ns = now.mono_ns - then.mono_ns
        rises, _ = _compare(then, now)
        has_packets = any(rises.get(name, 0) for name in _PACKETS)
        has_run_out = any(
            rises.get(name, 0) > rises.get(other, 0) for name, other in TIMERS.items()
        )
        if has_run_out:
            stalled_ns += silent_ns
            busy_ns += idle_ns
        if any(rises.get(name, 0) for name in SENT) or has_run_out:
            silent_ns = idle_ns = 0
        else:
            silent_ns += took_ns
            idle_ns += (
                0 if has_packets else took_ns
            )  # of silence, what is not busy for what came in
        busy_ns += took_ns if has_packets else 0
    return busy_ns, stalled_ns


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _read_word(path: Path) -> str:
    """``ACTIVE`` of ``4: ACTIVE``."""
    return _read_text(path).rpartition(": ")[2]


def _read_rate(port: Path) -> float:
    """Gigabits a second of ``100 Gb/sec (4X EDR)``."""
    found = _RATE.match(_read_text(port / "rate"))
    return float(found[0]) if found is not None else 0.0
