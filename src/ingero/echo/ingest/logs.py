"""Log records into tables: collective batches unpacked, conclusions in tables of their own, the rest as logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from ingero.echo.db.deduplication import Keys, mix, stable_hash
from ingero.echo.db.rows import Chunk, Rows
from ingero.echo.db.stored_records import hash_record_uid
from ingero.echo.ingest.limits import RefusalReason, Refusals, RefusedRecordError
from ingero.echo.ingest.origin import (
    Origin,
    Origins,
    OriginSeries,
    check_who,
    encode_attributes,
    plausible_ns,
    row_ns,
    to_timestamp,
)
from ingero.echo.ingest.records import read_record
from ingero.echo.schema.tables import COLLECTIVES, LOGS, Table
from ingero.model.arrays import Records
from ingero.model.collectives import UNKNOWN_NS, CollectiveOp, CollectiveRun
from ingero.otlp.codec import Export, LogRow, iter_log_entries
from ingero.wire.collectives import CollectiveRead
from ingero.wire.log_records import LogSeverity
from ingero.wire.names import COLLECTIVE_EVENT
from ingero.wire.record_uids import read_record_uid

_OP_NAMES: Final = pa.array([op.name.lower() for op in CollectiveOp])
_SEVERITIES: Final = (
    (LogSeverity.FATAL, "critical"),
    (LogSeverity.ERROR, "error"),
    (LogSeverity.WARN, "warn"),
    (LogSeverity.INFO, "info"),
    (LogSeverity.DEBUG, "debug"),
)
_Where = tuple[Origins, Origin, str]


def add_logs(rows: Rows, export: Export, origins: Origins, hint: str, now_ns: int) -> Refusals:
    """Append every record of a logs export that can be kept.

    Args:
        rows: Where to.
        export: The request.
        origins: The caches.
        hint: Cluster that the request named, or empty.
        now_ns: Arrival, for records without a plausible time.

    Returns:
        The records that were not appended.
    """
    refusals, collectives = Refusals(), CollectiveRead()
    resource, origin = None, None
    for entry in iter_log_entries(export):
        if origin is None or entry.resource is not resource:
            resource, origin = entry.resource, origins.read(entry.resource)
            rows.name_cluster(origin.cluster_id)
        if entry.event_name == COLLECTIVE_EVENT:
            collectives.add(entry)
            continue
        try:
            _add_record(rows, entry.read_row(), (origins, origin, hint), now_ns)
        except RefusedRecordError as error:
            refusals.add(error)
    _add_runs(rows, collectives, (origins, refusals), now_ns)
    return refusals


def _add_record(rows: Rows, record: LogRow, where: _Where, now_ns: int) -> None:
    origins, origin, hint = where
    limits = origins.limits
    limits.check_name(record.severity_text, "severity")
    body = _text_of(record.body)
    if len(body) > limits.record_bytes:
        raise RefusedRecordError(
            RefusalReason.SIZE, f"a body of {len(body)} characters; {limits.record_bytes} are taken"
        )
    series = origins.series(origin, record.event_name, record.attributes, hint, limits.record_bytes)
    rows.clusters.add(series.cluster_id)
    typed = read_record(record)
    table = LOGS if typed is None else typed[0]
    values = (
        _log_values(record, series, body, now_ns)
        if typed is None
        else _record_values(typed, record, series, body, now_ns)
    )
    check_who(series.cluster_id, values[2], limits)
    rows.table(table).add(
        stable_hash(series.hash.to_bytes(8, "little"), body.encode()),
        row_ns(record.time_unix_nano),
        values,
        stable_hash((_severity(record) or "").encode()),
        _hash_uid(series.cluster_id, record),
    )
    rows.n_rows += 1


def _hash_uid(cluster_id: str, record: LogRow) -> int:
    """Of the record's id; 0 where it has none."""
    uid = read_record_uid(record.attributes)
    return hash_record_uid(cluster_id, uid) if uid else 0


def _add_runs(
    rows: Rows, read: CollectiveRead, where: tuple[Origins, Refusals], now_ns: int
) -> None:
    origins, refusals = where
    if read.n_refused:
        description = f"a collective batch that cannot be read: {read.first_problem}"
        refusals.add_many(RefusalReason.BATCH, read.n_refused, description)
    for run, late_ns, pushed_ns in zip(read.runs, read.late_ns, read.pushed_ns, strict=True):
        rows.clusters.add(run.rank.cluster_id)
        try:
            check_who(run.rank.cluster_id, run.rank.node_id, origins.limits)
        except RefusedRecordError as error:
            refusals.add(error)
        else:
            _add_run(rows, run, plausible_ns(plausible_ns(pushed_ns, now_ns) - late_ns, now_ns))


def _log_values(record: LogRow, series: OriginSeries, body: str, now_ns: int) -> Sequence[Any]:
    return (
        to_timestamp(plausible_ns(record.time_unix_nano, now_ns)),
        series.cluster_id,
        series.node_id,
        record.event_name or None,
        _severity(record),
        body,
        series.attributes,
    )


def _record_values(
    typed: tuple[Table, Mapping[str, Any]],
    record: LogRow,
    series: OriginSeries,
    body: str,
    now_ns: int,
) -> Sequence[Any]:
    table, values = typed
    own = {
        "ts": to_timestamp(plausible_ns(record.time_unix_nano, now_ns)),
        "cluster_id": series.cluster_id,
        "attributes": series.attributes,
    }
    defaults = {
        "node_id": series.node_id,
        "summary": body or None,
        "severity": _severity(record),
    }
    return [
        own[name] if name in own else defaults.get(name) if values[name] is None else values[name]
        for name in table.names
    ]


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
            _content(ops),
        )
    )
    rows.n_rows += n_ops


def _content(ops: Records) -> Keys:
    """Hash of what an operation's row says beside its identity, shape (n,)."""
    content = np.zeros(len(ops), dtype=np.uint64)
    for name in ("inside_ns", "own_ns", "n_bytes", "op"):
        content = mix(content + ops[name].astype(np.int64).view(np.uint64))
    return content


def _severity(record: LogRow) -> str | None:
    for least, name in _SEVERITIES:
        if record.severity_number >= least:
            return name
    return record.severity_text.lower() or None


def _text_of(body: object) -> str:
    if body is None:
        return ""
    return body if isinstance(body, str) else encode_attributes({"body": body})
