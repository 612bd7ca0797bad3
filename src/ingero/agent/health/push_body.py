"""The OTLP messages of a push.

Metrics, their order, units and attributes are the existing agent's, so that any Fleet reads them. A value that is not
known has no metric: absent is not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ingero.agent.health.signals.machine import State
from ingero.agent.health.signals.reading import Signals
from ingero.otlp.codec import structs
from ingero.otlp.codec.build import build_gauge, build_metrics, build_number
from ingero.otlp.codec.export import Export
from ingero.wire.names import (
    HEALTH_SCOPE_VERSION,
    Attribute,
    DetectionMode,
    DominantSignal,
    MetricName,
    Scope,
)

_SIGNAL_METRICS: Final = (
    MetricName.THROUGHPUT_RATIO,
    MetricName.COMPUTE_EFFICIENCY,
    MetricName.MEMORY_HEADROOM,
    MetricName.CPU_AVAILABILITY,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """Who pushes; fixed for the life of the agent.

    Attributes:
        cluster_id: The cluster.
        node_id: The node.
        workload_type: What kind of work the node does, such as ``training``.
        world_size: Ranks of the distributed job; 0 when it is not one.
        rank: This node's rank in it.
        provider: Cloud provider; empty when unknown.
        gpu_model: First GPU's name, verbatim; empty without a GPU, which leaves ``ingero.node.info`` out.
        n_gpus: GPUs of the node.
        cohort: Hash of the cgroup path; see `ingero.agent.health.signals.node_facts.hash_cgroup_path`.
    """

    cluster_id: str
    node_id: str
    workload_type: str = "unknown"
    world_size: int = 0
    rank: int = 0
    provider: str = ""
    gpu_model: str = ""
    n_gpus: int = 0
    cohort: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStatus:
    """The contents of one push.

    Attributes:
        score: 0..1.
        shares: The four signals as shares, throughput relative to the node's own past.
        state: The node's state.
        is_degraded: The degradation warning.
        mode: Where the threshold comes from.
        is_reachable: The agent's belief before this push.
        cohort: Hash of the workload's cgroup path.
        wall_ns: Time of the points.
    """

    score: float
    shares: Signals
    state: State
    is_degraded: bool
    mode: DetectionMode
    is_reachable: bool
    cohort: str
    wall_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerMessage:
    """One straggler event: 1 on every push of an episode, 0 once when it ends, one id throughout."""

    is_straggler: bool
    mode: DetectionMode
    threshold: float
    score: float
    dominant: DominantSignal
    event_id: str
    wall_ns: int


def build_push(identity: NodeIdentity, status: PushStatus) -> Export:
    """The regular push."""
    now_ns = status.wall_ns
    labels = {
        Attribute.NODE_STATE: status.state.value,
        Attribute.WORKLOAD_TYPE: identity.workload_type,
    }
    scored = {**labels, Attribute.CGROUP_PATH_HASH: status.cohort}
    metrics = [_gauge(MetricName.HEALTH_SCORE, status.score, now_ns, scored)]
    metrics += [
        _gauge(name, value, now_ns, labels)
        for name, value in zip(_SIGNAL_METRICS, status.shares, strict=True)
        if value is not None
    ]
    mode = {Attribute.DETECTION_MODE: status.mode.value}
    metrics += [
        _gauge(MetricName.DEGRADATION_WARNING, int(status.is_degraded), now_ns, labels),
        _gauge(MetricName.AGENT_DETECTION_MODE, 1, now_ns, mode),
        _gauge(MetricName.AGENT_FLEET_REACHABLE, int(status.is_reachable), now_ns),
    ]
    if identity.gpu_model:
        info = {Attribute.GPU_MODEL: identity.gpu_model, Attribute.GPU_COUNT: identity.n_gpus}
        metrics.append(_gauge(MetricName.NODE_INFO, 1, now_ns, info))
    metrics.append(_gauge(MetricName.NODE_WORLD_SIZE, identity.world_size, now_ns))
    return build_metrics(
        build_resource(identity, provider=identity.provider),
        metrics,
        Scope.HEALTH,
        HEALTH_SCOPE_VERSION,
    )


def build_event(identity: NodeIdentity, event: StragglerMessage) -> Export:
    """The straggler event, a request of its own; its resource has no provider, as on the wire."""
    attributes = {
        Attribute.DETECTION_MODE: event.mode.value,
        Attribute.THRESHOLD: event.threshold,
        Attribute.SCORE: event.score,
        Attribute.DOMINANT_SIGNAL: event.dominant.value,
        Attribute.EVENT_ID: event.event_id,
    }
    metric = _gauge(MetricName.STRAGGLER_EVENT, int(event.is_straggler), event.wall_ns, attributes)
    return build_metrics(build_resource(identity), [metric], Scope.HEALTH, HEALTH_SCOPE_VERSION)


def build_resource(identity: NodeIdentity, *, provider: str = "") -> dict[str, Any]:
    """Resource attributes in the wire's order."""
    resource: dict[str, Any] = {
        Attribute.NODE_ID: identity.node_id,
        Attribute.CLUSTER_ID: identity.cluster_id,
    }
    if identity.world_size > 0:
        resource[Attribute.WORLD_SIZE] = identity.world_size
        resource[Attribute.NODE_RANK] = identity.rank
    if provider:
        resource[Attribute.PROVIDER] = provider
    return resource


def encode_agent_json(export: Export) -> bytes:
    """Write OTLP/JSON in the existing agent's dialect: integers as numbers, times as strings.

    Both forms are OTLP/JSON; this is the one that every Fleet was tried with.
    """
    return msgspec.json.encode(_write_times(msgspec.to_builtins(export.tree)))


def _gauge(
    name: MetricName, value: float, wall_ns: int, attributes: dict[Attribute, Any] | None = None
) -> structs.Metric:
    points: Sequence[structs.NumberDataPoint] = [build_number(value, wall_ns, attributes)]  # type: ignore[arg-type]
    return build_gauge(name, points)


def _write_times(value: Any) -> Any:  # noqa: ANN401 - a JSON document
    if isinstance(value, list):
        return [_write_times(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: str(item) if key.endswith("UnixNano") else _write_times(item)
        for key, item in value.items()
    }
