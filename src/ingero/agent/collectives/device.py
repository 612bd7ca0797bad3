"""Collectives as the plug-in for NCCL tells them, and what they replace.

A collective begins when the first channel of its kernel did and is left when the last one ended, both by the device's
timer; own time is what the device spent between. Such rows have the clock ``device`` and NCCL's own communicator id.
Only their place among other rows needs the host's clock: the device's timer is moved by the smallest distance that was
seen between the end of a collective and NCCL's word of it.

A probe sees the call of the same collective, so of each kind (operation, rank and size of the communicator) as many
host rows are dropped as the plug-in reported since they were entered. What it does not report keeps the host's clock.

Lossy: `DeviceCounts`. A process that is several ranks of one communicator is left to the probes, because neither the
node's ranks nor the devices' timers could be distinguished.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.agent.collectives.host import ROW, SETTLE_NS, CommPosition, Finished, own_times
from ingero.agent.collectives.newest import put_newest
from ingero.agent.collectives.pace import Pace
from ingero.agent.collectives.plugin_ring import RECORD, NcclRing, find_rings_of
from ingero.model.arrays import BoolArray, IntArray, Records
from ingero.model.collectives import COLLECTIVE_OP, MAX_SEQ, UNKNOWN_NS, ClockKind, CollectiveOp
from ingero.units import NS_PER_S

_Kind = tuple[int, int, int]

SCAN_NS: Final = 2 * NS_PER_S
"""Between two looks for a ring that a process may have made since."""
HOLD_NS: Final = NS_PER_S
"""How long a host row of a process with the plug-in waits for the plug-in to tell of it."""
_MAX_STARTS: Final = 4096
_MAX_KINDS: Final = 256
MAX_MEMBERSHIPS: Final = 4096
"""Communicators of one process that are followed as long as it lives: what it writes must not fill our memory."""
_DISTANCES: Final = 256
_MAX_TIME_NS: Final = 1 << 62
_MAX_DURATION_NS: Final = 1 << 50
_MAX_RANKS: Final = 1 << 24
_OPS: Final = tuple(int(op) for op in CollectiveOp)


@dataclass(slots=True)
class DeviceCounts:
    """What became of what plug-ins reported.

    Attributes:
        n_ops: Collectives with device times.
        n_superseded: Host rows that were dropped for them.
        n_lost: Collectives that plug-ins could not tell, or that were not read in time.
        n_refused: Records and places without sense, or of processes that are several ranks of one communicator.
        n_unplaced: Communicators that a plug-in had no place for, so that nobody knows how far a process is on them.
    """

    n_ops: int = 0
    n_superseded: int = 0
    n_lost: int = 0
    n_refused: int = 0
    n_unplaced: int = 0


@dataclass(slots=True)
class _PluginProcess:
    """One process and what its plug-in reported."""

    rings: dict[str, NcclRing] = field(default_factory=dict)
    has_reported: bool = False
    scanned: dict[str, None] = field(default_factory=dict)
    memberships: set[tuple[int, int, int]] = field(default_factory=set)
    next_scan_ns: int = 0
    is_several: bool = False
    is_over: bool = False
    pending: Records = field(default_factory=lambda: np.zeros(0, RECORD))
    starts: dict[_Kind, IntArray] = field(default_factory=dict)
    distances: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    free_ns: int = UNKNOWN_NS
    n_lost: int = 0
    n_unplaced: int = 0
    n_refused_places: int = 0
    positions: dict[str, CommPosition] = field(default_factory=dict)

    @property
    def is_reporting(self) -> bool:
        """Whether its word is taken."""
        return self.has_reported and not self.is_several


@dataclass(slots=True)
class _Held:
    one: Finished
    at_ns: int
    is_open: BoolArray


class DeviceCollectives:
    """Reads the rings of the processes that it is given. One thread at a time.

    Args:
        parent: Where plug-ins make their rings, as the processes see it; None looks for none.
        since_ns: Since when it reads, on the monotonic clock: what rings lost that were made later counts from their
            beginning. None counts from when each was found.

    Attributes:
        counts: What became of what they reported.
    """

    def __init__(self, parent: Path | None = None, since_ns: int | None = None) -> None:
        self.counts = DeviceCounts()
        self._parent, self._since_ns = parent, since_ns
        self._plugins: dict[int, _PluginProcess] = {}
        self._held: list[_Held] = []

    def note_process(self, pid: int) -> None:
        """A process that may have the plug-in, now or later."""
        self._plugins.setdefault(pid, _PluginProcess())

    def note_exit(self, pid: int) -> None:
        """A process ended: nothing of it is waited for any more."""
        if pid in self._plugins:
            self._plugins[pid].is_over = True

    def end(self) -> None:
        """As if every process had ended."""
        for plugin in self._plugins.values():
            plugin.is_over = True

    def forget(self, pid: int) -> None:
        """Nobody will ask for the process again."""
        for ring in self._plugins.pop(pid, _PluginProcess()).rings.values():
            ring.close()

    def close(self) -> None:
        """Close every ring."""
        for pid in list(self._plugins):
            self.forget(pid)

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes whose plug-in tells."""
        return tuple(pid for pid, plugin in self._plugins.items() if plugin.is_reporting)

    def positions(self, pid: int) -> dict[str, CommPosition]:
        """How far a process is, by communicator; empty when its plug-in does not tell."""
        plugin = self._plugins.get(pid)
        return plugin.positions if plugin is not None and plugin.is_reporting else {}

    # ── In ──────────────────────────────────────────────────────────────────

    def read(self, mono_ns: int) -> None:
        """Read every ring."""
        for pid, plugin in self._plugins.items():
            if mono_ns >= plugin.next_scan_ns:
                self._scan(pid, plugin, mono_ns)
            if plugin.rings:
                self._read_process(plugin, mono_ns)

    def _scan(self, pid: int, plugin: _PluginProcess, mono_ns: int) -> None:
        if self._parent is not None:
            known = frozenset(plugin.rings)
            plugin.rings |= find_rings_of(pid, self._parent, known, self._since_ns)
            plugin.has_reported |= bool(plugin.rings)
        plugin.next_scan_ns = mono_ns + SCAN_NS

    def _read_process(self, plugin: _PluginProcess, mono_ns: int) -> None:
        by_ring = {name: ring.read_communicators() for name, ring in plugin.rings.items()}
        positions = np.concatenate(list(by_ring.values()))
        is_sound_place = _find_sound_places(positions)
        n_refused = int((~is_sound_place).sum())
        # Those seen before stay in the table.
        self.counts.n_refused += max(n_refused - plugin.n_refused_places, 0)
        plugin.n_refused_places = n_refused
        positions = positions[is_sound_place]
        plugin.is_several |= len(np.unique(positions["comm"])) < len(positions)
        records = np.concatenate([ring.read() for ring in plugin.rings.values()])
        # The next process removes the ring of one that was killed, which still says where that one stood.
        over = [
            name for name, ring in plugin.rings.items() if not len(by_ring[name]) and ring.is_over()
        ]
        self._note_lost(plugin)
        _close_rings(plugin, over)
        is_sound = _find_sound(records) & (not plugin.is_several)
        is_sound[is_sound] = _find_followed(plugin, records[is_sound])
        self.counts.n_refused += int((~is_sound).sum())
        records = records[is_sound]
        _note_positions(plugin, positions)
        if len(records):
            self.counts.n_ops += len(records)
            _note_starts(plugin, records)
            seen_ns = (records["host_seen_ns"] - records["gpu_stop_ns"]).astype(np.int64)
            plugin.distances = np.concatenate([plugin.distances, seen_ns])[-_DISTANCES:]
            # Whatever it says, it was seen by now: nothing waits for longer than it must.
            records["host_seen_ns"] = np.minimum(records["host_seen_ns"], mono_ns)
            plugin.pending = np.concatenate([plugin.pending, records])

    def _note_lost(self, plugin: _PluginProcess) -> None:
        """Count what rings lost since the last time; that stays lost, whatever the writer says later."""
        counts = [ring.counts for ring in plugin.rings.values()]
        n_lost = sum(one.n_lost for one in counts) - plugin.n_lost
        n_unplaced = sum(one.n_unplaced for one in counts) - plugin.n_unplaced
        if n_lost > 0:
            self.counts.n_lost += n_lost
            plugin.n_lost += n_lost
            plugin.free_ns = UNKNOWN_NS
        if n_unplaced > 0:
            self.counts.n_unplaced += n_unplaced
            plugin.n_unplaced += n_unplaced

    # ── Out ─────────────────────────────────────────────────────────────────

    def take(self, finished: Sequence[Finished], mono_ns: int) -> list[Finished]:
        """Device rows that are complete, and of the host rows given now or before those that nothing replaced."""
        out: list[Finished] = []
        for one in finished:
            plugin = self._plugins.get(one.pid)
            if plugin is not None:
                if one.comm not in plugin.scanned:
                    # A ring is made with a communicator: without a look now this row and its device row would both
                    # go out.
                    self._scan(one.pid, plugin, mono_ns)
                put_newest(plugin.scanned, one.comm, None)
            if plugin is None or not plugin.is_reporting:
                out.append(one)
            else:
                self._held.append(_Held(one, mono_ns, np.ones(len(one.ops), bool)))
        self._match()
        out += self._release(mono_ns)
        for pid, plugin in self._plugins.items():
            out += _finish(pid, plugin, mono_ns)
        return out

    def _match(self) -> None:
        """Close held rows that the plug-in reported."""
        rows: dict[tuple[int, _Kind], list[tuple[_Held, npt.NDArray[np.intp]]]] = defaultdict(list)
        for held in self._held:
            one = held.one
            for op in np.unique(one.ops["op"][held.is_open]).tolist():
                which = np.flatnonzero(held.is_open & (one.ops["op"] == op))
                rows[one.pid, (one.comm_rank, one.n_ranks, op)].append((held, which))
        for (pid, kind), parts in rows.items():
            plugin = self._plugins.get(pid)
            if plugin is None or kind not in plugin.starts:
                continue
            entry_ns = np.concatenate([held.one.ops["entry_ns"][which] for held, which in parts])
            order = np.argsort(entry_ns, kind="stable")
            is_matched, n_used = match_starts(entry_ns[order], plugin.starts[kind])
            plugin.starts[kind] = plugin.starts[kind][n_used:]
            is_closed = np.zeros(len(order), bool)
            is_closed[order] = is_matched
            self.counts.n_superseded += int(is_matched.sum())
            bounds = np.cumsum([len(which) for _, which in parts])[:-1]
            for (held, which), closed in zip(parts, np.split(is_closed, bounds), strict=True):
                held.is_open[which[closed]] = False

    def _release(self, mono_ns: int) -> list[Finished]:
        """Held rows that have waited long enough."""
        out, kept = [], []
        for held in self._held:
            plugin = self._plugins.get(held.one.pid)
            is_due = plugin is None or plugin.is_over or mono_ns - held.at_ns >= HOLD_NS
            if not held.is_open.any():
                continue
            if is_due:
                out.append(replace(held.one, ops=held.one.ops[held.is_open]))
            else:
                kept.append(held)
        self._held = kept
        return out


