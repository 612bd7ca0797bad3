"""Log records into tables: collective batches unpacked, verdicts, incidents and costs by name, the rest as logs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ingero.echo.db.rows import Chunk, Rows
from ingero.echo.ingest.origin import (
    Origin,
    Origins,
    encode_attributes,
    plausible_ns,
    read_origin,
    stable_hash,
    to_timestamp,
)
from ingero.echo.schema import COLLECTIVES, COSTS, INCIDENTS, LOGS, VERDICTS, Table
from ingero.model.collectives import UNKNOWN_NS, CollectiveOp, CollectiveRun
from ingero.wire.collectives import read_collectives
from ingero.wire.names import COLLECTIVE_EVENT, Attribute
from ingero.wire.otlp import Export, LogRow, iter_log_rows

RECORDS: Final[tuple[tuple[str, Table], ...]] = (
    ("verdict", VERDICTS),
    ("incident", INCIDENTS),
    ("episode", INCIDENTS),
    ("cost", COSTS),
)
"""Last word of an event name → table. Attributes go to the column of the same last word."""

_ALIASES: Final = {
    "verdict": ("kind", 1.0),
    "evidence": ("evidence_log10", 1.0),
    "lost_gpu_seconds": ("lost_gpu_ms", 1e-3),
}
"""Columns whose attribute has another last word, and what its value is multiplied with."""

_NODE: Final = str(Attribute.NODE_ID)
_OP_NAMES: Final = pa.array([op.name.lower() for op in CollectiveOp])
_SEVERITIES: Final = ((21, "critical"), (17, "error"), (13, "warn"), (9, "info"), (5, "debug"))
_INT32: Final = 2**31
_INT64: Final = 2**63


def add_logs(rows: Rows, export: Export, origins: Origins, hint: str, now_ns: int) -> int:
    """Append every record of a logs export.

    Args:
        rows: Where to.
        export: The request.
        origins: This thread's caches.
        hint: Cluster that the request named, or empty.
        now_ns: Arrival, for records without a plausible time.

    Returns:
        Collective batches that could not be read; the sender is told by a partial success.
    """
    resource, origin = None, None
    batch_ns = 0
    for record in iter_log_rows(export):
        if record.event_name == COLLECTIVE_EVENT:
            batch_ns = max(batch_ns, record.time_unix_nano)
            continue
        if origin is None or record.resource is not resource:
            resource, origin = record.resource, read_origin(record.resource)
        table = _find_table(record.event_name)
        if table is LOGS:
            _add_log(rows, record, (origins, origin, hint), now_ns)
        else:
            _add_record(rows, table, record, (origins, origin, hint), now_ns)
    if not batch_ns:
        return 0
    read = read_collectives(export)
    for run in read.runs:
        _add_run(rows, run, plausible_ns(batch_ns, now_ns))
    return read.n_refused


def _find_table(event_name: str) -> Table:
    word = event_name.rpartition(".")[2]
    for name, table in RECORDS:
        if word == name:
            return table
    return LOGS


def _add_log(rows: Rows, record: LogRow, where: tuple[Origins, Origin, str], now_ns: int) -> None:
    origins, origin, hint = where
    series = origins.series(origin, record.event_name, record.attributes, hint)
    body = _text_of(record.body)
    rows.table(LOGS).add(
        stable_hash(series.hash.to_bytes(8, "little"), body.encode()),
        record.time_unix_nano or now_ns,
        (
            to_timestamp(plausible_ns(record.time_unix_nano, now_ns)),
            series.cluster_id,
            series.node_id,
            record.event_name or None,
            _severity(record),
            body,
            series.attributes,
        ),
    )
    rows.n_rows += 1


def _add_record(
    rows: Rows,
    table: Table,
    record: LogRow,
    where: tuple[Origins, Origin, str],
    now_ns: int,
) -> None:
    origins, origin, hint = where
    series = origins.series(origin, record.event_name, record.attributes, hint)
    named = {name.rpartition(".")[2]: value for name, value in record.attributes.items()}
    named.setdefault("summary", _text_of(record.body) or None)
    named.setdefault("severity", _severity(record))
    known: dict[str, Any] = {
        "ts": to_timestamp(plausible_ns(record.time_unix_nano, now_ns)),
        "cluster_id": series.cluster_id,
        "node_id": _text(record.attributes.get(_NODE))
        or _text(named.get("node_id"))
        or series.node_id,
        "attributes": series.attributes,
    }
    values = [
        known[name] if name in known else _READERS[dtype](_find(named, name, dtype))
        for name, dtype in table.columns
    ]
    rows.table(table).add(
        stable_hash(series.hash.to_bytes(8, "little"), _text_of(record.body).encode()),
        record.time_unix_nano or now_ns,
        values,
    )
    rows.n_rows += 1


def _find(named: Mapping[str, Any], column: str, dtype: pa.DataType) -> object:
    if dtype == pa.timestamp("us"):
        stem = column.removesuffix("_ts")
        return named.get(column, named.get(f"{stem}_ns", named.get(f"{stem}_wall_ns")))
    if column in named or column not in _ALIASES:
        return named.get(column)
    alias, factor = _ALIASES[column]
    value = named.get(alias)
    return value * factor if isinstance(value, float) else value


def _add_run(rows: Rows, run: CollectiveRun, at_ns: int) -> None:
    ops, rank = run.ops, run.rank
    n_ops = len(ops)
    if not n_ops:
        return
    same = {
        "ts": to_timestamp(at_ns),
        "cluster_id": rank.cluster_id,
        "node_id": rank.node_id,
        "rank": rank.rank if rank.rank >= 0 else None,
        "comm": run.comm,
        "comm_rank": run.comm_rank,
        "n_ranks": run.n_ranks,
        "n_gpus": rank.n_gpus,
        "clock": run.clock.name.lower(),
        "labels": encode_attributes(dict(rank.labels)),
    }
    arrays = []
    for name, dtype in COLLECTIVES.columns:
        if name in same:
            arrays.append(pa.repeat(pa.scalar(same[name], type=dtype), n_ops))
        elif name == "op":
            arrays.append(_OP_NAMES.take(pa.array(ops["op"])))
        elif name == "seq":
            arrays.append(pa.array(np.ascontiguousarray(ops["seq"])))
        else:
            values = np.ascontiguousarray(ops[name])
            arrays.append(pa.array(values, mask=values == UNKNOWN_NS))
    series = stable_hash(
        rank.cluster_id.encode(), rank.node_id.encode(), str(rank.rank).encode(), run.comm.encode()
    )
    mixed = ops["seq"].astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed += ops["entry_ns"].astype(np.uint64)
    rows.table(COLLECTIVES).chunks.append(
        Chunk(
            pa.RecordBatch.from_arrays(arrays, names=list(COLLECTIVES.names)),
            np.full(n_ops, series, dtype=np.uint64),
            mixed.view(np.int64),
        )
    )
    rows.n_rows += n_ops


def _severity(record: LogRow) -> str | None:
    for least, name in _SEVERITIES:
        if record.severity_number >= least:
            return name
    return record.severity_text.lower() or None


def _text_of(body: object) -> str:
    if body is None:
        return ""
    return body if isinstance(body, str) else encode_attributes({"body": body})


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def _small(value: object) -> int | None:
    return value if isinstance(value, int) and -_INT32 <= value < _INT32 else None


def _large(value: object) -> int | None:
    return value if isinstance(value, int) and -_INT64 <= value < _INT64 else None


def _texts(value: object) -> list[str] | None:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else None


def _moment(value: object) -> object:
    return to_timestamp(value) if isinstance(value, int) and 0 <= value < _INT64 else None


_READERS: Final[dict[pa.DataType, Callable[[object], object]]] = {
    pa.string(): _text,
    pa.float64(): _number,
    pa.int32(): _small,
    pa.int64(): _large,
    pa.timestamp("us"): _moment,
    pa.list_(pa.string()): _texts,
}
