"""A settings model as a table of keys, for the reference, and as commented YAML, for ``config --defaults``."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import yaml
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ingero.config.model import StrictModel, find_element, find_model
from ingero.config.types import Endpoint, write_duration, write_size


@dataclass(frozen=True, slots=True)
class KeyFact:
    """What there is to say about one key.

    Attributes:
        path: Dotted, from the model; ``*`` stands for the user's own names, ``[]`` for list items.
        form: For a reader: ``duration``, ``integer``, ``host:port``.
        default: As YAML; empty when there is none.
        is_required: True when the key must be given.
        description: What it does.
        model: The model inside, when it is a section.
    """

    path: str
    form: str
    default: str
    is_required: bool
    description: str
    model: type[StrictModel] | None = None


def iter_keys(model: type[StrictModel], prefix: str = "") -> Iterator[KeyFact]:
    """Every key of a model, sections before what is in them."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        inside, step = _inside(info.annotation)
        yield KeyFact(
            path,
            _write_type(info),
            _write_default(info),
            info.is_required(),
            info.description or "",
            inside,
        )
        if inside is not None:
            yield from iter_keys(inside, f"{path}{step}.")


def _inside(annotation: object) -> tuple[type[StrictModel] | None, str]:
    """The model under a key, and how its keys are reached."""
    model = find_model(annotation)
    if model is not None:
        return model, ""
    element = find_element(annotation)
    model = None if element is None else find_model(element)
    is_mapping = "dict" in str(annotation) or "Mapping" in str(annotation)
    return model, ".*" if is_mapping else "[]"


def _write_type(info: FieldInfo) -> str:
    serializers = [getattr(one, "func", None) for one in info.metadata]
    if write_duration in serializers:
        return "duration"
    if write_size in serializers:
        return "size"
    text = _name(info.annotation)
    return f"{text}, optional" if type(None) in typing.get_args(info.annotation) else text


_NAMES: Mapping[object, str] = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Endpoint: "host:port",
    SecretStr: "secret text",
    object: "any",
    Any: "any",
}


def _name(annotation: object) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return _name_annotated(args)
    if origin is Literal:
        return " / ".join(str(arg) for arg in args)
    if origin is not None and args:
        return _name_generic(origin, args)
    if isinstance(annotation, type) and issubclass(annotation, StrictModel):
        return "section"
    return _NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _name_annotated(args: tuple[Any, ...]) -> str:
    written = [getattr(one, "func", None) for one in args[1:]]
    if write_duration in written:
        return "duration"
    return "size" if write_size in written else _name(args[0])


def _name_generic(origin: object, args: tuple[Any, ...]) -> str:
    if origin in {Union, types.UnionType}:
        return " or ".join(_name(arg) for arg in args if arg is not type(None))
    is_mapping = isinstance(origin, type) and issubclass(origin, Mapping)
    return f"name → {_name(args[1])}" if is_mapping else f"list of {_name(args[0])}"


def _write_default(info: FieldInfo) -> str:
    if info.is_required():
        return ""
    value = info.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or value is None or isinstance(value, StrictModel):
        return ""
    serializers = [getattr(one, "func", None) for one in info.metadata]
    for write in (write_duration, write_size):
        if write in serializers:
            return write(value)
    return write_value(value)


def write_value(value: object) -> str:
    """One value on one line of YAML."""
    if isinstance(value, SecretStr):
        return '""'
    if isinstance(value, tuple | list | Mapping):
        return json.dumps(value, default=str)
    if isinstance(value, str | bool | int | float) or value is None:
        text = yaml.safe_dump(value, width=10_000).splitlines()[0]
        return text if text != "..." else "null"
    return str(value)


def write_commented(
    model: type[StrictModel], values: Mapping[str, Any], indent: str
) -> Iterator[str]:
    """YAML lines of a model with each key's meaning behind it.

    Args:
        model: What the keys are.
        values: Settings that differ from the defaults.
        indent: White space before each line.

    Yields:
        Lines; a key that is empty by default is shown as a comment.
    """
    for name, info in model.model_fields.items():
        inside = find_model(info.annotation)
        given = values.get(name)
        comment = f"# {info.description}" if info.description else ""
        if inside is not None:
            is_set = name in values or not _is_empty(info)
            lead = indent if is_set else f"{indent}# "
            yield f"{lead}{name}:  {comment}"
            nested = given if isinstance(given, Mapping) else {}
            yield from write_commented(inside, nested, f"{lead}  ")
        elif name in values:
            yield f"{indent}{name}: {write_value(given)}  {comment}"
        else:
            default = _write_default(info)
            lead = indent if default else f"{indent}# "
            yield f"{lead}{name}: {default}  {comment}".rstrip()


def _is_empty(info: FieldInfo) -> bool:
    return (
        not info.is_required()
        and info.get_default(call_default_factory=True, validated_data={}) is None
    )
