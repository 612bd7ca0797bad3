"""What the agent prints: a line a tick for people, an object a tick for programs, a note when something changes.

Pure: text from samples and counters; the command prints it.
"""

from __future__ import annotations

from typing import Any, Final

from ingero.agent.events.socket import LocalEventServer
from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.loop import HealthSample
from ingero.agent.health.poll import ThresholdPoller
from ingero.agent.health.push_queue import PushQueue
from ingero.agent.health.signals.reading import SIGNAL_NAMES
from ingero.agent.health.transport import PushReply
from ingero.units import NS_PER_S
from ingero.wire.uds import format_timestamp

REPEAT_NS: Final = 300 * NS_PER_S
"""The same note is not repeated within this time."""


def build_record(
    sample: HealthSample, cache: ThresholdCache, queue: PushQueue, stream: LocalEventServer | None
) -> dict[str, Any]:
    """One sample as a JSON object; what is not known is null.

    A sample's own push is under way when the sample is printed: ``offered`` says that there is one, ``pushed`` what
    became of the last one that ended.
    """
    counts, outcome, last = queue.counts, cache.counts, queue.last
    record: dict[str, Any] = {
        "time": format_timestamp(sample.wall_ns),
        "state": sample.state.value,
        "score": sample.score,
        "signals": dict(zip((name.value for name in SIGNAL_NAMES), sample.shares, strict=True)),
        "mode": sample.applied.mode.value,
        "threshold": sample.applied.threshold,
        "straggler": sample.is_straggler,
        "event_id": sample.event_id or None,
        "dominant_signal": sample.dominant.value,
        "degraded": sample.is_degraded,
        "tick": sample.is_tick,
        "offered": sample.is_pushed,
        "pushed": last.is_taken if last else None,
        "early": sample.is_early,
        "fleet": {
            "reachable": cache.is_reachable or _is_refused(queue),
            "refused": _is_refused(queue),
            "last_answer": queue.last_detail or None,
            "pushes_taken": counts.n_taken,
            "pushes_failed": counts.n_failed,
            "pushes_retried": counts.n_retried,
            "pushes_superseded": counts.n_superseded,
            "events_taken": counts.n_extras_taken,
            "events_failed": counts.n_extras_failed,
            "events_dropped": counts.n_extras_dropped,
            "pauses": counts.n_pauses,
            "threshold_hits": outcome.n_hits,
            "threshold_misses": outcome.n_misses,
            "threshold_rejected": outcome.n_rejected,
            "panic": cache.is_withheld,
        },
    }
    if stream is not None:
        record["readers"] = {
            "connected": stream.n_readers,
            "published": stream.counts.n_published,
            "sent": stream.counts.n_sent,
            "dropped": stream.counts.n_dropped,
            "unheard": stream.counts.n_without_reader,
            "refused": stream.counts.n_refused,
        }
    return record


def _is_refused(queue: PushQueue) -> bool:
    """Whether the last push was answered and refused."""
    return bool(queue.last and queue.last.is_refused)


def write_line(sample: HealthSample, queue: PushQueue) -> str:
    """One sample as a line of fixed columns; the last says what became of the pushes so far."""
    score = "  -  " if sample.score is None else f"{sample.score:.3f}"
    applied = "  -  " if sample.applied.threshold is None else f"{sample.applied.threshold:.3f}"
    verdict = f"STRAGGLER ({sample.dominant.value})" if sample.is_straggler else "ok"
    way = "early" if sample.is_early else "push" if sample.is_pushed else "quiet"
    return (
        f"{format_timestamp(sample.wall_ns)[11:19]}  {sample.state.value:<11}  score {score}  "
        f"threshold {applied}  {sample.applied.mode.value:<14}  {verdict:<24}  {way:<5}  {_write_outcome(queue)}"
    )


def _write_outcome(queue: PushQueue) -> str:
    counts, last = queue.counts, queue.last
    if last is None:
        return "no answer yet"
    failed = f", {counts.n_failed} failed" if counts.n_failed else ""
    now = "" if last.is_taken else "; refused" if last.is_refused else "; no answer"
    return f"{counts.n_taken} taken{failed}{now}"


class ChangeNotes:
    """Notes on what changed since the last sample; each at most once in five minutes."""

    def __init__(
        self, cache: ThresholdCache, queue: PushQueue, poller: ThresholdPoller | None
    ) -> None:
        self._cache = cache
        self._queue = queue
        self._poller = poller
        self._noted_ns: dict[str, int] = {}
        self._last: HealthSample | None = None
        self._trouble = ""
        self._was_withheld = False
        self._n_rejected = 0
        self._n_polls_failed = 0

    def notes(self, sample: HealthSample, mono_ns: int) -> list[str]:
        """What a person should read, oldest cause first."""
        last, self._last = self._last, sample
        notes = self._path_notes(mono_ns)
        if last is None:
            return notes
        if sample.state is not last.state:
            notes.append(f"state: {last.state.value} → {sample.state.value}")
        if sample.applied.mode is not last.applied.mode:
            notes.append(f"mode: {last.applied.mode.value} → {sample.applied.mode.value}")
        if sample.event_id and sample.event_id != last.event_id:
            notes.append(f"straggler: episode {sample.event_id} opened")
        elif last.event_id and not sample.event_id:
            notes.append(f"straggler: episode {last.event_id} closed")
        if sample.is_degraded and not last.is_degraded:
            notes.append("degradation: a signal lost more than half of its long-term level")
        for signal, reason in sample.anomalies:
            if self._is_new(f"{signal} {reason}", mono_ns):
                notes.append(f"signal {signal} is {reason}; it counts as absent")
        return notes

    def note_once(self, note: str, mono_ns: int) -> list[str]:
        """The note, unless it was given within five minutes."""
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
            notes += self.note_once(reason, mono_ns)
        self._n_rejected = n_rejected
        if self._poller is not None and self._poller.n_failed > self._n_polls_failed:
            self._n_polls_failed = self._poller.n_failed
            notes += self.note_once(f"threshold page: {self._poller.last_detail}", mono_ns)
        return notes

    def _trouble_notes(self, mono_ns: int) -> list[str]:
        last, was = self._queue.last, self._trouble
        if last is None:
            return []
        if last.is_taken:
            self._trouble = ""
            return ["fleet: takes pushes again"] if was else []
        self._trouble = self._find_trouble(last) or was
        return self.note_once(self._trouble, mono_ns) if self._trouble != was else []

    def _find_trouble(self, last: PushReply) -> str:
        """Why Fleet does not take pushes: a refusal at once, no answer after three pushes; empty before that."""
        if last.is_refused:
            return f"fleet: refused: {last.detail}"
        if not last.is_cut_off:
            return f"fleet: not sent: {last.detail}"
        return "" if self._cache.is_reachable else f"fleet: unreachable: {last.detail}"

    def _is_new(self, key: str, mono_ns: int) -> bool:
        noted_ns = self._noted_ns.get(key)
        if noted_ns is not None and mono_ns - noted_ns < REPEAT_NS:
            return False
        self._noted_ns[key] = mono_ns
        return True