def match_starts(entry_ns: IntArray, start_ns: IntArray) -> tuple[BoolArray, int]:
    """Give each call, oldest first, the first start that is left and not before it.

    Args:
        entry_ns: When calls were entered, ascending, shape (n,).
        start_ns: When what they started began, ascending, shape (m,).

    Returns:
        Which calls got one, shape (n,), and how many starts are used up or too old for the first call.
    """
    if not len(entry_ns):
        return np.zeros(0, bool), 0
    number = np.arange(len(entry_ns))
    earliest = np.searchsorted(start_ns, entry_ns, "left")
    given = number + np.maximum.accumulate(earliest - number)
    is_given: BoolArray = given < len(start_ns)
    n_used = int(given[is_given][-1]) + 1 if is_given.any() else int(earliest[0])
    return is_given, n_used


def _find_sound(records: Records) -> BoolArray:
    """Records that can be true: the writer is another's process."""
    start_ns, stop_ns = records["gpu_start_ns"], records["gpu_stop_ns"]
    sound: BoolArray = (
        (records["seq"] > 0)
        & (records["seq"] <= MAX_SEQ)
        & (records["rank"] >= 0)
        & (records["rank"] < records["n_ranks"])
        & (records["n_ranks"] <= _MAX_RANKS)
        & (start_ns > 0)
        & (start_ns <= stop_ns)
        & (stop_ns < _MAX_TIME_NS)
        & (stop_ns - start_ns < _MAX_DURATION_NS)
        & (records["host_start_ns"] < _MAX_TIME_NS)
        & (records["host_seen_ns"] < _MAX_TIME_NS)
    )
    return sound


