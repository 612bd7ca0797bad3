"""What the processors ``attributes`` and ``resource`` do to attributes: a list of actions, in order.

Source: opentelemetry-collector-contrib ``internal/coreinternal/attraction`` (keys, names of actions; an insert keeps
what is there, an update adds nothing, an extract overwrites).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from ingero.config import StrictModel
from ingero.errors import BadDataError, PermanentError
from ingero.fleet.consumer import Batch
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal

Attributes: TypeAlias = Any
"""A repeated KeyValue of a upb message."""
Edit: TypeAlias = Callable[[Attributes], None]

Scalar: TypeAlias = str | bool | int | float

PATTERNS: Final = (
    " Patterns are those of Python's `re`, not RE2: POSIX classes such as `[[:space:]]` are refused, and `\\d`, `\\w`"
    " and `\\s` take those of every script."
)
"""What a description of a setting that takes a pattern adds."""
_POSIX_CLASS: Final = re.compile(r"\[\^?\]?[^\]]*(\[:\^?[a-z]+:\])")
_INT: Final = re.compile(r"[+-]?[0-9]+")
_DOUBLE: Final = re.compile(
    r"[+-]?(?P<digits>[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|[+-]?inf(?:inity)?|nan",
    re.IGNORECASE | re.ASCII,
)

ENTRIES: Final = {
    Signal.METRICS: ("resource_metrics", "scope_metrics", "metrics"),
    Signal.LOGS: ("resource_logs", "scope_logs", "log_records"),
    Signal.TRACES: ("resource_spans", "scope_spans", "spans"),
}
"""Names of the three levels of a request."""


class ActionConfig(StrictModel):
    """One action on the attributes of one thing."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "from_context": "metadata of the connection is not kept; only values and attributes are",
    }

    action: Literal["insert", "update", "upsert", "delete", "extract", "convert"] = Field(
        description="insert a missing one, update an existing one, upsert either; delete; extract named groups of a "
        "pattern into attributes; convert the type. hash is not there."
    )
    key: str | None = Field(None, min_length=1, description="The attribute.")
    value: Scalar | tuple[Scalar, ...] | None = Field(
        None, description="What insert, update and upsert set."
    )
    from_attribute: str | None = Field(
        None, min_length=1, description="Attribute whose value they set instead."
    )
    pattern: str | None = Field(
        None,
        min_length=1,
        description=f"Regular expression: keys to delete; named groups to extract.{PATTERNS}",
    )
    converted_type: Literal["int", "double", "string"] | None = Field(
        None, description="What convert makes of the value; one that is none stays as it is."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        is_setting = self.action in {"insert", "update", "upsert"}
        self._refuse_rest(is_setting=is_setting)
        if is_setting and (self.value is None) == (self.from_attribute is None):
            raise ValueError(f"{self.action} needs exactly one of value and from_attribute")
        if self.action != "delete" and self.key is None:
            raise ValueError(f"{self.action} needs a key")
        if self.action == "delete" and self.key is None and self.pattern is None:
            raise ValueError("delete needs key or pattern")
        if self.action == "extract" and not self._groups():
            raise ValueError("extract needs a pattern with named groups, such as (?P<zone>.*)")
        if self.action == "convert" and self.converted_type is None:
            raise ValueError("convert needs converted_type")
        return self

    def _groups(self) -> Iterable[str]:
        return re.compile(self.pattern).groupindex if self.pattern is not None else ()

    def _refuse_rest(self, *, is_setting: bool) -> None:
        """Refuse keys that the action does not read, and a pattern that is none."""
        if self.pattern is not None:
            check_pattern(self.pattern)
        numbers = [one for one in _as_tuple(self.value) if isinstance(one, int)]
        if any(not -(2**63) <= one < 2**63 for one in numbers):
            raise ValueError("value is no 64-bit number")
        unread = {
            "value": not is_setting,
            "from_attribute": not is_setting,
            "pattern": self.action not in {"delete", "extract"},
            "converted_type": self.action != "convert",
        }
        for name, is_unread in unread.items():
            if is_unread and getattr(self, name) is not None:
                raise ValueError(f"{self.action} does not read {name}")


def check_pattern(text: str) -> None:
    """Refuse what is no pattern, or would be one that never fits what its writer meant.

    Raises:
        ValueError: It is none, or has a POSIX class, which `re` takes for some letters and a bracket.
    """
    try:
        posix = _POSIX_CLASS.search(re.sub(r"\\.", "", text, flags=re.DOTALL))
        if posix is not None:
            raise ValueError(
                f"{text!r}: POSIX classes such as {posix[1]} are not read; write \\s, \\d or the characters"
            )
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error


def write_scalar(value: Scalar) -> str:
    """A value as text, the way the Collector compares it: doubles without an exponent, and 1 for 1.0.

    Source: opentelemetry-collector-contrib ``internal/filter/filtermatcher`` and Go's strconv.FormatFloat ('f', -1).
    """
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return f"{Decimal(repr(value)):f}".removesuffix(".0")


def _as_tuple(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)


def build_edit(actions: Sequence[ActionConfig]) -> Edit:
    """A function that does all of them, in order, to the attributes of one thing."""
    edits = [_EDITS[one.action](one) for one in actions]

    def edit(attributes: Attributes) -> None:
        for each in edits:
            each(attributes)

    return edit


def copy_message(export: Export) -> Any:  # noqa: ANN401 - a upb message
    """A message of its own, to be changed.

    Raises:
        PermanentError: A JSON value does not fit its protobuf field.
    """
    try:
        message = export.message
    except BadDataError as error:
        raise PermanentError(error.message) from error
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def edit_batch(batch: Batch, edit: Edit, find: Callable[[Signal, Any], Iterator[Any]]) -> Batch:
    """A batch whose attributes were edited in a copy.

    Args:
        batch: Not changed.
        edit: What to do.
        find: The things of a request whose attributes are meant, such as `iter_items`.

    Raises:
        PermanentError: A JSON value does not fit its protobuf field.
    """
    export = batch.export
    copy = copy_message(export)
    for thing in find(batch.signal, copy):
        edit(thing.attributes)
    return replace(batch, export=Export.from_message(export.signal, copy, export.size_bytes))


def iter_resources(signal: Signal, message: Any) -> Iterator[Any]:  # noqa: ANN401 - a upb message
    """Every resource of a request."""
    for entry in getattr(message, ENTRIES[signal][0]):
        yield entry.resource


def iter_items(signal: Signal, message: Any) -> Iterator[Any]:  # noqa: ANN401 - a upb message
    """Every data point, log record or span of a request."""
    resources, scopes, items = ENTRIES[signal]
    for entry in getattr(message, resources):
        for scope in getattr(entry, scopes):
            for item in getattr(scope, items):
                if signal is not Signal.METRICS:
                    yield item
                elif (kind := item.WhichOneof("data")) is not None:
                    yield from getattr(item, kind).data_points


def _find(attributes: Attributes, key: str | None) -> Any | None:  # noqa: ANN401 - a KeyValue
    return next((one for one in attributes if one.key == key), None)


def _set(action: ActionConfig) -> Edit:
    key, source = action.key, action.from_attribute
    inserts, updates = action.action != "update", action.action != "insert"

    def edit(attributes: Attributes) -> None:
        found = _find(attributes, key)
        given = _find(attributes, source) if source is not None else None
        is_wanted = inserts if found is None else updates
        if not is_wanted or (source is not None and given is None):
            return
        target = attributes.add(key=key) if found is None else found
        if given is not None:
            target.value.CopyFrom(given.value)
        else:
            _put(target.value, action.value)

    return edit


def _put(target: Any, value: object) -> None:  # noqa: ANN401 - an AnyValue
    target.Clear()
    if isinstance(value, tuple):
        target.array_value.SetInParent()
        for one in value:
            _put(target.array_value.values.add(), one)
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    else:
        target.string_value = value


def _delete(action: ActionConfig) -> Edit:
    pattern = re.compile(action.pattern) if action.pattern is not None else None

    def edit(attributes: Attributes) -> None:
        for at in reversed(range(len(attributes))):
            key = attributes[at].key
            if key == action.key or (pattern is not None and pattern.search(key)):
                del attributes[at]

    return edit


def _extract(action: ActionConfig) -> Edit:
    assert action.pattern is not None
    pattern = re.compile(action.pattern)

    def edit(attributes: Attributes) -> None:
        found = _find(attributes, action.key)
        if found is None or found.value.WhichOneof("value") != "string_value":
            return
        match = pattern.search(found.value.string_value)
        for name, text in (match.groupdict(default="") if match else {}).items():
            target = _find(attributes, name)
            _put((target if target is not None else attributes.add(key=name)).value, text)

    return edit


def _convert(action: ActionConfig) -> Edit:
    def edit(attributes: Attributes) -> None:
        found = _find(attributes, action.key)
        kind = found.value.WhichOneof("value") if found is not None else None
        if found is None or kind not in {"string_value", "bool_value", "int_value", "double_value"}:
            return
        value = getattr(found.value, kind)
        try:
            _put(found.value, _CONVERSIONS[action.converted_type or "string"](value))
        except (ValueError, OverflowError):
            _put(found.value, value)

    return edit


def _read_int(value: Scalar) -> int:
    """Source: Go's strconv.ParseInt with base 10: no blanks, no ``_``, and no digits but ASCII's."""
    if isinstance(value, str) and not _INT.fullmatch(value):
        raise ValueError
    return int(value)


def _read_double(value: Scalar) -> float:
    """Source: Go's strconv.ParseFloat, which refuses what is too large; its hexadecimal form is not read."""
    if isinstance(value, str):
        match = _DOUBLE.fullmatch(value)
        if not match or (match["digits"] and math.isinf(float(value))):
            raise ValueError
    return float(value)


def _write(value: Scalar) -> str:
    """Source: opentelemetry-collector ``pdata/pcommon`` (Value.AsString): as ECMAScript writes numbers."""
    if isinstance(value, float) and value and math.isfinite(value):
        size = abs(value)
        if size < 1e-6 or size >= 1e21:
            return repr(value).replace("e-0", "e-")
    return write_scalar(value)


_CONVERSIONS: Final[Mapping[str, Callable[[Any], Scalar]]] = {
    "int": _read_int,
    "double": _read_double,
    "string": _write,
}
_EDITS: Final[Mapping[str, Callable[[ActionConfig], Edit]]] = {
    "insert": _set,
    "update": _set,
    "upsert": _set,
    "delete": _delete,
    "extract": _extract,
    "convert": _convert,
}
