"""Attribute values by type: what is not of the wanted type is absent, never converted and never zero.

A boolean is no number, a number outside the range is no number, and neither is NaN.
"""

from __future__ import annotations

import math
from typing import Final

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


def read_flag(value: object) -> bool | None:
    """A boolean."""
    return value if isinstance(value, bool) else None


def read_texts(value: object) -> tuple[str, ...] | None:
    """The texts of a list."""
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else None


def read_moment(value: object) -> int | None:
    """A time in nanoseconds since 1970, wall clock; before 2262."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _INT64:
        return None
    return value


def _read_integer(value: object, bound: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -bound <= value < bound else None
