"""The open episodes of one node, and what is to be told about them.

Pure but for the ids it is given: the loop sends what piles up in ``events``, ``messages`` and ``spans``.
"""

from __future__ import annotations

from collections.abc import Callable

from ingero.agent.health.body import NodeIdentity, StragglerMessage
from ingero.agent.health.episodes import (
    EpisodeKind,
    EpisodeOutcome,
    NodeEpisode,
    SpanMaker,
    build_resolved_message,
    build_state_message,
)
from ingero.agent.health.mode import Bar
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
        find_labels: What the node's workload said last of itself; None when nobody asks it.
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
        self._owed: dict[str, StragglerMessage] = {}
        self.straggler: NodeEpisode | None = None
        self.degradation: NodeEpisode | None = None
        self.messages: list[StragglerState | StragglerResolved] = []
        self.spans: list[Export] = []
        self.n_opened = 0
        self.n_closed = 0

    def judge(self, bar: Bar, score: float, dominant: DominantSignal, wall_ns: int) -> None:
        """The node is under the bar: open an episode, or go on with the open one."""
        assert bar.threshold is not None
        if self.straggler is None:
            self.straggler = NodeEpisode(
                event_id=self._new_id(), kind=EpisodeKind.STRAGGLER, start_ns=wall_ns
            )
            self.n_opened += 1
        self.straggler = self.straggler.judged(bar.mode, bar.threshold, score, dominant)

    def tell(self, wall_ns: int) -> None:
        """Say once more that the open episode lasts."""
        if self.straggler is None:
            return
        self._owe(self.straggler.event(wall_ns, is_straggler=True))
        self.messages.append(
            build_state_message(self._identity, self.straggler, wall_ns, self._find_labels())
        )

    def close(self, outcome: EpisodeOutcome, wall_ns: int, *, score: float | None = None) -> None:
        """End the straggler episode, if there is one; the same id says so everywhere."""
        episode, self.straggler = self.straggler, None
        if episode is None:
            return
        self.n_closed += 1
        if score is not None:
            episode = episode.judged(episode.mode, episode.threshold, score, episode.dominant)
        self._owe(episode.event(wall_ns, is_straggler=False))
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
        """The agent ends: spans of open episodes are kept from being lost; nobody is told that the node is well."""
        for episode in (self.straggler, self.degradation):
            if episode is not None:
                self._end_span(episode, EpisodeOutcome.INTERRUPTED, wall_ns)

    def take_events(self) -> list[StragglerMessage]:
        """The events owed to Fleet, oldest episode first; owed no longer."""
        owed, self._owed = list(self._owed.values()), {}
        return owed

    def take_messages(self) -> list[StragglerState | StragglerResolved]:
        """The messages for local readers."""
        messages, self.messages = self.messages, []
        return messages

    def take_spans(self) -> list[Export]:
        """The spans of ended episodes."""
        spans, self.spans = self.spans, []
        return spans

    def _owe(self, event: StragglerMessage) -> None:
        """Keep the latest event per episode: what was not sent yet is replaced by the newer word."""
        self._owed[event.event_id] = event

    def _end_span(self, episode: NodeEpisode, outcome: EpisodeOutcome, wall_ns: int) -> None:
        if self._spans is not None:
            self.spans.append(self._spans.build(episode, wall_ns, outcome))
