"""Exact counts of a trace, once a second.

They are read from the kernel, compared with the second before, kept past the end of a process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from ingero.agent.capture.full_tables import FullTables
from ingero.agent.capture.kernel.abi import N_COPY_KINDS, get_dtype
from ingero.agent.capture.probes.engine import Engine
from ingero.agent.capture.probes.sampling import SamplingControl
from ingero.model.arrays import Records
from ingero.model.recording import Unprobed

MAX_ROWS: Final = 4096
NOBODY: Final = 0
"""The pid under which processes are added up when there are too many to keep apart."""
_LOWEST: Final = frozenset({"min_ns"})
_HIGHEST: Final = frozenset({"max_ns"})


class RetiredCounts:
    """Exact counts of ended processes, apart as long as they are few.

    Args:
        most_rows: Rows kept apart; beyond that all so far are added up by operation under pid 0.
    """

    def __init__(self, most_rows: int = MAX_ROWS) -> None:
        self._most_rows = most_rows
        self.keys: Records = np.empty(0, get_dtype("count_key"))
        self.counts: Records = np.empty(0, get_dtype("count"))

    def add(self, pids: Collection[int], keys: Records, counts: Records) -> None:
        """Keep the rows of these processes."""
        is_theirs = np.isin(keys["pid"], np.fromiter(pids, np.uint32))
        self.keys = np.concatenate([self.keys, keys[is_theirs]])
        self.counts = np.concatenate([self.counts, counts[is_theirs]])
        if len(self.keys) > self._most_rows:
            self._fold()

    def _fold(self) -> None:
        operations = self.keys["source"].astype(np.int64) << 16 | self.keys["op"]
        _, first, row = np.unique(operations, return_index=True, return_inverse=True)
        counts = np.zeros(len(first), self.counts.dtype)
        for name in self.counts.dtype.names or ():
            values = self.counts[name]
            if name in _LOWEST:
                never = np.iinfo(np.uint64).max
                lowest = np.full(len(first), never)
                np.minimum.at(lowest, row, np.where(values == 0, never, values))
                counts[name] = np.where(lowest == never, 0, lowest)
            else:
                combine = np.maximum if name in _HIGHEST else np.add
                total = np.zeros_like(counts[name])
                combine.at(total, row, values)
                counts[name] = total
        self.keys, self.counts = self.keys[first].copy(), counts
        self.keys["pid"] = NOBODY


_NOT_SUMS: Final = frozenset({
    "min_ns",
    "max_ns",
    "pending",
    "window",
    "n_kept",
    "n_stacks",
    "reserved",
})


@dataclass(frozen=True, slots=True)
class Totals:
    """Exact counts so far, once a second and once at the end.

    Attributes:
        mono_ns: When.
        wall_ns: When.
        elapsed_ns: Since tracing began.
        keys: Process, source and operation; shape (n,).
        counts: ``struct ig_count`` since tracing began; shape (n,).
        changes: The same since the previous totals.
        losses: Losses that belong to no operation.
        in_flight: Calls that have not returned.
        keep_one_in: The sampling now.
        is_last: Whether tracing is over.
        ended_keys: As ``keys``, of processes that ended; pid 0 stands for many.
        ended_counts: As ``counts``, of processes that ended.
        copies: ``struct ig_count`` of copies since tracing began, by `CopyKind`.
        unwinding: How the native frames of stacks were found, by ``struct ig_unwinding``.
        unprobed: Libraries whose calls are missing from all of this.
        probe_mode: How library functions are probed.
    """

    mono_ns: int
    wall_ns: int
    elapsed_ns: int
    keys: Records
    counts: Records
    changes: Records
    losses: dict[str, int]
    in_flight: Records
    keep_one_in: int
    is_last: bool = False
    ended_keys: Records = field(default_factory=lambda: RetiredCounts().keys)
    ended_counts: Records = field(default_factory=lambda: RetiredCounts().counts)
    copies: Records = field(default_factory=lambda: np.zeros(N_COPY_KINDS, get_dtype("count")))
    unwinding: dict[str, int] = field(default_factory=dict)
    unprobed: tuple[Unprobed, ...] = ()
    probe_mode: str = ""

    @property
    def all_keys(self) -> Records:
        """Keys of the living and the ended; one may occur twice when a pid was used again."""
        return np.concatenate([self.keys, self.ended_keys])

    @property
    def all_counts(self) -> Records:
        """Counts of the living and the ended."""
        return np.concatenate([self.counts, self.ended_counts])


@dataclass(frozen=True, slots=True)
class Times:
    """When totals are read.

    Attributes:
        mono_ns: Now, on the monotonic clock.
        started_ns: When tracing began, on the same clock.
        offset_ns: Wall clock minus monotonic clock.
    """

    mono_ns: int
    started_ns: int
    offset_ns: int


class CountReader:
    """Reads the counts of an engine and sets its sampling by what was lost.

    Args:
        engine: The probes.
        keep_one_in: A fixed sampling of the kinds that are sampled; 0 adapts to loss.
    """

    def __init__(self, engine: Engine, keep_one_in: int) -> None:
        self._engine = engine
        self._sampling = SamplingControl(keep_one_in)
        self._ended = RetiredCounts()
        self._previous: dict[bytes, Records] = {}
        self._n_lost = 0
        self._full = FullTables()
        self._notes: deque[str] = deque()
        engine.control.set_keep_one_in(self._sampling.keep_one_in)

    def build(
        self,
        rows: tuple[Records, Records],
        times: Times,
        n_sampled: int,
        unprobed: tuple[Unprobed, ...],
        *,
        is_last: bool,
    ) -> Totals:
        """Totals of this moment; ends a round of the sampling.

        Args:
            rows: Keys and counts, as `KernelState.read_counts` gives them.
            times: When.
            n_sampled: Records of sampled kinds since the round before.
            unprobed: Libraries whose calls are missing.
            is_last: Whether tracing is over.
        """
        keys, counts = rows
        n_lost = int(counts["lost"].sum())
        changes = self._find_changes(keys, counts)
        keep_one_in = self.sample(n_sampled, max(n_lost - self._n_lost, 0))
        self._n_lost = n_lost
        losses = self._engine.state.read_losses()
        self._notes.extend(self._full.iter_new(losses))
        return Totals(
            mono_ns=times.mono_ns,
            wall_ns=times.mono_ns + times.offset_ns,
            elapsed_ns=times.mono_ns - times.started_ns,
            keys=keys,
            counts=counts,
            changes=changes,
            losses=losses,
            unwinding=self._engine.state.read_unwinding(),
            in_flight=self._engine.state.read_in_flight(),
            keep_one_in=keep_one_in,
            is_last=is_last,
            ended_keys=self._ended.keys,
            ended_counts=self._ended.counts,
            copies=self._engine.state.read_copies(),
            unprobed=unprobed,
            probe_mode=self._engine.mode.value,
        )

    def pop_notes(self) -> Iterator[str]:
        """Sentences about tables of the kernel's side that are full, since the last time."""
        while self._notes:
            yield self._notes.popleft()

    def sample(self, n_sampled: int, n_lost: int = 0) -> int:
        """End a round of the sampling; the new setting."""
        fill = max((ring.fill() for ring in self._engine.rings.values()), default=0.0)
        keep_one_in = self._sampling.update(n_lost, fill, n_sampled)
        if keep_one_in != self._engine.control.keep_one_in:
            self._engine.control.set_keep_one_in(keep_one_in)
        return keep_one_in

    def forget(self, pids: Collection[int], keys: Records, counts: Records) -> None:
        """Make room: processes that ended a second ago cannot count any more, and their pids may be used again."""
        self._ended.add(pids, keys, counts)
        self._engine.state.forget(pids)
        is_theirs = np.isin(keys["pid"], np.fromiter(pids, np.uint32))
        for key in compress(_read_names(keys), is_theirs):
            self._previous.pop(key, None)

    def _find_changes(self, keys: Records, counts: Records) -> Records:
        """Counts since the last time; extremes stay those of the whole trace."""
        changes = counts.copy()
        names = _read_names(keys)
        for i, key in enumerate(names):
            before = self._previous.get(key)
            if before is None:
                continue
            for name in changes.dtype.names or ():
                if name not in _NOT_SUMS:
                    changes[name][i] -= before[name]
        self._previous = dict(zip(names, counts, strict=True))
        return changes


def _read_names(keys: Records) -> list[bytes]:
    """Keys as plain bytes, with what lies between their fields."""
    return [key.tobytes() for key in keys.view(f"V{keys.dtype.itemsize}")]


def count_coverage(counts: Records) -> dict[str, int]:
    """What became of all calls: ``seen = emitted + sampled + lost``."""
    names = ("entered", "seen", "emitted", "sampled", "lost")
    return {name: int(np.sum(counts[name], dtype=np.uint64)) for name in names}
