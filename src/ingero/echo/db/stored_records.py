"""Which log records with an id the database has, however long ago they came.

Keys of rows are remembered for minutes. A Fleet, or a queue on disk, that was cut off for longer sends its records
again as they were, so a record that does not say the present as its time is looked for among the rows of that time. One
that does costs nothing: it came here at most minutes ago, unless its sender's clock is ahead by more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final

import numpy as np
import pyarrow as pa

from ingero.echo.db.backend import DatabaseBackend
from ingero.echo.db.deduplication import stable_hash
from ingero.echo.db.reader import Reader
from ingero.echo.db.rows import Incoming, build_uid_keys
from ingero.model.arrays import BoolArray, IntArray
from ingero.units import NS_PER_S
from ingero.wire.record_uids import RECORD_UID

_READ_NS: Final = 30 * NS_PER_S
_AT_ONCE: Final = 250
"""Records that one statement asks for."""
_PRESENT: Final = timedelta(minutes=1)
_UID: Final = f"""json_extract_string(attributes, '$."{RECORD_UID}"')"""


def hash_record_uid(cluster_id: str, uid: str) -> int:
    """Of a record's id, which is its cluster's own; 64 bits."""
    return stable_hash(cluster_id.encode(), RECORD_UID.encode(), uid.encode())


def drop_stored(
    backend: DatabaseBackend, group: Sequence[Incoming], now: datetime, window: timedelta
) -> tuple[list[Incoming], int]:
    """Leave out the records that the database has.

    Args:
        backend: Open.
        group: Rows whose keys are not remembered.
        now: The arrival clock's time.
        window: How long keys are remembered.

    Returns:
        The rows that are left, and how many are not.

    Raises:
        StoreError: The tables could not be read.
    """
    fresh, n_stored = [], 0
    for incoming in group:
        asked_idx = _find_asked(incoming, now, min(window / 2, _PRESENT))
        if not len(asked_idx):
            fresh.append(incoming)
            continue
        is_new = _find_new(backend, incoming, asked_idx)
        n_stored += len(is_new) - int(is_new.sum())
        if is_new.any():
            fresh.append(incoming.keep(is_new))
    return fresh, n_stored


def _find_asked(incoming: Incoming, now: datetime, present: timedelta) -> IntArray:
    """Which rows have an id and another time than the present."""
    has_uid = incoming.uids != 0
    if not has_uid.any():
        return np.zeros(0, np.int64)
    times = incoming.batch.column("ts").to_numpy()
    is_present = np.abs(times - np.datetime64(now, "us")) <= np.timedelta64(present)
    return np.flatnonzero(has_uid & ~is_present)


def _find_new(backend: DatabaseBackend, incoming: Incoming, asked_idx: IntArray) -> BoolArray:
    """Mask of the rows that are not stored, shape (n,)."""
    asked = incoming.batch.select(["cluster_id", "ts"]).take(pa.array(asked_idx))
    places = sorted(zip(*(column.to_pylist() for column in asked.columns), strict=True))
    with backend.open_reader(_READ_NS) as reader:
        hashes = list(_read_stored(reader, incoming.table.name, places))
    stored = build_uid_keys(np.array(hashes, dtype=np.uint64), backend.secret)
    is_new = np.ones(len(incoming.uids), np.bool_)
    is_new[asked_idx] = ~np.isin(incoming.uids[asked_idx], stored)
    return is_new


def _read_stored(
    reader: Reader, table: str, places: Sequence[tuple[str, datetime]]
) -> Iterator[int]:
    """The hashes of the ids that a table has at times of clusters, which are sorted."""
    for cluster, group in groupby(places, key=lambda place: place[0]):
        times = [moment for _, moment in group]
        for at in range(0, len(times), _AT_ONCE):
            some = times[at : at + _AT_ONCE]
            sql = (
                f"SELECT {_UID} AS uid FROM {table} "  # noqa: S608 - our names
                f"WHERE cluster_id = ? AND ts >= ? AND ts <= ? AND ts IN ({', '.join('?' * len(some))})"
            )
            found = reader.rows(sql, (cluster, some[0], some[-1], *some))
            yield from (hash_record_uid(cluster, uid) for (uid,) in found if uid is not None)
