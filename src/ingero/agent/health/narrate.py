"""What the agent says about itself: a line a tick for people, an object a tick for programs, a note when something turns.

Pure: text from looks and counters; printing is the command's.
"""

from __future__ import annotations

from typing import Any, Final

from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.lane import PushLane
from ingero.agent.health.loop import Look
from ingero.agent.health.poll import ThresholdPoller
from ingero.agent.health.remediate import RemediationStream
from ingero.agent.health.signals import SIGNAL_NAMES
from ingero.units import NS_PER_S
from ingero.wire.uds import format_timestamp

REPEAT_NS: Final = 300 * NS_PER_S
"""The same note is not repeated within this time."""


def build_record(
    look: Look, cache: ThresholdCache, lane: PushLane, stream: RemediationStream | None
) -> dict[str, Any]:
    """One look as a JSON object; what is not known is null."""
    counts, heard = lane.counts, cache.counts
    record: dict[str, Any] = {
        "time": format_timestamp(look.wall_ns),
        "state": look.state.value,
        "score": look.score,
        "signals": dict(zip((name.value for name in SIGNAL_NAMES), look.shares, strict=True)),
        "mode": look.bar.mode.value,
        "threshold": look.bar.threshold,
        "straggler": look.is_straggler,
        "event_id": look.event_id or None,
        "dominant_signal": look.dominant.value,
        "degraded": look.is_degraded,
        "tick": look.is_tick,
        "pushed": look.is_pushed,
        "early": look.is_early,
        "fleet": {
            "reachable": cache.is_reachable,
            "last_answer": lane.last_detail or None,
            "pushes_taken": counts.n_taken,
            "pushes_failed": counts.n_failed,
            "pushes_retried": counts.n_retried,
            "pushes_superseded": counts.n_superseded,
            "events_taken": counts.n_extras_taken,
            "events_failed": counts.n_extras_failed,
            "events_dropped": counts.n_extras_dropped,
            "pauses": counts.n_pauses,
            "threshold_hits": heard.n_hits,
            "threshold_misses": heard.n_misses,
            "threshold_rejected": heard.n_rejected,
        },
    }
    if stream is not None:
        record["readers"] = {
            "connected": stream.n_readers,
            "published": stream.counts.n_published,
            "sent": stream.counts.n_sent,
            "dropped": stream.counts.n_dropped,
            "unheard": stream.counts.n_unheard,
            "refused": stream.counts.n_refused,
        }
    return record


def write_line(look: Look, cache: ThresholdCache) -> str:
    """One look as a line of fixed columns."""
    score = "  -  " if look.score is None else f"{look.score:.3f}"
    bar = "  -  " if look.bar.threshold is None else f"{look.bar.threshold:.3f}"
    verdict = f"STRAGGLER ({look.dominant.value})" if look.is_straggler else "ok"
    path = "" if cache.is_reachable else "  fleet unreachable"
    pushed = "pushed early" if look.is_early else "pushed" if look.is_pushed else "not pushed"
    return (
        f"{format_timestamp(look.wall_ns)[11:19]}  {look.state.value:<11}  score {score}  "
        f"threshold {bar}  {look.bar.mode.value:<14}  {verdict:<24}  {pushed}{path}"
    )


class Narrator:
    """Notes what turned since the last look; the same thing at most once in five minutes."""

    def __init__(
        self, cache: ThresholdCache, lane: PushLane, poller: ThresholdPoller | None
    ) -> None:
        self._cache = cache
        self._lane = lane
        self._poller = poller
        self._said: dict[str, int] = {}
        self._last: Look | None = None
        self._was_reachable = True
        self._n_rejected = 0
        self._n_polls_failed = 0

    def notes(self, look: Look, mono_ns: int) -> list[str]:
        """What a person should read, oldest cause first."""
        last, self._last = self._last, look
        notes = self._path_notes(mono_ns)
        if last is None:
            return notes
        if look.state is not last.state:
            notes.append(f"state: {last.state.value} → {look.state.value}")
        if look.bar.mode is not last.bar.mode:
            notes.append(f"mode: {last.bar.mode.value} → {look.bar.mode.value}")
        if look.event_id and look.event_id != last.event_id:
            notes.append(f"straggler: episode {look.event_id} opened")
        elif last.event_id and not look.event_id:
            notes.append(f"straggler: episode {last.event_id} closed")
        if look.is_degraded and not last.is_degraded:
            notes.append("degradation: a signal lost more than half of its long-term level")
        for signal, reason in look.anomalies:
            if self._is_new(f"{signal} {reason}", mono_ns):
                notes.append(f"signal {signal} is {reason}; it counts as absent")
        return notes

    def say_once(self, note: str, mono_ns: int) -> list[str]:
        """The note, unless it was said within five minutes."""
        return [note] if self._is_new(note, mono_ns) else []

    def _path_notes(self, mono_ns: int) -> list[str]:
        notes = []
        is_reachable, self._was_reachable, was = (
            self._cache.is_reachable,
            self._cache.is_reachable,
            self._was_reachable,
        )
        if was and not is_reachable:
            notes.append(f"fleet: unreachable: {self._lane.last_detail}")
        elif is_reachable and not was:
            notes.append("fleet: reachable again")
        n_rejected = self._cache.counts.n_rejected
        if n_rejected > self._n_rejected:
            reason = f"fleet: its threshold was rejected: {self._cache.last_rejection}"
            notes += self.say_once(reason, mono_ns)
        self._n_rejected = n_rejected
        if self._poller is not None and self._poller.n_failed > self._n_polls_failed:
            self._n_polls_failed = self._poller.n_failed
            notes += self.say_once(f"threshold page: {self._poller.last_detail}", mono_ns)
        return notes

    def _is_new(self, key: str, mono_ns: int) -> bool:
        said = self._said.get(key)
        if said is not None and mono_ns - said < REPEAT_NS:
            return False
        self._said[key] = mono_ns
        return True
