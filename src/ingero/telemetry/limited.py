"""Log lines with fields, at most so many per subject and in all: what a person reads when something turns.

A subject is one thing that begins and ends, such as the quorum of a cluster or a destination that is away. A line over
the limit is not lost: the newest of its subject is held and written by `RateLimitedLog.flush` once the limit allows it,
with ``suppressed``, the number of lines in between. So the last line of a subject always says how it is.

Above `logging`, below every component. Any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from ingero.telemetry.clock import Clock

FieldValue: TypeAlias = str | float | bool | None
_NS_PER_S: Final = 1_000_000_000
INTERVAL_NS: Final = 60 * _NS_PER_S
MAX_SUBJECTS: Final = 4096
_DROPPED: Final = "lines of too many subjects were left out"


@dataclass(slots=True)
class _Bucket:
    """Lines that may be written now; fills up by one per interval."""

    tokens: float
    filled_ns: int

    def take(self, now_ns: int, interval_ns: int, burst: int) -> bool:
        gained = max(now_ns - self.filled_ns, 0) / interval_ns
        self.tokens, self.filled_ns = min(burst, self.tokens + gained), now_ns
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


@dataclass(slots=True)
class _Held:
    level: int
    message: str
    fields: dict[str, FieldValue]
    n_lines: int


class RateLimitedLog:
    """Writes lines to one logger.

    Args:
        logger: Where lines are written.
        clock: Time.
        burst: Lines of one subject that may follow each other at once: 2 where it begins and ends, 1 where a failure
            repeats.
        total_burst: Lines of all subjects that may follow each other at once; one per second is regained.

    Attributes:
        n_dropped: Lines of which nothing was ever written, because more than `MAX_SUBJECTS` were held; `flush` says how
            many.
    """

    def __init__(
        self,
        logger: logging.Logger,
        clock: Clock,
        *,
        burst: int = 1,
        total_burst: int = 100,
    ) -> None:
        self.n_dropped = 0
        self._n_dropped_logged = 0
        self._logger = logger
        self._clock = clock
        self._burst = burst
        self._total_burst = total_burst
        self._total = _Bucket(total_burst, clock.mono_ns())
        self._buckets: dict[Hashable, _Bucket] = {}
        self._held: dict[Hashable, _Held] = {}
        self._lock = threading.Lock()

    def write(self, subject: Hashable, level: int, message: str, /, **fields: FieldValue) -> bool:
        """Write a line now, or hold it; True when it was written.

        Args:
            subject: What it is about; lines of one subject replace each other while they are held.
            level: Of `logging`.
            message: The same text each time, without values: programs search for it.
            **fields: Values; None is left out.
        """
        now_ns = self._clock.mono_ns()
        with self._lock:
            held = self._held.pop(subject, None)
            n_held = held.n_lines if held else 0
            if not self._may_write(subject, now_ns):
                self._hold(subject, _Held(level, message, dict(fields), n_held + 1))
                return False
        self._emit(level, message, fields, n_held)
        return True

    def flush(self) -> None:
        """Write the held lines whose limit allows it again; called from a timer."""
        if not self._held:
            return
        now_ns = self._clock.mono_ns()
        with self._lock:
            n_dropped = self.n_dropped - self._n_dropped_logged
            if n_dropped and self._may_write(_DROPPED, now_ns):
                self._n_dropped_logged = self.n_dropped
            else:
                n_dropped = 0
            allowed = [subject for subject in self._held if self._may_write(subject, now_ns)]
            ready = [self._held.pop(subject) for subject in allowed]
        if n_dropped:
            self._emit(logging.WARNING, _DROPPED, {"lines": n_dropped}, 0)
        for held in ready:
            self._emit(held.level, held.message, held.fields, held.n_lines - 1)

    def _may_write(self, subject: Hashable, now_ns: int) -> bool:
        bucket = self._buckets.get(subject)
        if bucket is None:
            if len(self._buckets) >= MAX_SUBJECTS:
                self._forget_quiet(now_ns)
            bucket = self._buckets[subject] = _Bucket(self._burst, now_ns)
        if not bucket.take(now_ns, INTERVAL_NS, self._burst):
            return False
        if self._total.take(now_ns, _NS_PER_S, self._total_burst):
            return True
        bucket.tokens += 1  # not its fault
        return False

    def _forget_quiet(self, now_ns: int) -> None:
        """Drop subjects whose bucket is full again: they are as if never seen. All, if none is."""
        limit_ns = INTERVAL_NS * self._burst
        self._buckets = {
            subject: bucket
            for subject, bucket in self._buckets.items()
            if now_ns - bucket.filled_ns < limit_ns
        }
        if len(self._buckets) >= MAX_SUBJECTS:
            self._buckets.clear()

    def _hold(self, subject: Hashable, line: _Held) -> None:
        if len(self._held) >= MAX_SUBJECTS:
            self.n_dropped += self._held.pop(next(iter(self._held))).n_lines
        self._held[subject] = line

    def _emit(
        self, level: int, message: str, fields: Mapping[str, FieldValue], n_suppressed: int
    ) -> None:
        shown = {name: value for name, value in fields.items() if value is not None}
        if n_suppressed:
            shown["suppressed"] = n_suppressed
        self._logger.log(level, message, extra={"fields": shown})