def _find_sound_places(positions: Records) -> BoolArray:
    """Rows of the table of communicators that can be true; ``left`` may be of a later moment than ``entered``."""
    sound: BoolArray = (
        (positions["entered"] <= MAX_SEQ)
        & (positions["rank"] >= 0)
        & (positions["rank"] < positions["n_ranks"])
        & (positions["n_ranks"] <= _MAX_RANKS)
        & (positions["entry_ns"] < _MAX_TIME_NS)
    )
    return sound


def _find_followed(plugin: _PluginProcess, records: Records) -> BoolArray:
    """Records of communicators that are known or can still be followed, shape (n,)."""
    found, which = np.unique(records[["comm", "rank", "n_ranks"]], return_inverse=True)
    is_followed = np.zeros(len(found), bool)
    for i, membership in enumerate(found.tolist()):
        if len(plugin.memberships) < MAX_MEMBERSHIPS:
            plugin.memberships.add(membership)
        is_followed[i] = membership in plugin.memberships
    return is_followed[which]


def _close_rings(plugin: _PluginProcess, names: Sequence[str]) -> None:
    """Close rings, which keep the job's memory as long as they are open, and forget what they lost."""
    for name in names:
        ring = plugin.rings.pop(name)
        plugin.n_lost -= ring.counts.n_lost
        plugin.n_unplaced -= ring.counts.n_unplaced
        ring.close()


