"""`UsageLedger`: who had how much kept, and how much each cluster has stored. The writer's thread alone changes it.

Rows are counted when they are durable and written to the table ``usage`` every few minutes. What was stored since the
last entry when a process was killed is counted from the tables themselves at the next start, without the bearer.

Nodes are replaced and not added, so what they take is summed up from their table, a row for each, and has no entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingero.echo.db.deduplication import Keys, mix
from ingero.echo.db.reader import Reader
from ingero.echo.db.retention import Horizon
from ingero.echo.db.rows import Incoming, NodeKey
from ingero.echo.schema.tables import NODES, SENT, TEXT, USAGE, Table
from ingero.model.arrays import IntArray

_INDEX_BITS: Final = 11
_N_REGISTERS: Final = 1 << _INDEX_BITS
_REST_BITS: Final = 52
"""Bits of a hash that a 64-bit float holds exactly, of those that do not choose the register."""
_ALPHA: Final = 0.7213 / (1 + 1.079 / _N_REGISTERS)
_MAX_TALLIES: Final = 4096
_US_OF_DAY: Final = 86_400_000_000
_STAMP_BYTES: Final = 8

Ages = Mapping[str, Horizon]
"""By table, which arrivals are gone; a table that keeps its rows is not in it."""


class SeriesSketch:
    """About how many different hashes were added: a HyperLogLog of 2 KiB, off by 2.3 % in the mean.

    Source: Flajolet, Fusy, Gandouet and Meunier 2007, figure 3, with 64-bit hashes, for which the correction of large
    counts is not needed.
    """

    def __init__(self) -> None:
        self._registers: npt.NDArray[np.uint8] = np.zeros(_N_REGISTERS, dtype=np.uint8)

    def add(self, hashes: Keys) -> None:
        """Add hashes that are spread over all 64 bits, shape (n,)."""
        rest = (hashes & np.uint64((1 << _REST_BITS) - 1)).astype(np.float64)
        leading = (_REST_BITS + 1 - np.frexp(rest)[1]).astype(np.uint8)
        places = (hashes >> np.uint64(64 - _INDEX_BITS)).astype(np.intp)
        np.maximum.at(self._registers, places, leading)

    def count(self) -> int:
        """About how many."""
        estimate = _ALPHA * _N_REGISTERS**2 / float(np.exp2(-self._registers.astype(float)).sum())
        n_empty = int((self._registers == 0).sum())
        if estimate <= 2.5 * _N_REGISTERS and n_empty:
            estimate = _N_REGISTERS * float(np.log(_N_REGISTERS / n_empty))
        return round(estimate)


@dataclass(slots=True)
class _Tally:
    n_rows: int = 0
    n_bytes: int = 0
    series: SeriesSketch = field(default_factory=SeriesSketch)


class UsageLedger:
    """Counts rows, the bytes of their values and series by cluster, bearer and table.

    Attributes:
        rows_of_bearer: Rows that each bearer had kept since the start, by its label.
    """

    def __init__(self) -> None:
        self.rows_of_bearer: Counter[str] = Counter()
        self._tallies: dict[tuple[str, str, str], _Tally] = {}
        self._since: datetime | None = None
        self._written: Mapping[str, int] = {}
        self._pending: Counter[str] = Counter()
        self._node_bytes: dict[NodeKey, int] = {}
        self._n_stored_bytes = 0

    @property
    def is_full(self) -> bool:
        """So many tallies are held that they should be written."""
        return len(self._tallies) >= _MAX_TALLIES

    def find_stored_bytes(self, clusters: frozenset[str] | None) -> int:
        """Bytes of the values that these clusters, or all of them, have stored. Any thread."""
        if clusters is None:
            return self._n_stored_bytes
        written, pending = self._written, self._pending
        return sum(written.get(name, 0) + pending.get(name, 0) for name in clusters)

    def add(self, incoming: Incoming, bearers: Sequence[str], now: datetime) -> None:
        """Count rows that are durable.

        Args:
            incoming: The rows.
            bearers: By request, who sent it.
            now: Their arrival.
        """
        self._since = self._since or now
        column = incoming.batch.column("cluster_id").combine_chunks().dictionary_encode()
        clusters: list[str] = column.dictionary.to_pylist()
        names, bearer_of = np.unique(np.array(bearers), return_inverse=True)
        codes = column.indices.to_numpy() * len(names) + bearer_of[incoming.owner_idx]
        sizes = measure_rows(incoming.batch)
        hashes = mix(incoming.series.copy())
        n_rows = np.bincount(codes, minlength=len(clusters) * len(names))
        n_bytes = np.bincount(codes, weights=sizes, minlength=len(n_rows))
        for code in np.flatnonzero(n_rows).tolist():
            cluster, bearer = clusters[code // len(names)], str(names[code % len(names)])
            tally = self._tallies.setdefault((cluster, bearer, incoming.table.name), _Tally())
            tally.n_rows += int(n_rows[code])
            tally.n_bytes += int(n_bytes[code])
            is_all = n_rows[code] == len(codes)
            tally.series.add(hashes if is_all else hashes[codes == code])
            self.rows_of_bearer[bearer] += int(n_rows[code])
            self._pending[cluster] += int(n_bytes[code])
            self._n_stored_bytes += int(n_bytes[code])

    def add_nodes(self, nodes: pa.Table) -> None:
        """Count what nodes said, until the next `refresh` beside what is stored of them.

        Args:
            nodes: Durable rows of NODES, with ``ingested_at``.
        """
        keys = zip(
            *(nodes.column(name).to_pylist() for name in ("cluster_id", "node_id")), strict=True
        )
        for key, n_bytes in zip(keys, measure_rows(nodes).tolist(), strict=True):
            n_more = n_bytes - self._node_bytes.get(key, 0)
            self._node_bytes[key] = n_bytes
            self._pending[key[0]] += n_more
            self._n_stored_bytes += n_more

    def build(self, now: datetime) -> Incoming | None:
        """What was counted since the last entry, as rows of ``usage``; None where nothing was."""
        rows = [
            (self._since, cluster, "", bearer, table, tally.n_rows, tally.n_bytes, n_series)
            for (cluster, bearer, table), tally in self._tallies.items()
            for n_series in (tally.series.count(),)
        ]
        return _build_entries(rows, [now] * len(rows)) if rows else None

    def forget(self) -> None:
        """What `build` gave is written."""
        self._tallies.clear()
        self._since = None

    def refresh(self, reader: Reader, gone_before: Ages) -> None:
        """Sum up what is stored, without what retention has deleted.

        Raises:
            StoreError: The table could not be read.
        """
        conditions: list[str] = []
        params: list[Any] = []
        for table in SENT:
            horizon = gone_before.get(table.name)
            conditions.append("of_table = ?" + (f" AND NOT {Horizon.CONDITION}" if horizon else ""))
            params += [table.name, *(horizon.params if horizon else ())]
        where = " OR ".join(f"({condition})" for condition in conditions)
        sql = f"SELECT cluster_id, sum(n_bytes) FROM usage WHERE {where} GROUP BY cluster_id"  # noqa: S608
        of_nodes = f"SELECT cluster_id, sum({_build_size(NODES)}) FROM nodes GROUP BY cluster_id"  # noqa: S608
        written: Counter[str] = Counter()
        for cluster, n_bytes in (*reader.rows(sql, params), *reader.rows(of_nodes)):
            written[str(cluster)] += int(n_bytes)
        pending: Counter[str] = Counter()
        for (cluster, _, _), tally in self._tallies.items():
            pending[cluster] += tally.n_bytes
        self._written, self._pending, self._node_bytes = written, pending, {}
        self._n_stored_bytes = written.total() + pending.total()


def find_uncounted(reader: Reader) -> Incoming | None:
    """Entries for what the tables have and ``usage`` does not: what a killed process, or an older release, stored.

    Raises:
        StoreError: They could not be read.
    """
    first = datetime(1970, 1, 1)  # noqa: DTZ001 - naive UTC, as the store has it
    ((last,),) = reader.rows("SELECT max(ingested_at) FROM usage")
    rows: list[tuple[Any, ...]] = []
    arrivals: list[datetime] = []
    for table in SENT:
        sql = (
            "SELECT cluster_id, min(ingested_at), max(ingested_at), count(*), "  # noqa: S608 - our names
            f"sum({_build_size(table)}) FROM {table.name} WHERE ingested_at > ? "
            f"GROUP BY cluster_id, epoch_us(ingested_at) // {_US_OF_DAY}"
        )
        for cluster, begin, end, n_rows, n_bytes in reader.rows(sql, [last or first]):
            rows.append((begin, cluster, "", "", table.name, int(n_rows), int(n_bytes), None))
            arrivals.append(end)
    return _build_entries(rows, arrivals) if rows else None


def find_newest_arrival(reader: Reader) -> datetime | None:
    """When the newest row arrived, UTC without a zone; None without rows.

    Raises:
        StoreError: The tables could not be read.
    """
    parts = " UNION ALL ".join(
        f"SELECT max(ingested_at) AS arrival FROM {table.name}"  # noqa: S608 - our names
        for table in SENT
    )
    newest: datetime | None
    (newest,) = reader.row(f"SELECT max(arrival) FROM ({parts})")  # noqa: S608
    return None if newest is None else newest.replace(tzinfo=None)


def measure_rows(batch: pa.Table) -> IntArray:
    """Bytes of each row's values, shape (n,): eight for each number and time, a text's length, eight an element."""
    fixed = 0
    sizes: IntArray = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        if pa.types.is_string(column.type):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy()
        elif pa.types.is_list(column.type):
            sizes += pc.fill_null(pc.list_value_length(column), 0).to_numpy() * 8
        else:
            fixed += 8
    return sizes + fixed


def _build_size(table: Table) -> str:
    """The SQL of `measure_rows`."""
    parts = [str(_STAMP_BYTES)]
    for name, dtype in table.columns:
        if dtype == TEXT:
            parts.append(f"coalesce(strlen({name}), 0)")
        elif pa.types.is_list(dtype):
            parts.append(f"8 * coalesce(len({name}), 0)")
        else:
            parts.append("8")
    return " + ".join(parts)


def _build_entries(rows: Iterable[tuple[Any, ...]], arrivals: Sequence[datetime]) -> Incoming:
    columns = list(zip(*rows, strict=True))
    arrays = [
        pa.array(values, type=dtype)
        for values, (_, dtype) in zip(columns, USAGE.columns, strict=True)
    ]
    batch = pa.table(arrays, names=list(USAGE.names))
    stamps = pa.array(arrivals, type=pa.timestamp("us"))
    nothing = np.zeros(len(arrivals), dtype=np.uint64)
    # Nobody sends these rows again, so a key that no other row has is as good as any.
    keys = np.random.default_rng().integers(0, 2**64 - 1, len(arrivals), dtype=np.uint64)
    owners = np.zeros(len(arrivals), dtype=np.int64)
    return Incoming(
        USAGE, batch.append_column("ingested_at", stamps), keys, keys, nothing, owners, nothing
    )
