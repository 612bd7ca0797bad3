"""What ranks measured over the last while: the matrix behind the live page's heat map.

A column each interval, a byte a rank (`ingero.fleet.component.RankColumn`), so that 10 000 ranks over 50 minutes are
6 MB. Bounded: what would pass `MAX_BYTES` has no rows, and the page says how many are missing.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from ingero.fleet.component import UNKNOWN_LEVEL, RankColumn, RankLevels
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

N_COLUMNS: Final = 600
MAX_BYTES: Final = 64 << 20
"""Of all matrices together: 110 000 ranks."""
_FRESH_NS: Final = 400_000_000
"""How long what was read for one visitor is good enough for another."""
_ROOM: Final = 64
_MAX_FIRST_VERSION: Final = 10**14
"""Rows of a Fleet that ended, or of a cluster that was forgotten, must not have a version of others: each matrix begins
with one at random. Small enough for JavaScript, and for the digits that a query may have."""
_DIGITS: Final = re.compile(r"(\d+)")

Levels = npt.NDArray[np.uint8]


class _Matrix:
    """One measure of one cluster; columns in time, rows in the order of their names."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._rows: dict[str, int] = {}
        self.levels: Levels = np.zeros((0, 0), np.uint8)
        self.walls_s: list[int] = []
        self.n_taken = 0
        self.version = 1 + secrets.randbelow(_MAX_FIRST_VERSION)

    def arrange(self, column: RankColumn, n_free: int) -> tuple[Levels, int]:
        """A column's levels by row, rows added for names that are new; and how many found no room.

        Args:
            column: Names and levels.
            n_free: Rows that may be added.
        """
        new = [name for name in column.names if name not in self._rows]
        taken = new[: max(n_free, 0)]
        if taken or len(self.names) > 2 * len(column.names) + _ROOM:
            self._sort_in(taken, column.names)
        arranged = np.full(len(self.names), UNKNOWN_LEVEL, np.uint8)
        if len(taken) == len(new):
            rows = np.fromiter(map(self._rows.__getitem__, column.names), np.int64)
            arranged[rows] = np.frombuffer(column.levels, np.uint8)
        else:
            for name, level in zip(column.names, column.levels, strict=True):
                if name in self._rows:
                    arranged[self._rows[name]] = level
        return arranged, len(new) - len(taken)

    def put(self, column: Levels, wall_s: int) -> None:
        """Keep an arranged column, and forget the oldest."""
        self.levels = np.vstack([self.levels[-N_COLUMNS + 1 :], column])
        self.walls_s = [*self.walls_s[-N_COLUMNS + 1 :], wall_s]
        self.n_taken += 1

    def _sort_in(self, new: Sequence[str], present: Sequence[str]) -> None:
        """Add rows, and drop those that neither report nor have a level left; the version stays where none is."""
        is_kept = (self.levels != UNKNOWN_LEVEL).any(axis=0)
        is_kept[[self._rows[name] for name in present if name in self._rows]] = True
        if not new and is_kept.all():
            return
        kept = [name for name, keep in zip(self.names, is_kept, strict=True) if keep]
        names = sorted([*kept, *new], key=_natural)
        levels = np.full((len(self.levels), len(names)), UNKNOWN_LEVEL, np.uint8)
        rows = {name: row for row, name in enumerate(names)}
        if kept:
            levels[:, [rows[name] for name in kept]] = self.levels[:, is_kept]
        self.names, self._rows, self.levels = names, rows, levels
        self.version += 1


class HeatHistory:
    """Every measure of every cluster. One thread.

    Args:
        clock: Time.
        interval_ns: Between two calls of `take`.
    """

    def __init__(self, clock: Clock, interval_ns: int) -> None:
        self._clock = clock
        self._interval_ns = interval_ns
        self._matrices: dict[tuple[str, str], _Matrix] = {}
        self._read: dict[str, tuple[int, Mapping[str, RankColumn]]] = {}
        self._n_missing: dict[tuple[str, str], int] = {}

    def take(self, sources: Sequence[RankLevels]) -> None:
        """A column of each measure and cluster; a cluster of which nothing is left is forgotten."""
        wall_s = self._clock.wall_ns() // NS_PER_S
        now = {
            (source.measure.name, cluster_id): column
            for source in sources
            for cluster_id, column in self._read_now(source).items()
        }
        for key in list(self._matrices):
            if key not in now and not (self._matrices[key].levels != UNKNOWN_LEVEL).any():
                del self._matrices[key]
        for key in {**self._matrices, **now}:
            matrix = self._matrices.setdefault(key, _Matrix())
            matrix.put(self._arrange(key, now.get(key, RankColumn((), b""))), wall_s)

    def encode(self, source: RankLevels, cluster_id: str, after: int, version: int) -> bytes:
        """Columns that a client has not, and one of this moment.

        Args:
            source: The measure.
            cluster_id: The cluster.
            after: How many columns had ever been taken when the client asked last.
            version: Of the rows that it has; with another one it gets everything.

        Returns:
            Length of the JSON that follows (u32, little endian), the JSON, then a byte a row for each column.

        Raises:
            KeyError: Nothing is known of the cluster.
        """
        measure, key = source.measure, (source.measure.name, cluster_id)
        column = self._read_now(source).get(cluster_id)
        matrix = self._matrices.get(key)
        if matrix is None and column is None:
            raise KeyError(cluster_id)
        matrix = self._matrices.setdefault(key, _Matrix())
        live = self._arrange(key, column or RankColumn((), b""))
        is_same = version == matrix.version
        n_new = min(max(matrix.n_taken - after, 0) if is_same else N_COLUMNS, len(matrix.walls_s))
        head: dict[str, Any] = {
            **asdict(measure),
            "version": matrix.version,
            "taken": matrix.n_taken,
            "n_columns": N_COLUMNS,
            "column_s": self._interval_ns / NS_PER_S,
            "n_missing": self._n_missing.get(key, 0),
            "walls_s": [
                *matrix.walls_s[len(matrix.walls_s) - n_new :],
                self._clock.wall_ns() // NS_PER_S,
            ],
            "n_rows": len(matrix.names),
        }
        if not is_same:
            head["names"] = matrix.names
        encoded = msgspec.json.encode(head)
        past = matrix.levels[len(matrix.levels) - n_new :].tobytes()
        return struct.pack("<I", len(encoded)) + encoded + past + live.tobytes()

    def _read_now(self, source: RankLevels) -> Mapping[str, RankColumn]:
        now_ns, name = self._clock.mono_ns(), source.measure.name
        at_ns, found = self._read.get(name, (now_ns - _FRESH_NS, {}))
        if now_ns - at_ns >= _FRESH_NS:
            found = source.read_levels()
            self._read[name] = now_ns, found
        return found

    def _arrange(self, key: tuple[str, str], column: RankColumn) -> Levels:
        n_rows = sum(len(matrix.names) for matrix in self._matrices.values())
        free = MAX_BYTES // N_COLUMNS - n_rows
        arranged, self._n_missing[key] = self._matrices[key].arrange(column, free)
        return arranged


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sorts node9 before node10."""
    return [
        (0, int(part)) if part.isascii() and part.isdigit() else (1, part)
        for part in _DIGITS.split(name)
    ]
