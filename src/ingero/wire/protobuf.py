"""Protobuf messages of other projects, declared by the fields that we use, because no package of them is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_KINDS: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _KINDS.TYPE_BOOL,
    "double": _KINDS.TYPE_DOUBLE,
    "int32": _KINDS.TYPE_INT32,
    "int64": _KINDS.TYPE_INT64,
    "sint32": _KINDS.TYPE_SINT32,
    "sint64": _KINDS.TYPE_SINT64,
    "string": _KINDS.TYPE_STRING,
    "uint32": _KINDS.TYPE_UINT32,
    "uint64": _KINDS.TYPE_UINT64,
}


def declare_messages(
    package: str, messages: Mapping[str, Mapping[str, tuple[int, str]]]
) -> dict[str, type[Any]]:
    """The classes of some messages.

    Args:
        package: A name for all of them.
        messages: Fields by message: a number, and a scalar type or a message, with ``*`` in front where it is repeated.
            An enumeration is an ``int32``, and a map repeats a message of ``key`` 1 and ``value`` 2. Fields that are
            not named are skipped when read.
    """
    scope = f"ingero.{package}"
    file = descriptor_pb2.FileDescriptorProto(
        name=f"ingero/{package}.proto", package=scope, syntax="proto3"
    )
    for message, fields in messages.items():
        declared = file.message_type.add(name=message)
        for name, (number, kind) in fields.items():
            of = kind.removeprefix("*")
            one = declared.field.add(name=name, number=number)
            one.label = _KINDS.LABEL_OPTIONAL if of == kind else _KINDS.LABEL_REPEATED
            one.type = _SCALARS.get(of, _KINDS.TYPE_MESSAGE)
            if of not in _SCALARS:
                one.type_name = f".{scope}.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{scope}.{name}"))
        for name in messages
    }
