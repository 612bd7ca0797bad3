"""Our statements, written for DuckDB, in ClickHouse's words. Pure text; the parity test holds both to the same answers.

Only what our statements use is translated, and a statement may use: the functions in `_CALLS`, casts to the types in
`_TYPES`, and what both engines read alike. Where they differ silently the reader's settings (`SETTINGS`) decide.

Source: ClickHouse's SQL reference, 26.9, observed on the engine of that release.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

SETTINGS: Final[dict[str, Any]] = {
    "join_use_nulls": 1,  # an outer join's missing side is NULL, not 0 or ''
    "aggregate_functions_null_for_empty": 1,  # the maximum of nothing is NULL
    "prefer_column_name_to_alias": 1,  # sum(n) AS n does not change what n means beside it
    "final": 1,  # nodes: one row each
}

_WORD: Final = re.compile(
    r"""'(?:[^']|'')*'|"[^"]*"|[A-Za-z_]\w*|\d+(?:\.\d+)?(?:e-?\d+)?|::|//|\s+|.""", re.DOTALL
)
_JSON_KEY: Final = re.compile(r"""'\$\.(?:"([^"]+)"|(\w+))'""")
_FILTER: Final = re.compile(r"\s*FILTER\s*\Z")
_OPEN: Final = {"(": ")", "[": "]"}
_TYPES: Final = {
    "TIMESTAMP": "DateTime64(6, 'UTC')",
    "DOUBLE": "Nullable(Float64)",
    "BIGINT": "Nullable(Int64)",
    "INTEGER": "Nullable(Int32)",
}
_FIRST: Final = datetime(1900, 1, 1)  # noqa: DTZ001 - naive UTC, as the store has it
_LAST: Final = datetime(2299, 12, 31)  # noqa: DTZ001
"""What DateTime64(6) can hold; a window that reaches farther holds no more rows."""
_PARAMETERS: Final[dict[type, str]] = {
    datetime: "DateTime64(6, 'UTC')",
    str: "String",
    float: "Float64",
    int: "Int64",
    type(None): "Nullable(String)",
}


def _rename(name: str) -> Callable[[list[str]], str]:
    return lambda args: f"{name}({', '.join(args)})"


def _quantile(args: list[str]) -> str:
    return f"quantileExactInclusive({args[1]})({args[0]})"


def _mad(args: list[str]) -> str:
    """The median distance from the median."""
    median = f"quantileExactInclusive(0.5)({args[0]})"
    distances = f"arrayMap(one -> abs(one - {median}), groupArray({args[0]}))"
    return f"arrayReduce('quantileExactInclusive(0.5)', {distances})"


def _json_text(args: list[str]) -> str:
    found = _JSON_KEY.fullmatch(args[1])
    assert found is not None, args[1]
    return f"JSONExtract({args[0]}, '{found[1] or found[2]}', 'Nullable(String)')"


def _try_cast(args: list[str]) -> str:
    value, _, kind = args[0].rpartition(" AS ")
    return f"accurateCastOrNull({value}, '{_TYPES[kind].removeprefix('Nullable(').rstrip(')')}')"


_CALLS: Final[dict[str, Callable[[list[str]], str]]] = {
    "arg_max": _rename("argMax"),
    "arg_min": _rename("argMin"),
    "any_value": _rename("any"),
    "isinf": _rename("isInfinite"),
    "left": _rename("leftUTF8"),
    "len": _rename("length"),
    "list_position": _rename("indexOf"),
    "strlen": _rename("length"),
    "unnest": _rename("arrayJoin"),
    "epoch_us": _rename("toUnixTimestamp64Micro"),
    "epoch": lambda args: f"(toUnixTimestamp64Micro({args[0]}) / 1e6)",
    "make_timestamp": lambda args: f"fromUnixTimestamp64Micro({args[0]}, 'UTC')",
    "median": lambda args: _quantile([args[0], "0.5"]),
    "quantile_cont": _quantile,
    "mad": _mad,
    "json_extract_string": _json_text,
    "try_cast": _try_cast,
}


def translate(sql: str, params: Sequence[Any]) -> tuple[str, dict[str, Any]]:
    """A statement and its bound values for ClickHouse.

    Args:
        sql: In DuckDB's words, values as ``?``.
        params: One value per ``?``; times are UTC without a zone.

    Returns:
        The statement with ``{p0:Type}`` for values, equal values sharing one, and the values by name.
    """
    kinds: list[tuple[str, str]] = []
    values: dict[str, Any] = {}
    names: dict[tuple[type, Any], str] = {}
    for given in params:
        value = min(max(given, _FIRST), _LAST) if isinstance(given, datetime) else given
        key = (type(value), value)
        if key not in names:
            names[key] = f"p{len(names)}"
            values[names[key]] = value
        kinds.append((names[key], _PARAMETERS[type(value)]))
    return _translate(sql, tuple(kinds)), values


@lru_cache(maxsize=256)
def _translate(sql: str, kinds: tuple[tuple[str, str], ...]) -> str:
    places = iter(kinds)
    words = [_bind(*next(places)) if word == "?" else word for word in _WORD.findall(sql)]
    return _rewrite(words)


def _bind(name: str, kind: str) -> str:
    return f"{{{name}:{kind}}}"


def _rewrite(words: list[str]) -> str:
    done: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        after = words[at + 1] if at + 1 < len(words) else ""
        if word == "::":
            done.append(f"::{_TYPES[after]}")
            at += 2
        elif word == "//":
            done.append("DIV")
            at += 1
        elif after == "(" and word in _CALLS:
            end = _find_end(words, at + 1)
            done.append(_CALLS[word](_split(words[at + 2 : end])))
            at = end + 1
        elif after == "(" and word == "list":
            text, at = _rewrite_list(words, at)
            done.append(text)
        else:
            done.append(word)
            at += 1
    return "".join(done)


def _find_end(words: list[str], start: int) -> int:
    """Where the bracket that opens at ``start`` closes."""
    depth = 0
    for at in range(start, len(words)):
        depth += (words[at] in _OPEN) - (words[at] in _OPEN.values())
        if depth == 0:
            return at
    raise AssertionError("an unbalanced statement")


def _split(words: list[str]) -> list[str]:
    """Arguments, each rewritten."""
    parts: list[list[str]] = [[]]
    depth = 0
    for word in words:
        depth += (word in _OPEN) - (word in _OPEN.values())
        if word == "," and depth == 0:
            parts.append([])
        else:
            parts[-1].append(word)
    return [_rewrite(part).strip() for part in parts]


def _rewrite_list(words: list[str], at: int) -> tuple[str, int]:
    """``list(value ORDER BY key) FILTER (WHERE …)``: pairs are collected, sorted by key, and the values taken."""
    end = _find_end(words, at + 1)
    value, _, key = _rewrite(words[at + 2 : end]).rpartition(" ORDER BY ")
    tail = ""
    start = next((i for i in range(end + 1, len(words)) if words[i] == "("), len(words))
    if _FILTER.match("".join(words[end + 1 : start])):
        end = _find_end(words, start)
        tail = f" FILTER {_rewrite(words[start : end + 1])}"
    pairs = f"groupArray(({key}, {value})){tail}"
    return f"arrayMap(one -> one.2, arraySort(one -> one.1, {pairs}))", end + 1
