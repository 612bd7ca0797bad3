"""What the agent says about itself: a line a tick for people, an object a tick for programs, a note when something turns.

Pure: text from looks and counters; printing is the command's.
"""

from __future__ import annotations

from typing import Any, Final

from ingero.agent.events.socket import RemediationStream
from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.lane import PushLane
from ingero.agent.health.loop import Look
from ingero.agent.health.poll import ThresholdPoller
from ingero.agent.health.signals.reading import SIGNAL_NAMES
from ingero.agent.health.transport import PushReply
from ingero.units import NS_PER_S
from ingero.wire.uds import format_timestamp

REPEAT_NS: Final = 300 * NS_PER_S
"""The same note is not repeated within this time."""


def build_record(
    look: Look, cache: ThresholdCache, lane: PushLane, stream: RemediationStream | None
) -> dict[str, Any]:
    """One look as a JSON object; what is not known is null.

    A look's own push is under way when the look is told: ``offered`` says that there is one, ``pushed`` what became of
    the last one that ended.
    """
    counts, heard, last = lane.counts, cache.counts, lane.last
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
        "offered": look.is_pushed,
        "pushed": last.is_taken if last else None,
        "early": look.is_early,
        "fleet": {
            "reachable": cache.is_reachable or _is_refused(lane),
            "refused": _is_refused(lane),
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
            "panic": cache.is_withheld,
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


def _is_refused(lane: PushLane) -> bool:
    """Whether somebody answered the last push, and did not take it."""
    return bool(lane.last and lane.last.is_refused)


def write_line(look: Look, lane: PushLane) -> str:
    """One look as a line of fixed columns; the last says what became of the pushes so far."""
    score = "  -  " if look.score is None else f"{look.score:.3f}"
    bar = "  -  " if look.bar.threshold is None else f"{look.bar.threshold:.3f}"
    verdict = f"STRAGGLER ({look.dominant.value})" if look.is_straggler else "ok"
    way = "early" if look.is_early else "push" if look.is_pushed else "quiet"
    return (
        f"{format_timestamp(look.wall_ns)[11:19]}  {look.state.value:<11}  score {score}  "
        f"threshold {bar}  {look.bar.mode.value:<14}  {verdict:<24}  {way:<5}  {_write_outcome(lane)}"
    )


def _write_outcome(lane: PushLane) -> str:
    counts, last = lane.counts, lane.last
    if last is None:
        return "no answer yet"
    failed = f", {counts.n_failed} failed" if counts.n_failed else ""
    now = "" if last.is_taken else "; refused" if last.is_refused else "; no answer"
    return f"{counts.n_taken} taken{failed}{now}"


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
        self._trouble = ""
        self._was_withheld = False
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
        notes = self._trouble_notes(mono_ns)
        was_withheld, self._was_withheld = self._was_withheld, self._cache.is_withheld
        if self._was_withheld != was_withheld:
            notes.append(
                "fleet: panic: most of the cluster fell together, no node is judged"
                if self._was_withheld
                else "fleet: nodes are judged again"
            )
        n_rejected = self._cache.counts.n_rejected
        if n_rejected > self._n_rejected:
            reason = f"fleet: its threshold was rejected: {self._cache.last_rejection}"
            notes += self.say_once(reason, mono_ns)
        self._n_rejected = n_rejected
        if self._poller is not None and self._poller.n_failed > self._n_polls_failed:
            self._n_polls_failed = self._poller.n_failed
            notes += self.say_once(f"threshold page: {self._poller.last_detail}", mono_ns)
        return notes

    def _trouble_notes(self, mono_ns: int) -> list[str]:
        last, was = self._lane.last, self._trouble
        if last is None:
            return []
        if last.is_taken:
            self._trouble = ""
            return ["fleet: takes pushes again"] if was else []
        self._trouble = self._find_trouble(last) or was
        return self.say_once(self._trouble, mono_ns) if self._trouble != was else []

    def _find_trouble(self, last: PushReply) -> str:
        """Why Fleet does not take pushes: a refusal at once, silence once it lasts; empty before that."""
        if last.is_refused:
            return f"fleet: refused: {last.detail}"
        if not last.is_cut_off:
            return f"fleet: not sent: {last.detail}"
        return "" if self._cache.is_reachable else f"fleet: unreachable: {last.detail}"

    def _is_new(self, key: str, mono_ns: int) -> bool:
        said = self._said.get(key)
        if said is not None and mono_ns - said < REPEAT_NS:
            return False
        self._said[key] = mono_ns
        return True
