"""Between the three shapes of one export request: upb message, struct tree, OTLP/JSON text.

Every conversion walks a plan that is derived once from the protobuf descriptors, so a field the proto gains is either
in the struct (and converted) or absent from it (and a test names it). Off the hot path: about 5 µs per data point.

Lossy: proto fields that the structs leave out (the profiling signal's string-table indices, entity references) and
unknown fields do not survive a conversion; they do survive a pass-through in the encoding they came in.
"""

from __future__ import annotations

import base64
import math
from enum import Enum, auto
from typing import Any, Final, NamedTuple

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from ingero.errors import BadDataError
from ingero.otlp.codec import structs

MESSAGES: Final[dict[type[structs.Node], type[Message]]] = {
    structs.MetricsRequest: ExportMetricsServiceRequest,
    structs.LogsRequest: ExportLogsServiceRequest,
    structs.TracesRequest: ExportTraceServiceRequest,
}
_RENAMED: Final = {"Event": structs.SpanEvent, "Link": structs.SpanLink}
_INT64_TYPES: Final = {
    FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_SINT64,
    FieldDescriptor.TYPE_FIXED64,
    FieldDescriptor.TYPE_SFIXED64,
}


class _Kind(Enum):
    """How a field's value changes between the shapes."""

    MESSAGE = auto()
    INT64 = auto()
    FLOAT = auto()
    HEX = auto()  # bytes in protobuf, hexadecimal text in JSON
    BYTES = auto()  # bytes in protobuf, base64 in JSON
    PLAIN = auto()


class _Field(NamedTuple):
    name: str
    camel: str
    kind: _Kind
    is_repeated: bool
    has_presence: bool


def _kind_of(field: FieldDescriptor) -> _Kind:
    if field.message_type is not None:
        return _Kind.MESSAGE
    if field.type in _INT64_TYPES:
        return _Kind.INT64
    if field.type == FieldDescriptor.TYPE_DOUBLE:
        return _Kind.FLOAT
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _Kind.HEX if field.name.endswith(("trace_id", "span_id")) else _Kind.BYTES
    return _Kind.PLAIN


def find_struct(descriptor: structs.Proto) -> type[structs.Node] | None:
    """The struct that stands for a message type, or None when it has none."""
    for struct, message in MESSAGES.items():
        if message.DESCRIPTOR is descriptor:
            return struct
    name = descriptor.name
    found = _RENAMED.get(name) or getattr(structs, name, None)
    return found if isinstance(found, type) and issubclass(found, structs.Node) else None


def _build_plans() -> dict[type[structs.Node], dict[str, _Field]]:
    plans: dict[type[structs.Node], dict[str, _Field]] = {}
    waiting: list[Any] = [message.DESCRIPTOR for message in MESSAGES.values()]
    while waiting:
        descriptor = waiting.pop()
        struct = find_struct(descriptor)
        if struct is None or struct in plans:
            continue
        kept = [field for field in descriptor.fields if field.name in struct.__struct_fields__]
        plans[struct] = {
            field.name: _Field(
                field.name,
                field.camelcase_name,
                _kind_of(field),
                field.is_repeated,
                field.has_presence,
            )
            for field in kept
        }
        waiting += [field.message_type for field in kept if field.message_type is not None]
    return plans


_PLANS: Final = _build_plans()


def message_to_tree(message: Message) -> structs.Node:
    """Copy a upb message into structs."""
    struct = find_struct(message.DESCRIPTOR)
    if struct is None:
        raise BadDataError(f"{message.DESCRIPTOR.full_name} is not part of an OTLP export request")
    return _to_struct(message, struct)


_STRUCT_BY_NAME: Final[dict[str, type[structs.Node]]] = {}


def _struct_for(message: Message) -> type[structs.Node]:
    name = message.DESCRIPTOR.full_name
    found = _STRUCT_BY_NAME.get(name)
    if found is None:
        found = find_struct(message.DESCRIPTOR)
        assert found is not None, name
        _STRUCT_BY_NAME[name] = found
    return found


def _to_struct(message: Message, struct: type[structs.Node]) -> structs.Node:
    plan = _PLANS[struct]
    values: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        field = plan.get(descriptor.name)
        if field is None:
            continue
        kind = field.kind
        if kind is _Kind.MESSAGE:
            if field.is_repeated:
                inner = _struct_for(value[0])
                values[field.name] = [_to_struct(item, inner) for item in value]
            else:
                values[field.name] = _to_struct(value, _struct_for(value))
        elif kind is _Kind.HEX:
            values[field.name] = value.hex()
        else:
            values[field.name] = list(value) if field.is_repeated else value
    return struct(**values)


def tree_to_message(tree: structs.Node) -> Message:
    """Copy structs into a upb message.

    Raises:
        BadDataError: A value does not fit its protobuf field.
    """
    message = MESSAGES[type(tree)]()
    try:
        _fill(message, tree)
    except (ValueError, TypeError) as error:
        raise BadDataError(f"cannot be written as protobuf: {error}") from error
    return message


def _fill(message: structs.Proto, node: structs.Node) -> None:
    for field in _PLANS[type(node)].values():
        value = getattr(node, field.name)
        if value is None or (not field.has_presence and not value):
            continue
        if field.kind is _Kind.MESSAGE:
            target = getattr(message, field.name)
            if field.is_repeated:
                for item in value:
                    _fill(target.add(), item)
            else:
                target.SetInParent()
                _fill(target, value)
        elif field.kind is _Kind.HEX:
            setattr(message, field.name, bytes.fromhex(value))
        elif field.is_repeated:
            getattr(message, field.name).extend(value)
        else:
            setattr(message, field.name, value)


def encode_tree(tree: structs.Node) -> bytes:
    """Write structs as OTLP/JSON: 64-bit integers as strings, non-finite numbers by name, ids as hexadecimal."""
    return msgspec.json.encode(_document(tree))


def _document(node: structs.Node) -> dict[str, Any]:
    document: dict[str, Any] = {}
    for field in _PLANS[type(node)].values():
        value = getattr(node, field.name)
        if value is None or (not field.has_presence and not value):
            continue
        if field.is_repeated:
            document[field.camel] = [_json_value(field.kind, item) for item in value]
        else:
            document[field.camel] = _json_value(field.kind, value)
    return document


def _json_value(kind: _Kind, value: structs.Proto) -> structs.Proto:
    if kind is _Kind.MESSAGE:
        return _document(value)
    if kind is _Kind.INT64:
        return str(value)
    if kind is _Kind.FLOAT:
        return value if math.isfinite(value) else _non_finite_name(value)
    if kind is _Kind.BYTES:
        return base64.b64encode(value).decode("ascii")
    return value


def _non_finite_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
