"""Reading how much of a request an OTLP destination refused while taking the rest.

Source: OTLP specification 1.x, "Partial Success": the request is not to be sent again.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from google.protobuf.message import Message

from ingero.telemetry.declare import counter

REJECTED: Final = counter(
    "ingero_fleet_exporter_rejected_items_total",
    "Items that the destination refused in a partial success; they are lost.",
    "exporter",
)
_FIELDS: Final = ("rejected_data_points", "rejected_log_records", "rejected_spans")


class _Partial(msgspec.Struct, rename="camel"):
    rejected_data_points: int = 0
    rejected_log_records: int = 0
    rejected_spans: int = 0


class _Answer(msgspec.Struct, rename="camel"):
    partial_success: _Partial | None = None


_DECODER: Final = msgspec.json.Decoder(_Answer, strict=False)


def count_rejected_message(answer: Message) -> int:
    """Items refused according to an ``Export…ServiceResponse``."""
    partial: Any = getattr(answer, "partial_success")  # noqa: B009 -- generated messages have no typed fields here
    names = set(partial.DESCRIPTOR.fields_by_name)
    return sum(int(getattr(partial, name)) for name in _FIELDS if name in names)


def count_rejected_json(body: bytes) -> int:
    """Items refused according to a JSON answer; one that cannot be read counts as none."""
    try:
        partial = _DECODER.decode(body).partial_success if body else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
    if partial is None:
        return 0
    return partial.rejected_data_points + partial.rejected_log_records + partial.rejected_spans
