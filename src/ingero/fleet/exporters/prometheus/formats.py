"""Which exposition format a scraper gets, by its ``Accept``.

Source: RFC 9110, 12.5.1; Prometheus, "Scrape protocol content negotiation".
"""

from __future__ import annotations

from email.message import Message
from enum import StrEnum
from typing import Final

_FAMILY: Final = "io.prometheus.client.MetricFamily"


class ExpositionFormat(StrEnum):
    """The formats; the value is the content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    PROTOBUF = f"application/vnd.google.protobuf; proto={_FAMILY}; encoding=delimited"


def choose_format(accept: str, *, has_open_metrics: bool) -> ExpositionFormat:
    """What a scraper wants most of what there is; text where it wants nothing of it."""
    best, best_weight = ExpositionFormat.TEXT, 0.0
    for part in accept.split(","):
        asked = Message()
        asked["content-type"] = part.strip()
        found = _find_format(asked)
        if found is None or (found is ExpositionFormat.OPEN_METRICS and not has_open_metrics):
            continue
        weight = _read_weight(str(asked.get_param("q", "1")))
        if weight > best_weight:
            best, best_weight = found, weight
    return best


def _find_format(asked: Message) -> ExpositionFormat | None:
    kind = asked.get_content_type()
    if kind == "application/openmetrics-text":
        return ExpositionFormat.OPEN_METRICS
    if kind == "application/vnd.google.protobuf":
        is_known = (
            asked.get_param("proto") == _FAMILY and asked.get_param("encoding") == "delimited"
        )
        return ExpositionFormat.PROTOBUF if is_known else None
    return ExpositionFormat.TEXT if kind in {"text/plain", "text/*", "*/*"} else None


def _read_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0 <= weight <= 1 else 0.0
