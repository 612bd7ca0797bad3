"""Attributes into typed columns: what is not of a column's type is absent there (and still in ``attributes``).

A boolean is no number, a number outside the column's range is no number, and neither is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Final

import pyarrow as pa

from ingero.echo.ingest.origin import to_timestamp

_INT32: Final = 2**31
_INT64: Final = 2**63


def read_text(value: object) -> str | None:
    """A text that is not empty."""
    return value if isinstance(value, str) and value else None


def read_number(value: object) -> float | None:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def read_small(value: object) -> int | None:
    """An integer of 32 bits."""
    return _read_integer(value, _INT32)


def read_large(value: object) -> int | None:
    """An integer of 64 bits."""
    return _read_integer(value, _INT64)


def read_texts(value: object) -> list[str] | None:
    """The texts of a list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else None


def read_moment(value: object) -> datetime | None:
    """A time in nanoseconds since 1970."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _INT64:
        return None
    return to_timestamp(value)


def _read_integer(value: object, bound: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -bound <= value < bound else None


READERS: Final[dict[pa.DataType, Callable[[object], object]]] = {
    pa.string(): read_text,
    pa.float64(): read_number,
    pa.int32(): read_small,
    pa.int64(): read_large,
    pa.timestamp("us"): read_moment,
    pa.list_(pa.string()): read_texts,
}
"""By a column's Arrow type."""
