"""What the score map needs from a push, without building anything for the rest of it.

This is the hot path of Fleet: it touches the resource, three metrics by name and one point of each. A protobuf
resource is recognised by its serialised bytes and not walked again while an agent keeps sending the same one; reading a
struct costs less than recognising it, so there only the facts are shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Final, TypeAlias

from ingero.otlp.codec import structs
from ingero.otlp.codec.export import Export
from ingero.otlp.codec.values import message_attributes, tree_attributes
from ingero.otlp.names import Signal
from ingero.wire.names import Attribute, MetricName

UNKNOWN_RANK: Final = -1
_RESOURCES: Final = {
    Signal.METRICS: "resource_metrics",
    Signal.LOGS: "resource_logs",
    Signal.TRACES: "resource_spans",
}

_REQUESTS: Final[dict[Signal, Callable[[list[structs.Proto]], structs.Request]]] = {
    Signal.METRICS: structs.MetricsRequest,
    Signal.LOGS: structs.LogsRequest,
    Signal.TRACES: structs.TracesRequest,
}

_Apply: TypeAlias = "Callable[[PushFacts, float, structs.Proto], None]"
_ResourceKey: TypeAlias = tuple[str, str, int, int, str, str]

# Plain strings: reading an enum member's value on every push would cost more than the lookup it serves.
_NODE_ID: Final = str(Attribute.NODE_ID)
_CLUSTER_ID: Final = str(Attribute.CLUSTER_ID)
_WORLD_SIZE: Final = str(Attribute.WORLD_SIZE)
_NODE_RANK: Final = str(Attribute.NODE_RANK)
_PROVIDER: Final = str(Attribute.PROVIDER)
_K8S_NODE_NAME: Final = str(Attribute.K8S_NODE_NAME)
_HOST_NAME: Final = "host.name"
_EVENT_ID: Final = str(Attribute.EVENT_ID)
_GPU_MODEL: Final = str(Attribute.GPU_MODEL)
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
        info_point: Of ``ingero.node.info``; read when `gpu_model` is asked for.
        straggler_event: 1 while straggling, 0 once on recovery, None without an event.
        event_id: ``ingero.event.id``: a new one each tick, so not an episode's identity.
        event_attributes: The event's other attributes by name, such as ``threshold`` and ``dominant_signal``.
    """

    resource: ResourceFacts
    health_score: float | None = None
    state: str = ""
    workload_type: str = ""
    cohort: str = ""
    info_point: structs.Proto | None = field(default=None, compare=False, repr=False)
    straggler_event: int | None = None
    event_id: str = ""
    event_attributes: dict[str, structs.Value] | None = None

    @property
    def gpu_model(self) -> str:
        """Of ``ingero.node.info``; empty without it."""
        return (
            ""
            if self.info_point is None
            else _text(_attributes_of(self.info_point).get(_GPU_MODEL))
        )


class ResourceCache:
    """Resources already read, by their serialised bytes or by what was read. Not thread-safe: one per pipeline.

    Args:
        max_entries: When this many are known the cache starts over, so a sender of ever-new resources costs time,
            never memory.
    """

    __slots__ = ("_facts", "_max_entries", "_max_key_bytes")

    def __init__(self, max_entries: int = 20_000) -> None:
        self._facts: dict[bytes | _ResourceKey, ResourceFacts] = {}
        self._max_entries = max_entries
        self._max_key_bytes = 4096

    def __len__(self) -> int:
        return len(self._facts)

    def get_facts(self, resource: structs.Proto) -> ResourceFacts:
        """The facts of a upb Resource."""
        key = resource.SerializeToString()
        facts = self._facts.get(key)
        if facts is None:
            facts = _read_resource(message_attributes(resource.attributes))
            if len(key) <= self._max_key_bytes:
                self._keep(key, facts)
        return facts

    def share_facts(self, attributes: list[structs.KeyValue]) -> ResourceFacts:
        """The facts of a struct Resource's attributes."""
        found = {item.key: item.value for item in attributes}
        key = (
            _text_of(found.get(_NODE_ID)),
            _text_of(found.get(_CLUSTER_ID)),
            _integer_of(found.get(_WORLD_SIZE), 0),
            _integer_of(found.get(_NODE_RANK), UNKNOWN_RANK),
            _text_of(found.get(_PROVIDER)),
            _text_of(found.get(_K8S_NODE_NAME)) or _text_of(found.get(_HOST_NAME)),
        )
        facts = self._facts.get(key)
        if facts is None:
            facts = _build_facts(key)
            node_id, _, world_size, rank, _, host = key
            shared = (node_id, facts.cluster_id, world_size, rank, facts.provider, host)
            if sum(map(len, (key[0], key[1], key[4], key[5]))) <= self._max_key_bytes:
                self._keep(shared, facts)
        return facts

    def _keep(self, key: bytes | _ResourceKey, facts: ResourceFacts) -> None:
        if len(self._facts) >= self._max_entries:
            self._facts.clear()
        self._facts[key] = facts


