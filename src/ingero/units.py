"""Durations and sizes: the text people write, the integers code passes.

Code carries nanoseconds and bytes as plain integers under names that end in ``_ns`` and ``_bytes``. Only this module
turns text into them and back.
"""

from __future__ import annotations

import math
import re
from typing import Final

NS_PER_US: Final = 1_000
NS_PER_MS: Final = 1_000_000
NS_PER_S: Final = 1_000_000_000

_DURATION_NS: Final[dict[str, int]] = {
    "ns": 1,
    "us": NS_PER_US,
    "µs": NS_PER_US,
    "ms": NS_PER_MS,
    "s": NS_PER_S,
    "m": 60 * NS_PER_S,
    "h": 3600 * NS_PER_S,
    "d": 86_400 * NS_PER_S,
}
_SIZE_BYTES: Final[dict[str, int]] = {
    "": 1,
    "b": 1,
    **{f"{p}": 1024**i for i, p in enumerate(("k", "m", "g", "t"), start=1)},
    **{f"{p}b": 1000**i for i, p in enumerate(("k", "m", "g", "t"), start=1)},
    **{f"{p}ib": 1024**i for i, p in enumerate(("k", "m", "g", "t"), start=1)},
}
_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h|d)")
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_duration(text: str) -> int:
    """Turn ``"1m30s"``, ``"200ms"`` or ``"0"`` into nanoseconds.

    The grammar is Go's, which Collector configurations use, with ``d`` for days added.

    Raises:
        ValueError: The text is not a duration; the message says what one looks like.
    """
    stripped = text.strip()
    if stripped == "0":
        return 0
    total, position = 0.0, 0
    for part in _DURATION_PART.finditer(stripped):
        if part.start() != position:
            break
        total += float(part[1]) * _DURATION_NS[part[2]]
        position = part.end()
    if not stripped or position != len(stripped):
        raise ValueError(f"{text!r} is not a duration; write 500ms, 5s, 1m30s, 2h or 7d")
    return _round(total, text)


def format_duration(duration_ns: float) -> str:
    """Show a duration to three significant digits in the unit a person would choose."""
    magnitude = abs(duration_ns)
    for unit, size in (
        ("d", 86_400e9),
        ("h", 3600e9),
        ("m", 60e9),
        ("s", 1e9),
        ("ms", 1e6),
        ("µs", 1e3),
    ):
        if magnitude >= size:
            return f"{duration_ns / size:.3g} {unit}"
    return f"{duration_ns:.3g} ns"


def parse_size(text: str) -> int:
    """Turn ``"64MiB"``, ``"10GB"``, ``"100g"`` or ``"4096"`` into bytes; a bare letter is binary.

    Raises:
        ValueError: The text is not a size; the message says what one looks like.
    """
    match = _SIZE.fullmatch(text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in _SIZE_BYTES:
        raise ValueError(f"{text!r} is not a size; write 4096, 64KiB, 20MiB or 10GB")
    return _round(float(match[1]) * _SIZE_BYTES[unit], text)


def _round(number: float, text: str) -> int:
    """As a whole number; digits enough make a float infinite."""
    if math.isinf(number):
        raise ValueError(f"{text[:60]!r} is too large")
    return round(number)


def format_size(n_bytes: float) -> str:
    """Show a size in binary units, to three significant digits."""
    magnitude = abs(n_bytes)
    for unit, size in (("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if magnitude >= size:
            return f"{n_bytes / size:.3g} {unit}"
    return f"{n_bytes:.0f} B"
