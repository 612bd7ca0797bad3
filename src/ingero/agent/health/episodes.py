"""Episodes: from the sample that found a straggler to the one that found it recovered, under one id.

Pure: makes the messages and spans of an episode; sending them is the loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from ingero.agent.health.push_body import NodeIdentity, StragglerMessage, build_resource
from ingero.otlp.codec import structs
from ingero.otlp.codec.build import build_attributes, build_traces
from ingero.otlp.codec.export import Export
from ingero.wire.names import Attribute, DetectionMode, DominantSignal
from ingero.wire.uds import StragglerResolved, StragglerState, format_timestamp

SPAN_SCOPE = "ingero.detection"


class EpisodeKind(StrEnum):
    """What an episode is about; the value is its span's name."""

    STRAGGLER = "ingero.detection.straggler"
    DEGRADATION = "ingero.detection.degradation"


class EpisodeOutcome(StrEnum):
    """How an episode ended.

    The node recovered; it stopped working; it began to calibrate again, so the baseline no longer applies; or the
    agent ended first.
    """

    RESOLVED = "resolved"
    WENT_IDLE = "went_idle"
    RECALIBRATED = "recalibrated"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEpisode:
    """A straggler or a degradation, while it lasts.

    Attributes:
        event_id: UUID; the same on every push, message and span of the episode.
        kind: What it is about.
        start_ns: Wall time of the sample that found it.
        mode: Last detection mode under which the node was judged.
        threshold: Last threshold.
        score: Last score.
        dominant: Last dominant signal.
    """

    event_id: str
    kind: EpisodeKind
    start_ns: int
    mode: DetectionMode = DetectionMode.NONE
    threshold: float = 0.0
    score: float = 0.0
    dominant: DominantSignal = DominantSignal.UNKNOWN

    def judged(
        self, mode: DetectionMode, threshold: float, score: float, dominant: DominantSignal
    ) -> NodeEpisode:
        """The same episode after another sample."""
        return replace(self, mode=mode, threshold=threshold, score=score, dominant=dominant)

    def event(self, wall_ns: int, *, is_straggler: bool) -> StragglerMessage:
        """The event push for now."""
        return StragglerMessage(
            is_straggler=is_straggler,
            mode=self.mode,
            threshold=self.threshold,
            score=self.score,
            dominant=self.dominant,
            event_id=self.event_id,
            wall_ns=wall_ns,
        )


def build_state_message(
    identity: NodeIdentity, episode: NodeEpisode, wall_ns: int, labels: dict[str, str] | None = None
) -> StragglerState:
    """The local-socket line of a straggler, with the latest annotations of its workload."""
    return StragglerState(
        node_id=identity.node_id,
        cluster_id=identity.cluster_id,
        score=episode.score,
        threshold=episode.threshold,
        detection_mode=episode.mode.value,
        dominant_signal=episode.dominant.value,
        timestamp=format_timestamp(wall_ns),
        event_id=episode.event_id,
        rank=identity.rank if identity.world_size else None,
        world_size=identity.world_size,
        labels=labels or {},
    )


def build_resolved_message(
    identity: NodeIdentity, episode: NodeEpisode, wall_ns: int
) -> StragglerResolved:
    """The local-socket line of a recovery."""
    return StragglerResolved(
        node_id=identity.node_id,
        cluster_id=identity.cluster_id,
        timestamp=format_timestamp(wall_ns),
        event_id=episode.event_id,
        rank=identity.rank if identity.world_size else None,
        world_size=identity.world_size,
    )


@dataclass(frozen=True, slots=True)
class SpanMaker:
    """Makes the span of an ended episode.

    Attributes:
        identity: Who saw it.
        version: The agent's version.
        random_bits: ``random_bits(n)`` gives n random bits, for ids.
    """

    identity: NodeIdentity
    version: str
    random_bits: Callable[[int], int]

    def build(self, episode: NodeEpisode, end_ns: int, outcome: EpisodeOutcome) -> Export:
        """One span from the sample that found the episode to the one that ended it."""
        identity = self.identity
        span = structs.Span(
            trace_id=f"{self.random_bits(128) or 1:032x}",
            span_id=f"{self.random_bits(64) or 1:016x}",
            name=episode.kind.value,
            kind=1,  # SPAN_KIND_INTERNAL
            start_time_unix_nano=episode.start_ns,
            end_time_unix_nano=max(end_ns, episode.start_ns),
            attributes=build_attributes({
                Attribute.CGROUP_PATH_HASH: identity.cohort,
                Attribute.WORKLOAD_TYPE: identity.workload_type,
                Attribute.GPU_MODEL: identity.gpu_model,
                Attribute.CLUSTER_ID: identity.cluster_id,
                Attribute.EVENT_ID: episode.event_id,
            }),
            events=[
                structs.SpanEvent(
                    time_unix_nano=end_ns,
                    name="outcome",
                    attributes=build_attributes({"status": outcome.value}),
                )
            ],
        )
        resource = {
            Attribute.SERVICE_NAME: "ingero",
            Attribute.SERVICE_VERSION: self.version,
            Attribute.K8S_NODE_NAME: identity.node_id,
            **build_resource(identity),
        }
        return build_traces(resource, [span], SPAN_SCOPE, self.version)
