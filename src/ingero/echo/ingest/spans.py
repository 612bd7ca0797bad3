"""Trace spans into ``spans``."""

from __future__ import annotations

from typing import Final

from ingero.echo.db.deduplication import stable_hash
from ingero.echo.db.rows import Rows
from ingero.echo.ingest.limits import RefusalReason, Refusals, RefusedRecordError
from ingero.echo.ingest.origin import (
    Origin,
    Origins,
    plausible_ns,
    row_ns,
    to_timestamp,
)
from ingero.echo.schema.tables import SPANS
from ingero.otlp.codec import Export, structs
from ingero.otlp.codec.values import message_attributes, tree_attributes

_STATUSES: Final = ("unset", "ok", "error")


def add_spans(rows: Rows, export: Export, origins: Origins, hint: str, now_ns: int) -> Refusals:
    """Append every span of a traces export that can be kept; the arguments are those of ``add_metrics``."""
    attributes_of = message_attributes if export.is_message else tree_attributes
    refusals = Refusals()
    for entry in export.root.resource_spans:
        origin = origins.read(attributes_of(entry.resource.attributes) if entry.resource else {})
        rows.name_cluster(origin.cluster_id)
        for scope_spans in entry.scope_spans:
            for span in scope_spans.spans:
                try:
                    attributes = attributes_of(span.attributes)
                    _add_span(rows, span, attributes, (origins, origin, hint), now_ns)
                except RefusedRecordError as error:
                    refusals.add(error)
    return refusals


def _add_span(
    rows: Rows,
    span: structs.Proto,
    attributes: dict[str, structs.Value],
    where: tuple[Origins, Origin, str],
    now_ns: int,
) -> None:
    origins, origin, hint = where
    series = origins.series(origin, span.name, attributes, hint)
    rows.clusters.add(series.cluster_id)
    started_ns, ended_ns = span.start_time_unix_nano, span.end_time_unix_nano
    at_ns = row_ns(started_ns)
    row_ns(ended_ns)
    trace_id, span_id = _hex(span.trace_id, 32), _hex(span.span_id, 16)
    parent_id, status = _hex(span.parent_span_id, 16), _status(span.status)
    end_ts = to_timestamp(plausible_ns(ended_ns, now_ns)) if ended_ns else None
    identity = (series.hash, parent_id, ended_ns, status)
    rows.table(SPANS).add(
        stable_hash(series.cluster_id.encode(), trace_id.encode(), span_id.encode()),
        at_ns,
        (
            to_timestamp(plausible_ns(started_ns, now_ns)),
            series.cluster_id,
            series.node_id,
            span.name,
            trace_id,
            span_id,
            parent_id or None,
            end_ts,
            status,
            series.attributes,
        ),
        stable_hash(repr(identity).encode()),
    )
    rows.n_rows += 1


def _hex(identity: bytes | str, n_digits: int) -> str:
    text = identity.hex() if isinstance(identity, bytes) else identity.lower()
    if len(text) > n_digits:
        raise RefusedRecordError(
            RefusalReason.SIZE, f"an id of {len(text)} hexadecimal digits; {n_digits} are taken"
        )
    return text


def _status(status: structs.Proto) -> str:
    code = status.code if status is not None else 0
    return _STATUSES[code] if 0 <= code < len(_STATUSES) else _STATUSES[0]
