"""Sends pushes to Fleet, one request at a time, beside the loop, so that a dead network never delays a sample.

A regular push that was not sent when the next is ready is superseded: Fleet wants the present. Events are kept, up to a
bound, until Fleet takes or refuses them, because no later push repeats them. One that was taken
although its answer was lost is sent twice, with the same id.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ingero.agent.health.cache import HeaderOutcome, ThresholdCache
from ingero.agent.health.transport import PushReply, PushTransport
from ingero.otlp.codec.export import Export
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS, NS_PER_S

RETRY_DELAY_NS: Final = 200 * NS_PER_MS
RETRY_SPREAD: Final = 0.2
MAX_PAUSE_NS: Final = 30 * NS_PER_S
"""An agent pushes again after this, however long Fleet asks it to wait: within Fleet's TTL, so it is not forgotten."""
MAX_EXTRAS: Final = 64

Pause = Callable[[int], None]
"""Waits that many nanoseconds, or less when the agent is to stop."""


@dataclass(slots=True)
class PushQueueCounts:
    """Requests since the start, by what became of them.

    Attributes:
        n_taken: Regular pushes that Fleet accepted.
        n_failed: Regular pushes that it did not, the second try included.
        n_retried: Second tries.
        n_superseded: Regular pushes replaced by newer ones before they were sent.
        n_extras_taken: Events and spans accepted.
        n_extras_failed: Tries to send events and spans that Fleet did not take.
        n_extras_dropped: Events and spans dropped because too many waited.
        n_pauses: Times Fleet asked the agent to wait.
    """

    n_taken: int = 0
    n_failed: int = 0
    n_retried: int = 0
    n_superseded: int = 0
    n_extras_taken: int = 0
    n_extras_failed: int = 0
    n_extras_dropped: int = 0
    n_pauses: int = 0


@dataclass(slots=True)
class _Waiting:
    regular: Export | None = None
    extras: deque[Export] = field(default_factory=deque)


@dataclass(slots=True)
class _Pause:
    """The pause that Fleet asked for last.

    Attributes:
        length_ns: How long; 0 when it did not ask.
        end_ns: Until when, on the monotonic clock.
    """

    length_ns: int = 0
    end_ns: int = 0


class PushQueue:
    """Sends what it is offered.

    Args:
        transport: How to send.
        cache: Receives every answer.
        clock: Stamps answers.
        pause: Waits before the second try.
        spread: A number in [-1, 1] each call, to spread the second tries of many agents.

    Attributes:
        counts: What happened to requests.
        last: What became of the last regular push; None before the first.
    """

    def __init__(
        self,
        transport: PushTransport,
        cache: ThresholdCache,
        clock: Clock,
        pause: Pause,
        spread: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._cache = cache
        self._clock = clock
        self._pause = pause
        self._spread = spread
        self._wake = threading.Condition()
        self._waiting = _Waiting()
        self._is_closed = False
        self._is_stalled = False
        self._pause_asked = _Pause()
        self.counts = PushQueueCounts()
        self.last: PushReply | None = None

    @property
    def last_detail(self) -> str:
        """What became of the last push, for people; empty before the first."""
        return self.last.detail if self.last else ""

    def offer(self, regular: Export | None, extras: Sequence[Export] = ()) -> None:
        """Hand over a push and its events; never blocks."""
        with self._wake:
            if regular is not None:
                self.counts.n_superseded += self._waiting.regular is not None
                self._waiting.regular = regular
            self._waiting.extras.extend(extras)
            self._bound()
            self._is_stalled = False
            self._wake.notify()

    def _bound(self) -> None:
        while len(self._waiting.extras) > MAX_EXTRAS:
            self._waiting.extras.popleft()
            self.counts.n_extras_dropped += 1

    def drain(self) -> None:
        """Send what waits, on this thread; events that do not get through wait for the next offer."""
        while (waiting := self._take()) is not None:
            self._send(waiting)

    def run(self) -> None:
        """Send until closed; for a thread of its own."""
        while True:
            with self._wake:
                while self._is_empty and not self._is_closed:
                    self._wake.wait()
                if self._is_empty:
                    return
            self.drain()

    def close(self) -> None:
        """Let `run` return once nothing waits."""
        with self._wake:
            self._is_closed = True
            self._is_stalled = False
            self._wake.notify()

    def release(self) -> None:
        """Close the connection; call it when nothing sends any more."""
        self._transport.close()

    def is_paused(self, mono_ns: int) -> bool:
        """Fleet asked the agent to wait, and the pause is not over."""
        return mono_ns < self._pause_asked.end_ns

    @property
    def pause_ns(self) -> int:
        """Length of the pause that the last answer asked for; 0 when it did not."""
        return self._pause_asked.length_ns

    @property
    def _is_empty(self) -> bool:
        return self._waiting.regular is None and (self._is_stalled or not self._waiting.extras)

    def _take(self) -> _Waiting | None:
        with self._wake:
            if self._is_empty:
                return None
            waiting, self._waiting = self._waiting, _Waiting()
            return waiting

    def _send(self, waiting: _Waiting) -> None:
        is_through = waiting.regular is None or self._send_regular(waiting.regular)
        while waiting.extras and is_through:
            answer = self._transport.send(waiting.extras[0], self._clock.wall_ns())
            self._record_response(answer)
            is_through = answer.is_settled
            self.counts.n_extras_taken += answer.is_taken
            self.counts.n_extras_failed += not answer.is_taken
            if is_through:
                waiting.extras.popleft()
        if waiting.extras:
            self._keep(waiting.extras)

    def _keep(self, extras: deque[Export]) -> None:
        """Put back what did not get through, before what came meanwhile."""
        with self._wake:
            self._waiting.extras.extendleft(reversed(extras))
            self._bound()
            self._is_stalled = self._waiting.regular is None

    def _send_regular(self, export: Export) -> bool:
        """Send a push; whether it was taken or refused permanently, so that events have a chance now."""
        answer = self._transport.send(export, self._clock.wall_ns())
        if answer.is_cut_off:
            self.counts.n_retried += 1
            self._pause(round(RETRY_DELAY_NS * (1 + RETRY_SPREAD * self._spread())))
            answer = self._transport.send(export, self._clock.wall_ns())
        self._record_response(answer)
        self._cache.note_push(is_taken=answer.is_taken)
        self.last = answer
        if answer.is_taken:
            self.counts.n_taken += 1
        else:
            self.counts.n_failed += 1
        self._note_pause(answer.retry_after_ns)
        return answer.is_settled

    def _record_response(self, answer: PushReply) -> None:
        has_headers = answer.headers.outcome is not HeaderOutcome.MISS  # of another Fleet
        if has_headers or not answer.is_cut_off:
            self._cache.record_response(answer.headers, self._clock.mono_ns())

    def _note_pause(self, retry_after_ns: int | None) -> None:
        length_ns = min(retry_after_ns or 0, MAX_PAUSE_NS)
        self._pause_asked.length_ns = length_ns
        if length_ns:
            self.counts.n_pauses += 1
            self._pause_asked.end_ns = self._clock.mono_ns() + length_ns
