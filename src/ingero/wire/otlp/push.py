"""What the score map needs from a push, without building anything for the rest of it.

This is the hot path of Fleet: it touches the resource, three metrics by name and one point of each. A protobuf
resource is recognised by its serialised bytes and not walked again while an agent keeps sending the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from ingero.wire.names import Attribute, Metric
from ingero.wire.otlp import structs
from ingero.wire.otlp.export import Export

UNKNOWN_RANK: Final = -1

_Apply: TypeAlias = "Callable[[PushFacts, float, structs.Proto, dict[str, structs.Value]], None]"

# Plain strings: reading an enum member's value on every push would cost more than the lookup it serves.
_NODE_ID: Final = str(Attribute.NODE_ID)
_CLUSTER_ID: Final = str(Attribute.CLUSTER_ID)
_WORLD_SIZE: Final = str(Attribute.WORLD_SIZE)
_NODE_RANK: Final = str(Attribute.NODE_RANK)
_PROVIDER: Final = str(Attribute.PROVIDER)
_K8S_NODE_NAME: Final = str(Attribute.K8S_NODE_NAME)
_EVENT_ID: Final = str(Attribute.EVENT_ID)
_GPU_MODEL: Final = str(Attribute.GPU_MODEL)
_GPU_COUNT: Final = str(Attribute.GPU_COUNT)
_NODE_STATE: Final = str(Attribute.NODE_STATE)
_WORKLOAD_TYPE: Final = str(Attribute.WORKLOAD_TYPE)
_COHORT: Final = str(Attribute.CGROUP_PATH_HASH)


@dataclass(frozen=True, slots=True)
class ResourceFacts:
    """Who pushes, from the resource's attributes. Absent strings are empty.

    Attributes:
        node_id: ``ingero.node.id``.
        cluster_id: ``ingero.cluster.id``.
        world_size: ``ingero.world_size``; 0 when the job is not distributed or did not say.
        rank: ``ingero.node.rank``; `UNKNOWN_RANK` when absent. Rank 0 is a rank.
        provider: ``ingero.provider``.
        host: ``k8s.node.name``, ``host.name`` or empty.
    """

    node_id: str
    cluster_id: str
    world_size: int
    rank: int
    provider: str
    host: str


@dataclass(slots=True)
class PushFacts:
    """One resource of a push. What the push did not hold is None or empty.

    Where one metric holds several points, the last one counts.

    Attributes:
        resource: Who pushed; shared between pushes, so compare by ``is`` to see that nothing changed.
        health_score: As sent: may be NaN or out of range.
        state: ``ingero.node.state`` of the score point.
        workload_type: ``ingero.workload_type`` of the score point.
        cohort: ``ingero.cgroup_path_hash`` of the score point.
        time_unix_nano: Of the score point or event, as sent; 0 when absent. Not to be trusted.
        gpu_model: From ``ingero.node.info``.
        gpu_count: From ``ingero.node.info``; None without it.
        straggler_event: 1 while straggling, 0 once on recovery, None without an event.
        event_id: ``ingero.event.id``: a new one each tick, so not an episode's identity.
        event_attributes: The event's other attributes by name, such as ``threshold`` and ``dominant_signal``.
    """

    resource: ResourceFacts
    health_score: float | None = None
    state: str = ""
    workload_type: str = ""
    cohort: str = ""
    time_unix_nano: int = 0
    gpu_model: str = ""
    gpu_count: int | None = None
    straggler_event: int | None = None
    event_id: str = ""
    event_attributes: dict[str, structs.Value] | None = None

    @property
    def node_id(self) -> str:
        """``ingero.node.id`` of the resource."""
        return self.resource.node_id

    @property
    def cluster_id(self) -> str:
        """``ingero.cluster.id`` of the resource."""
        return self.resource.cluster_id


class ResourceCache:
    """Resources already read, by their serialised bytes. Not thread-safe: one per pipeline.

    Args:
        max_entries: When this many are known the cache starts over, so a sender of ever-new resources costs time,
            never memory.
    """

    __slots__ = ("_facts", "_max_entries", "_max_key_bytes")

    def __init__(self, max_entries: int = 20_000) -> None:
        self._facts: dict[bytes, ResourceFacts] = {}
        self._max_entries = max_entries
        self._max_key_bytes = 4096

    def __len__(self) -> int:
        return len(self._facts)

    def get_facts(self, resource: structs.Proto) -> ResourceFacts:
        """The facts of a upb Resource."""
        key = resource.SerializeToString()
        facts = self._facts.get(key)
        if facts is None:
            facts = _read_resource(resource.attributes, message_value)
            if len(key) <= self._max_key_bytes:
                if len(self._facts) >= self._max_entries:
                    self._facts.clear()
                self._facts[key] = facts
        return facts


def read_push(export: Export, cache: ResourceCache) -> list[PushFacts]:
    """Read a metrics export as pushes: one entry per resource, in order; several when a collector batches agents.

    Args:
        export: A metrics export.
        cache: Kept by the caller between pushes.
    """
    is_message = export.is_message
    read_point = _read_message if is_message else _read_tree
    pushes = []
    for entry, metrics in export.metrics:
        facts = PushFacts(read_resource(entry, cache, is_message=is_message))
        for _, _, name, kind, points in metrics:
            apply = _APPLY.get(name)
            if apply is not None and kind in _NUMBER_KINDS and points:
                read_point(facts, points[-1], apply)
        pushes.append(facts)
    return pushes


def read_resource(entry: structs.Proto, cache: ResourceCache, *, is_message: bool) -> ResourceFacts:
    """Who produced a ResourceMetrics, ResourceLogs or ResourceSpans."""
    if is_message:
        return cache.get_facts(entry.resource)
    return _read_resource(entry.resource.attributes if entry.resource else [], tree_value)


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


def _text(value: structs.Value) -> str:
    return value if isinstance(value, str) else ""


def _integer(value: structs.Value, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _read_resource(
    attributes: structs.Proto, value_of: Callable[[structs.Proto], structs.Value]
) -> ResourceFacts:
    found = {item.key: value_of(item.value) for item in attributes}
    return ResourceFacts(
        node_id=_text(found.get(_NODE_ID)),
        cluster_id=_text(found.get(_CLUSTER_ID)),
        world_size=_integer(found.get(_WORLD_SIZE), 0),
        rank=_integer(found.get(_NODE_RANK), UNKNOWN_RANK),
        provider=_text(found.get(_PROVIDER)),
        host=_text(found.get(_K8S_NODE_NAME)) or _text(found.get("host.name")),
    )


def _read_message(facts: PushFacts, point: structs.Proto, apply: _Apply) -> None:
    which = point.WhichOneof("value")
    if which is not None:
        value = point.as_double if which == "as_double" else point.as_int
        apply(facts, value, point, message_attributes(point.attributes))


def _read_tree(facts: PushFacts, point: structs.NumberDataPoint, apply: _Apply) -> None:
    value = point.as_double if point.as_double is not None else point.as_int
    if value is not None:
        apply(facts, value, point, tree_attributes(point.attributes))


def _apply_score(
    facts: PushFacts, value: float, point: structs.Proto, attributes: dict[str, structs.Value]
) -> None:
    facts.health_score = float(value)
    facts.time_unix_nano = point.time_unix_nano
    facts.state = _text(attributes.get(_NODE_STATE))
    facts.workload_type = _text(attributes.get(_WORKLOAD_TYPE))
    facts.cohort = _text(attributes.get(_COHORT))


def _apply_event(
    facts: PushFacts, value: float, point: structs.Proto, attributes: dict[str, structs.Value]
) -> None:
    facts.straggler_event = 1 if value else 0
    facts.time_unix_nano = facts.time_unix_nano or point.time_unix_nano
    facts.event_id = _text(attributes.pop(_EVENT_ID, ""))
    facts.event_attributes = attributes


def _apply_info(
    facts: PushFacts, _value: float, _point: structs.Proto, attributes: dict[str, structs.Value]
) -> None:
    facts.gpu_model = _text(attributes.get(_GPU_MODEL))
    count = attributes.get(_GPU_COUNT)
    facts.gpu_count = _integer(count, 0) if count is not None else None


_APPLY: Final[
    dict[str, Callable[[PushFacts, float, structs.Proto, dict[str, structs.Value]], None]]
] = {
    Metric.HEALTH_SCORE.value: _apply_score,
    Metric.STRAGGLER_EVENT.value: _apply_event,
    Metric.NODE_INFO.value: _apply_info,
}
_NUMBER_KINDS: Final = frozenset({"gauge", "sum"})