def read_push(export: Export, cache: ResourceCache) -> list[PushFacts]:
    """Read a metrics export as pushes: one entry per resource, in order; several when a collector batches agents.

    Args:
        export: A metrics export.
        cache: Kept by the caller between pushes.
    """
    is_message = export.is_message
    pushes = []
    for entry, metrics in export.metrics:
        facts = PushFacts(read_resource(entry, cache, is_message=is_message))
        for _, _, name, kind, points in metrics:
            apply = _APPLY.get(name)
            if apply is not None and points and kind in _NUMBER_KINDS:
                point = points[-1]
                value = _message_number(point) if is_message else _tree_number(point)
                if value is not None:
                    apply(facts, value, point)
        pushes.append(facts)
    return pushes


def list_resources(export: Export) -> Sequence[structs.Proto]:
    """Every ResourceMetrics, ResourceLogs or ResourceSpans of an export."""
    root = export.root
    entries: Sequence[structs.Proto] = getattr(root, _RESOURCES[export.signal])
    return entries


def build_export(signal: Signal, entries: Sequence[structs.Proto]) -> Export:
    """An export of these ResourceMetrics, ResourceLogs or ResourceSpans, which are structs."""
    return Export.from_tree(signal, _REQUESTS[signal](list(entries)))


def read_resource(entry: structs.Proto, cache: ResourceCache, *, is_message: bool) -> ResourceFacts:
    """Who produced a ResourceMetrics, ResourceLogs or ResourceSpans."""
    if is_message:
        return cache.get_facts(entry.resource)
    return cache.share_facts(entry.resource.attributes if entry.resource else [])


def _text(value: structs.Value) -> str:
    return value if isinstance(value, str) else ""


def _integer(value: structs.Value, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def _text_of(value: structs.Proto) -> str:
    """The text of an AnyValue of either form; empty when it holds none."""
    return (value.string_value or "") if value is not None else ""


def _integer_of(value: structs.AnyValue | None, default: int) -> int:
    return default if value is None or value.int_value is None else value.int_value


def _read_resource(found: dict[str, structs.Value]) -> ResourceFacts:
    return _build_facts((
        _text(found.get(_NODE_ID)),
        _text(found.get(_CLUSTER_ID)),
        _integer(found.get(_WORLD_SIZE), 0),
        _integer(found.get(_NODE_RANK), UNKNOWN_RANK),
        _text(found.get(_PROVIDER)),
        _text(found.get(_K8S_NODE_NAME)) or _text(found.get(_HOST_NAME)),
    ))


def _build_facts(key: _ResourceKey) -> ResourceFacts:
    """Facts whose cluster and provider are one text each for all nodes that share them."""
    node_id, cluster_id, world_size, rank, provider, host = key
    return ResourceFacts(node_id, intern(cluster_id), world_size, rank, intern(provider), host)


def _message_number(point: structs.Proto) -> float | None:
    which = point.WhichOneof("value")
    if which is None:
        return None
    value: float = point.as_double if which == "as_double" else point.as_int
    return value


def _tree_number(point: structs.NumberDataPoint) -> float | None:
    return point.as_double if point.as_double is not None else point.as_int


def _apply_score(facts: PushFacts, value: float, point: structs.Proto) -> None:
    facts.health_score = float(value)
    for item in point.attributes:
        key = item.key
        if key == _NODE_STATE:
            facts.state = _text_of(item.value)
        elif key == _WORKLOAD_TYPE:
            facts.workload_type = _text_of(item.value)
        elif key == _COHORT:
            facts.cohort = _text_of(item.value)


def _apply_event(facts: PushFacts, value: float, point: structs.Proto) -> None:
    attributes = _attributes_of(point)
    facts.straggler_event = 1 if value else 0
    facts.event_id = _text(attributes.pop(_EVENT_ID, ""))
    facts.event_attributes = attributes


def _apply_info(facts: PushFacts, _value: float, point: structs.Proto) -> None:
    facts.info_point = point


def _attributes_of(point: structs.Proto) -> dict[str, structs.Value]:
    is_struct = isinstance(point, structs.NumberDataPoint)
    return (tree_attributes if is_struct else message_attributes)(point.attributes)


_APPLY: Final[dict[str, _Apply]] = {
    MetricName.HEALTH_SCORE.value: _apply_score,
    MetricName.STRAGGLER_EVENT.value: _apply_event,
    MetricName.NODE_INFO.value: _apply_info,
}
_NUMBER_KINDS: Final = frozenset({"gauge", "sum"})
