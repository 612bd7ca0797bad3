"""Token buckets: so many requests a second per bearer or address, with a burst."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S


@dataclass(slots=True)
class _Bucket:
    tokens: float
    read_ns: int


class RateLimiter:
    """A token bucket per key, for at most ``max_keys`` keys; the least recently used is forgotten (and starts full).

    Not thread-safe: one event loop owns it.

    Args:
        per_second: Tokens that come back each second.
        burst: Tokens of a full bucket.
        clock: Time.
        max_keys: Bound on memory.
    """

    def __init__(self, per_second: float, burst: float, clock: Clock, max_keys: int = 4096) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def take(self, key: str) -> float:
        """Take one token; 0 when there was one, else the seconds until there is."""
        now_ns = self._clock.mono_ns()
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= self._max_keys:
                self._buckets.popitem(last=False)
            bucket = self._buckets[key] = _Bucket(self._burst, now_ns)
        else:
            self._buckets.move_to_end(key)
            earned = (now_ns - bucket.read_ns) * self._per_second / NS_PER_S
            bucket.tokens = min(self._burst, bucket.tokens + earned)
            bucket.read_ns = now_ns
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return 0.0
        return (1 - bucket.tokens) / self._per_second
