"""AnyValue and attributes as Python values, from both encodings."""

from __future__ import annotations

from ingero.otlp.codec import structs


def message_value(value: structs.Proto) -> structs.Value:
    """A upb AnyValue as a Python value: str, bool, int, float, list, dict, bytes or None."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [message_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: message_value(item.value) for item in value.kvlist_value.values}
    return getattr(value, kind)  # type: ignore[no-any-return]


def tree_value(value: structs.AnyValue | None) -> structs.Value:
    """A struct AnyValue as a Python value: str, bool, int, float, list, dict, bytes or None."""
    if value is None:
        return None
    if value.string_value is not None:
        return value.string_value
    if value.int_value is not None:
        return value.int_value
    if value.double_value is not None:
        return value.double_value
    if value.bool_value is not None:
        return value.bool_value
    return _tree_container(value)


def _tree_container(value: structs.AnyValue) -> structs.Value:
    if value.array_value is not None:
        return [tree_value(item) for item in value.array_value.values]
    if value.kvlist_value is not None:
        return {item.key: tree_value(item.value) for item in value.kvlist_value.values}
    return value.bytes_value


def message_attributes(attributes: structs.Proto) -> dict[str, structs.Value]:
    """Attributes of a upb message by key; of two with one key the last counts."""
    return {item.key: message_value(item.value) for item in attributes}


def tree_attributes(attributes: list[structs.KeyValue]) -> dict[str, structs.Value]:
    """Attributes of a struct by key; of two with one key the last counts."""
    return {item.key: tree_value(item.value) for item in attributes}