def _note_starts(plugin: _PluginProcess, records: Records) -> None:
    ops = np.where(np.isin(records["op"], _OPS), records["op"], 0)
    kinds = np.stack([records["rank"], records["n_ranks"], ops], 1).astype(np.int64)
    for kind in np.unique(kinds, axis=0):
        mine = records["host_start_ns"][(kinds == kind).all(1)].astype(np.int64)
        key = (int(kind[0]), int(kind[1]), int(kind[2]))
        before = plugin.starts.get(key, np.zeros(0, np.int64))
        plugin.starts[key] = np.sort(np.concatenate([before, mine]))[-_MAX_STARTS:]
    if len(plugin.starts) > _MAX_KINDS:
        last_ns = {key: int(starts.max(initial=0)) for key, starts in plugin.starts.items()}
        for key in sorted(last_ns, key=last_ns.__getitem__)[:-_MAX_KINDS]:
            del plugin.starts[key]


def _note_positions(plugin: _PluginProcess, positions: Records) -> None:
    """Take the table of communicators; one that is gone is forgotten."""
    now: dict[str, CommPosition] = {}
    for row in positions[positions["entered"] > 0]:
        name, entered, entry_ns = (
            f"{int(row['comm']):016x}",
            int(row["entered"]),
            int(row["entry_ns"]),
        )
        before = plugin.positions.get(name)
        pace = Pace() if before is None else before.pace
        if before is not None:
            pace.add(entry_ns - before.entry_ns, entered - before.entered)
        now[name] = CommPosition(
            int(row["rank"]),
            int(row["n_ranks"]),
            entered,
            min(int(row["left"]), entered) or None,
            entry_ns,
            CollectiveOp(int(row["op"]) if row["op"] in _OPS else 0),
            pace,
        )
    plugin.positions = now


def _finish(pid: int, plugin: _PluginProcess, mono_ns: int) -> list[Finished]:
    """Rows of COLLECTIVE_OP of what ended long enough ago that nothing older is still to come."""
    is_due = (plugin.pending["host_seen_ns"] <= mono_ns - SETTLE_NS) | plugin.is_over
    if not is_due.any():
        return []
    due, plugin.pending = plugin.pending[is_due], plugin.pending[~is_due]
    due = due[np.argsort(due["gpu_start_ns"], kind="stable")]
    rows = np.zeros(len(due), ROW)
    rows["entry_ns"] = rows["exit_ns"] = due["gpu_start_ns"]
    rows["leave_ns"] = due["gpu_stop_ns"]
    own_ns, plugin.free_ns = own_times(rows, plugin.free_ns)
    ops = np.zeros(len(due), COLLECTIVE_OP)
    ops["seq"] = due["seq"]
    ops["entry_ns"] = np.maximum(rows["entry_ns"] + plugin.distances.min(), 0)
    ops["inside_ns"] = rows["leave_ns"] - rows["entry_ns"]
    ops["own_ns"] = np.where(own_ns < _MAX_DURATION_NS, own_ns, UNKNOWN_NS)
    ops["n_bytes"] = np.where(
        due["n_bytes"] < _MAX_TIME_NS, due["n_bytes"].astype(np.int64), UNKNOWN_NS
    )
    ops["op"] = np.where(np.isin(due["op"], _OPS), due["op"], 0)
    finished = []
    for comm in np.unique(due["comm"]):
        which = np.flatnonzero(due["comm"] == comm)
        last = due[which[-1]]
        finished.append(
            Finished(
                pid,
                f"{int(comm):016x}",
                int(last["rank"]),
                int(last["n_ranks"]),
                ClockKind.DEVICE,
                ops[which],
            )
        )
    return finished
