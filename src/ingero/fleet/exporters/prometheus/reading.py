"""The two encodings of an export, read the way the intake needs them: without building a row per point.

Below the intake; knows no series. `ingero.otlp.codec.iter_points` reads everything and costs four times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from ingero.otlp.codec import PointKind
from ingero.otlp.codec.structs import Proto, Value
from ingero.otlp.codec.values import message_attributes, message_value, tree_attributes, tree_value


def alias_of(attributes: Mapping[str, Value]) -> str:
    """A text that is equal for equal attributes in the same order, types included; short, since many are kept."""
    return "\x00".join([
        f"{key}\x01{value}" if value.__class__ is str else f"{key}\x02{value!r}"
        for key, value in attributes.items()
    ])


def _message_alias(attributes: Proto, dropped: frozenset[str]) -> str:
    parts = []
    for item in attributes:
        key, value = item.key, item.value
        if key not in dropped:
            text = value.string_value
            parts.append(f"{key}\x01{text}" if text else f"{key}\x02{message_value(value)!r}")
    return "\x00".join(parts)


def _tree_alias(attributes: Proto, dropped: frozenset[str]) -> str:
    parts = []
    for item in attributes:
        key, value = item.key, item.value
        if key not in dropped:
            text = value.string_value if value is not None else None
            parts.append(f"{key}\x01{text}" if text else f"{key}\x02{tree_value(value)!r}")
    return "\x00".join(parts)


def _find_message_numbers(metric: Proto) -> tuple[PointKind | None, Proto]:
    name = metric.WhichOneof("data")
    if name == "gauge":
        return PointKind.GAUGE, metric.gauge
    return (PointKind.SUM, metric.sum) if name == "sum" else (None, None)


def _find_tree_numbers(metric: Proto) -> tuple[PointKind | None, Proto]:
    if metric.gauge is not None:
        return PointKind.GAUGE, metric.gauge
    return (PointKind.SUM, metric.sum) if metric.sum is not None else (None, None)


def _read_message_number(raw: Proto) -> float:
    which = raw.WhichOneof("value")
    return math.nan if which is None else float(getattr(raw, which))


def _read_tree_number(raw: Proto) -> float:
    if raw.as_double is not None:
        return float(raw.as_double)
    return math.nan if raw.as_int is None else float(raw.as_int)


class PointReader(NamedTuple):
    """How one of the two encodings is read."""

    find_numbers: Callable[[Proto], tuple[PointKind | None, Proto]]
    number: Callable[[Proto], float]
    alias: Callable[[Proto, frozenset[str]], str]
    attributes: Callable[[Proto], dict[str, Value]]


MESSAGES: Final = PointReader(
    _find_message_numbers, _read_message_number, _message_alias, message_attributes
)
TREES: Final = PointReader(_find_tree_numbers, _read_tree_number, _tree_alias, tree_attributes)
