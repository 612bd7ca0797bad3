"""Trace spans into ``spans``."""

from __future__ import annotations

from typing import Final

from ingero.echo.db.rows import Rows
from ingero.echo.ingest.origin import Origins, plausible_ns, read_origin, stable_hash, to_timestamp
from ingero.echo.schema import SPANS
from ingero.wire.otlp import Export, structs
from ingero.wire.otlp.push import message_attributes, tree_attributes

_STATUSES: Final = ("unset", "ok", "error")


def add_spans(rows: Rows, export: Export, origins: Origins, hint: str, now_ns: int) -> None:
    """Append every span of a traces export; the arguments are those of ``add_metrics``."""
    attributes_of = message_attributes if export.is_message else tree_attributes
    for entry in export.root.resource_spans:
        origin = read_origin(attributes_of(entry.resource.attributes) if entry.resource else {})
        for scope_spans in entry.scope_spans:
            for span in scope_spans.spans:
                series = origins.series(origin, span.name, attributes_of(span.attributes), hint)
                started_ns, ended_ns = span.start_time_unix_nano, span.end_time_unix_nano
                ids = _hex(span.trace_id), _hex(span.span_id)
                rows.table(SPANS).add(
                    stable_hash(*(one.encode() for one in ids)),
                    started_ns or now_ns,
                    (
                        to_timestamp(plausible_ns(started_ns, now_ns)),
                        series.cluster_id,
                        series.node_id,
                        span.name,
                        *ids,
                        _hex(span.parent_span_id) or None,
                        to_timestamp(plausible_ns(ended_ns, now_ns)) if ended_ns else None,
                        _status(span.status),
                        series.attributes,
                    ),
                )
                rows.n_rows += 1


def _hex(identity: bytes | str) -> str:
    return identity.hex() if isinstance(identity, bytes) else identity.lower()


def _status(status: structs.Proto) -> str:
    code = status.code if status is not None else 0
    return _STATUSES[code] if 0 <= code < len(_STATUSES) else _STATUSES[0]
