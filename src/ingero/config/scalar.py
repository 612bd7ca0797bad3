"""What a plain YAML scalar is, by YAML 1.2's core schema (section 10.3.2)."""

from __future__ import annotations

import re
from typing import Final

_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE: Final = frozenset({"true", "True", "TRUE"})
_FALSE: Final = frozenset({"false", "False", "FALSE"})
_INT: Final = re.compile(r"[-+]?[0-9]{1,30}|0o[0-7]{1,30}|0x[0-9a-fA-F]{1,30}")
_FLOAT: Final = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL: Final = re.compile(r"([-+]?)\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def read_scalar(text: str) -> str | int | float | bool | None:
    """Read an unquoted scalar; what is no null, bool or number is text."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    special = _SPECIAL.fullmatch(text)
    if special:
        return float("nan") if special[3] else float(f"{special[1]}inf")
    return text
