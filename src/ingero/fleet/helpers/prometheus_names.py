"""OTLP names, units and attributes → Prometheus metric names and labels.

Pure. Follows the OpenTelemetry specification's "Prometheus and OpenMetrics Compatibility" (v1.38), which the
Collector's exporter follows too: characters outside Prometheus' set become one underscore, the unit is appended in
words, counters end in ``_total``, gauges of unit ``1`` in ``_ratio``, and labels that become the same are joined with
``;``. A label whose name is needed for something else becomes ``exported_…``, as when Prometheus itself scrapes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Final

_NOT_NAME: Final = re.compile(r"[^a-zA-Z0-9:]+")
_NOT_LABEL: Final = re.compile(r"[^a-zA-Z0-9_]")
_UNDERSCORES: Final = re.compile(r"_{2,}")
_UNIT_WORDS: Final = {
    "d": "days",
    "h": "hours",
    "min": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
    "By": "bytes",
    "KiBy": "kibibytes",
    "MiBy": "mebibytes",
    "GiBy": "gibibytes",
    "TiBy": "tibibytes",
    "KBy": "kilobytes",
    "MBy": "megabytes",
    "GBy": "gigabytes",
    "TBy": "terabytes",
    "m": "meters",
    "V": "volts",
    "A": "amperes",
    "J": "joules",
    "W": "watts",
    "g": "grams",
    "Cel": "celsius",
    "Hz": "hertz",
    "1": "",
    "%": "percent",
}
_PER_WORDS: Final = {
    "s": "second",
    "m": "minute",
    "h": "hour",
    "d": "day",
    "w": "week",
    "mo": "month",
    "y": "year",
}
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_PAIR: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def build_metric_name(
    name: str,
    unit: str,
    *,
    is_gauge: bool,
    is_counter: bool,
    namespace: str = "",
    with_suffixes: bool = True,
) -> str:
    """The Prometheus name of an OTLP metric; empty when nothing of the name is left."""
    tokens = [token for token in _NOT_NAME.split(name) if token]
    if not tokens:
        return ""
    if with_suffixes:
        tokens += [word for word in _unit_words(unit) if word not in tokens]
        if is_counter:
            tokens = [*(word for word in tokens if word != "total"), "total"]
        if is_gauge and unit == "1":
            tokens = [*(word for word in tokens if word != "ratio"), "ratio"]
    elif not namespace:
        tokens = [
            _NOT_LABEL.sub("_", name.replace(":", "_")) if ":" not in name else "_".join(tokens)
        ]
    if namespace:
        tokens.insert(0, "_".join(token for token in _NOT_NAME.split(namespace) if token))
    joined = "_".join(tokens)
    return f"_{joined}" if joined[0].isdigit() else joined


def _unit_words(unit: str) -> list[str]:
    main, _, per = unit.partition("/")
    words = []
    main = main.strip()
    if main and "{" not in main:
        words.append(_clean(_UNIT_WORDS.get(main, main)))
    per = per.strip()
    if per and "{" not in per:
        word = _clean(_PER_WORDS.get(per, per))
        words.append(f"per_{word}" if word else "")
    return [word for word in words if word]


def _clean(unit: str) -> str:
    return "_".join(token for token in _NOT_NAME.split(unit.replace(":", "_")) if token)


@lru_cache(maxsize=4096)
def build_label_name(key: str) -> str:
    """The Prometheus label of an attribute; never one of the reserved names that begin with two underscores."""
    name = _UNDERSCORES.sub("_", _NOT_LABEL.sub("_", key))
    if not name:
        return "_"
    return f"key_{name}" if name[0].isdigit() else name


def escape_label(value: str) -> str:
    """A label's value as the exposition formats want it between its quotes."""
    escaped = value.translate(_ESCAPES)
    return escaped if escaped.isascii() else escaped.encode("utf-8", "replace").decode("utf-8")


def escape_help(text: str) -> str:
    """A help text on one line."""
    return text.translate(_HELP_ESCAPES).encode("utf-8", "replace").decode("utf-8")


def build_labels(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Attributes → label names and unescaped values, sorted by name; equal names share a value joined with ``;``.

    Attributes without a value are left out, as Prometheus has no empty labels.
    """
    labels: dict[str, str] = {}
    for key, value in sorted(pairs):
        if not value:
            continue
        name = build_label_name(key)
        labels[name] = f"{labels[name]};{value}" if name in labels else value
    return dict(sorted(labels.items()))


def format_labels(labels: Mapping[str, str]) -> str:
    """``a="1",b="2"``, without the braces; labels without a value are left out, as Prometheus has no empty labels."""
    return ",".join(f'{name}="{escape_label(value)}"' for name, value in labels.items() if value)


def read_labels(text: str) -> list[tuple[str, str]]:
    """Names and values of a label text; the reverse of `format_labels`."""
    return [(name, _ESCAPED.sub(_unescape, value)) for name, value in _PAIR.findall(text)]


def _unescape(found: re.Match[str]) -> str:
    return "\n" if found[1] == "n" else found[1]


def free_labels(labels: Mapping[str, str], taken: Collection[str]) -> dict[str, str]:
    """Labels with none of the names that are taken: ``le`` becomes ``exported_le``, sorted by name.

    Source: Prometheus ``scrape/scrape.go``, resolveConflictingExposedLabels: the prefix is repeated until the name is
    free.
    """
    free = {name: value for name, value in labels.items() if name not in taken}
    for name in sorted(labels.keys() & set(taken)):
        shown = f"exported_{name}"
        while shown in free or shown in taken:
            shown = f"exported_{shown}"
        free[shown] = labels[name]
    return dict(sorted(free.items()))
