"""The two encodings of an export, read the way the intake needs them: without building a row per point.

Below the intake; knows no series. `ingero.otlp.codec.iter_points` reads everything and costs four times as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from ingero.otlp.codec.structs import Proto, Value
from ingero.otlp.codec.values import message_attributes, message_value, tree_attributes, tree_value

DELTA: Final = 1
"""AggregationTemporality of points that add up."""
Alias: TypeAlias = str | bytes
"""What is equal for equal attributes in the same order: a text, or a resource as it arrived."""


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


def _message_resource_alias(resource: Proto) -> Alias:
    serialized: bytes = resource.SerializeToString()
    return serialized


def _tree_resource_alias(resource: Proto) -> Alias:
    return "" if resource is None else _tree_alias(resource.attributes, frozenset())


def _read_message_number(raw: Proto) -> float:
    which = raw.WhichOneof("value")
    return math.nan if which is None else float(getattr(raw, which))


def _read_tree_number(raw: Proto) -> float:
    if raw.as_double is not None:
        return float(raw.as_double)
    return math.nan if raw.as_int is None else float(raw.as_int)


class PointReader(NamedTuple):
    """How one of the two encodings is read.

    Attributes:
        number: The value of a point; NaN where it has none.
        resource_alias: What is equal for equal resources, and short.
        alias: Likewise of attributes, without some of them.
        attributes: Attributes as a dictionary.
    """

    number: Callable[[Proto], float]
    resource_alias: Callable[[Proto], Alias]
    alias: Callable[[Proto, frozenset[str]], str]
    attributes: Callable[[Proto], dict[str, Value]]


MESSAGES: Final = PointReader(
    _read_message_number, _message_resource_alias, _message_alias, message_attributes
)
TREES: Final = PointReader(_read_tree_number, _tree_resource_alias, _tree_alias, tree_attributes)
