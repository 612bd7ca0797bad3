"""`StrictModel`: the one parent of every settings model, and how raw settings become one.

Raw settings are validated as JSON, which is strict about scalars (``"5"`` is no number) and still reads lists as tuples
and text as enums. A key without a value (``grpc:``) means "this, with its defaults".
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, TypeAlias, TypeVar, Union

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from ingero.config.scalar import read_scalar
from ingero.errors import ConfigError, ConfigProblem
from ingero.units import format_duration, format_size, parse_duration, parse_size

ModelT = TypeVar("ModelT", bound="StrictModel")
Path: TypeAlias = tuple[str | int, ...]


class EnvText(str):
    """Text that came whole from ``${env:…}``: a number where the schema wants a number, else the text itself."""

    __slots__ = ()


class StrictModel(BaseModel):
    """Settings as a user writes them: frozen, unknown keys refused, each field with a description.

    Attributes:
        absent_keys: Keys that users bring from elsewhere and that mean nothing here, with what to do instead.
    """

    absent_keys: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=False,
        allow_inf_nan=False,
        use_attribute_docstrings=False,
        ser_json_inf_nan="strings",
    )


def parse_model(model: type[ModelT], settings: Mapping[str, Any] | None) -> ModelT:
    """Turn raw settings into a model; for settings that did not come with a file.

    Raises:
        ConfigError: Lists every problem.
    """
    parsed, problems = check_model(model, settings)
    if parsed is None:
        raise ConfigError(problems)
    return parsed


def check_model(
    model: type[ModelT],
    settings: Mapping[str, Any] | None,
    *,
    at: Path = (),
    lines: Mapping[Path, int] | None = None,
) -> tuple[ModelT | None, list[ConfigProblem]]:
    """Turn raw settings into a model, or say everything that is wrong with them.

    Args:
        model: What they should be.
        settings: JSON-able values; None is an empty mapping.
        at: Where they stand in the document.
        lines: Line of each path in the document.

    Returns:
        The model and no problems, or None and at least one.
    """
    filled = fill_nulls(model, {} if settings is None else settings)
    try:
        return model.model_validate_json(json.dumps(filled)), []
    except ValidationError as error:
        found = error.errors(include_url=False)
    return None, [_describe(model, detail, at, lines or {}) for detail in found]


def fill_nulls(annotation: object, value: object) -> object:
    """Replace null by an empty mapping wherever the schema has a model there, and type what the environment said."""
    if isinstance(value, EnvText):
        is_text = not {str, SecretStr}.isdisjoint(_alternatives(annotation))
        return str(value) if is_text else read_scalar(value)
    model = find_model(annotation)
    if model is not None and value is None:
        return {}
    if model is not None and isinstance(value, Mapping):
        return {
            key: fill_nulls(model.model_fields[key].annotation, item)
            if key in model.model_fields
            else item
            for key, item in value.items()
        }
    inner = find_element(annotation)
    if inner is not None and isinstance(value, Mapping):
        return {key: fill_nulls(inner, item) for key, item in value.items()}
    if inner is not None and isinstance(value, list):
        return [fill_nulls(inner, item) for item in value]
    return value


def find_model(annotation: object) -> type[StrictModel] | None:
    """The settings model that a field holds, through ``| None`` and ``Annotated``; None for anything else."""
    for candidate in _alternatives(annotation):
        if isinstance(candidate, type) and issubclass(candidate, StrictModel):
            return candidate
    return None


def _alternatives(annotation: object) -> Iterator[object]:
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        yield from _alternatives(typing.get_args(annotation)[0])
    elif origin in {Union, types.UnionType}:
        for part in typing.get_args(annotation):
            yield from _alternatives(part)
    else:
        yield annotation


def find_element(annotation: object) -> object:
    """What a mapping's values or a sequence's items are; None for scalars."""
    for candidate in _alternatives(annotation):
        origin, args = typing.get_origin(candidate), typing.get_args(candidate)
        if isinstance(origin, type) and args:
            return args[1] if issubclass(origin, Mapping) else args[0]
    return None


def _describe(
    model: type[StrictModel], detail: ErrorDetails, at: Path, lines: Mapping[Path, int]
) -> ConfigProblem:
    where = at + detail["loc"]
    message, hint = detail["msg"], ""
    if detail["type"] == "extra_forbidden":
        message, hint = "unknown key", _find_hint(model, detail["loc"])
    elif detail["type"] == "missing":
        message, hint = "is required", _says(model, detail["loc"])
    elif detail["type"] == "string_type" and isinstance(detail["input"], bool | int | float):
        message, hint = "should be text", "write it in quotes"
    else:
        message = _bound(detail) or message.removeprefix("Value error, ")
        is_whole = detail["type"] == "value_error" and isinstance(detail["input"], Mapping)
        is_named = is_whole or _is_secret(
            model, detail["loc"]
        )  # a model's own check names what is wrong
        hint = "" if is_named else _got(detail["input"])
    return ConfigProblem(dotted(where), message, find_line(where, lines), hint)


def _bound(detail: ErrorDetails) -> str:
    """The message for a duration or size out of bounds, whose limit is a number of nanoseconds or bytes; else empty."""
    given = detail["input"]
    words = _BOUNDS.get(detail["type"])
    if words is None or not isinstance(given, str):
        return ""
    (limit,) = detail["ctx"].values()
    for parse, show in ((parse_duration, format_duration), (parse_size, format_size)):
        try:
            parse(given)
        except ValueError:
            continue
        return f"should be {words} {show(limit)}"
    return ""


_BOUNDS: Final = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}


def _got(value: object) -> str:
    if isinstance(value, Mapping | list) or value is None:
        return f"got {'nothing' if value is None else 'a mapping' if isinstance(value, Mapping) else 'a list'}"
    return f"got {value!r}" if len(repr(value)) <= 60 else ""


def _find_hint(model: type[StrictModel], loc: Path) -> str:
    """Why the key is not there, where the model says so; else the known key most like it."""
    inside = find_model(_annotation_at(model, loc[:-1]))
    if inside is None:
        return ""
    key = str(loc[-1])
    return inside.absent_keys.get(key) or nearest(key, list(inside.model_fields))


def _is_secret(model: type[StrictModel], loc: Path) -> bool:
    return SecretStr in _alternatives(_annotation_at(model, loc))


def _annotation_at(model: type[StrictModel], loc: Path) -> object:
    annotation: object = model
    for part in loc:
        inside = find_model(annotation)
        if inside is not None and isinstance(part, str) and part in inside.model_fields:
            annotation = inside.model_fields[part].annotation
        else:
            annotation = find_element(annotation)
    return annotation


def _says(model: type[StrictModel], loc: Path) -> str:
    if len(loc) == 1 and loc[0] in model.model_fields:
        return model.model_fields[str(loc[0])].description or ""
    return ""


def nearest(key: str, known: list[str]) -> str:
    """A hint that names the known key most like this one, or the few there are."""
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]}?"
    return f"known here: {', '.join(sorted(known))}" if known else ""


def dotted(path: Path) -> str:
    """Write a path as people do: ``receivers.otlp.protocols.grpc``, ``list.0``."""
    return ".".join(str(part) for part in path)


def find_line(path: Path, lines: Mapping[Path, int]) -> int | None:
    """The line of a path, or of the nearest thing that encloses it."""
    for end in range(len(path), 0, -1):
        if path[:end] in lines:
            return lines[path[:end]]
    return lines.get(())
