"""The open episodes of one node, and the messages about them.

Pure but for the ids it is given: the loop sends what is collected in ``events``, ``messages`` and ``spans``.
"""

from __future__ import annotations

from collections.abc import Callable

from ingero.agent.health.episodes import (
    EpisodeKind,
    EpisodeOutcome,
    NodeEpisode,
    SpanMaker,
    build_resolved_message,
    build_state_message,
)
from ingero.agent.health.push_body import NodeIdentity, StragglerMessage
from ingero.agent.health.threshold_choice import AppliedThreshold
from ingero.otlp.codec.export import Export
from ingero.wire.names import DominantSignal
from ingero.wire.uds import StragglerResolved, StragglerState

FindLabels = Callable[[], dict[str, str]]


class NodeEpisodes:
    """Opens and closes episodes.

    Args:
        identity: The node.
        new_id: Makes the id of an episode.
        spans: Makes spans; None when detections are not traced.
        find_labels: The latest annotations of the node's workload; None without annotations.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        new_id: Callable[[], str],
        spans: SpanMaker | None = None,
        find_labels: FindLabels | None = None,
    ) -> None:
        self._identity = identity
        self._new_id = new_id
        self._spans = spans
        self._find_labels = find_labels or dict
        self._pending_events: dict[str, StragglerMessage] = {}
        self.straggler: NodeEpisode | None = None
        self.degradation: NodeEpisode | None = None
        self.messages: list[StragglerState | StragglerResolved] = []
        self.spans: list[Export] = []
        self.n_opened = 0
        self.n_closed = 0

    def judge(
        self, applied: AppliedThreshold, score: float, dominant: DominantSignal, wall_ns: int
    ) -> None:
        """The node is under the threshold: open an episode, or go on with the open one."""
        assert applied.threshold is not None
        if self.straggler is None:
            self.straggler = NodeEpisode(
                event_id=self._new_id(), kind=EpisodeKind.STRAGGLER, start_ns=wall_ns
            )
            self.n_opened += 1
        self.straggler = self.straggler.judged(applied.mode, applied.threshold, score, dominant)

    def repeat_state(self, wall_ns: int) -> None:
        """Send the state of the open episode again."""
        if self.straggler is None:
            return
        self._replace_pending(self.straggler.event(wall_ns, is_straggler=True))
        self.messages.append(
            build_state_message(self._identity, self.straggler, wall_ns, self._find_labels())
        )

    def close(self, outcome: EpisodeOutcome, wall_ns: int, *, score: float | None = None) -> None:
        """End the straggler episode, if there is one; under the same id everywhere."""
        episode, self.straggler = self.straggler, None
        if episode is None:
            return
        self.n_closed += 1
        if score is not None:
            episode = episode.judged(episode.mode, episode.threshold, score, episode.dominant)
        self._replace_pending(episode.event(wall_ns, is_straggler=False))
        self.messages.append(build_resolved_message(self._identity, episode, wall_ns))
        self._end_span(episode, outcome, wall_ns)

    def note_degradation(self, wall_ns: int, *, is_degraded: bool) -> None:
        """Open or close the degradation episode; it has a span and nothing else."""
        if is_degraded and self.degradation is None:
            self.degradation = NodeEpisode(
                event_id=self._new_id(), kind=EpisodeKind.DEGRADATION, start_ns=wall_ns
            )
        elif not is_degraded and self.degradation is not None:
            self._end_span(self.degradation, EpisodeOutcome.RESOLVED, wall_ns)
            self.degradation = None

    def interrupt(self, wall_ns: int) -> None:
        """The agent ends: spans of open episodes are sent; no message says that the node recovered."""
        for episode in (self.straggler, self.degradation):
            if episode is not None:
                self._end_span(episode, EpisodeOutcome.INTERRUPTED, wall_ns)

    def take_events(self) -> list[StragglerMessage]:
        """The events that wait for Fleet, oldest episode first; they no longer wait."""
        owed, self._pending_events = list(self._pending_events.values()), {}
        return owed

    def take_messages(self) -> list[StragglerState | StragglerResolved]:
        """The messages for local readers."""
        messages, self.messages = self.messages, []
        return messages

    def take_spans(self) -> list[Export]:
        """The spans of ended episodes."""
        spans, self.spans = self.spans, []
        return spans

    def _replace_pending(self, event: StragglerMessage) -> None:
        """Keep the latest event per episode: one that was not sent yet is replaced by the newer."""
        self._pending_events[event.event_id] = event

    def _end_span(self, episode: NodeEpisode, outcome: EpisodeOutcome, wall_ns: int) -> None:
        if self._spans is not None:
            self.spans.append(self._spans.build(episode, wall_ns, outcome))
