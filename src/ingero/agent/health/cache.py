"""The last threshold from Fleet, by answers and polls, and whether Fleet can be reached.

Shared by the push queue, the poller and the loop; every method is safe from any thread.
"""

from __future__ import annotations

import math
import re
import threading
from enum import StrEnum
from typing import Final, NamedTuple

from ingero.agent.health.threshold_choice import CachedThreshold
from ingero.detect.threshold import THRESHOLD_CEILING, THRESHOLD_FLOOR

UNREACHABLE_AFTER: Final = 3
"""Failed pushes in a row that make Fleet unreachable; one success ends it."""

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_QUORUM: Final = {"true": True, "false": False}


class HeaderOutcome(StrEnum):
    """What an answer holds about the threshold."""

    HIT = "hit"
    WITHHELD = "withheld"
    MISS = "miss"
    REJECTED = "rejected"


class ThresholdHeaders(NamedTuple):
    """A pair of headers, read.

    Attributes:
        outcome: Whether there is a usable value.
        threshold: The value; 0 unless `outcome` is a hit.
        quorum_met: Likewise False.
        reason: Why it was rejected; empty otherwise.
    """

    outcome: HeaderOutcome
    threshold: float = 0.0
    quorum_met: bool = False
    reason: str = ""


def parse_threshold_headers(
    threshold: str | None, quorum: str | None, panic: str | None = None
) -> ThresholdHeaders:
    """Read the two header values; both count or none does. Fleet's panic header, which comes without them, is a third.

    Source: wire contract of agent v0.17, response headers: a decimal in [0.1, 0.99] and ``true`` or ``false`` in any
    case. That agent does not know the third.
    """
    threshold, quorum = (threshold or "").strip(), (quorum or "").strip()
    if (panic or "").strip().lower() == "true":
        return ThresholdHeaders(HeaderOutcome.WITHHELD)
    if not threshold or not quorum:
        return ThresholdHeaders(HeaderOutcome.MISS)
    quorum_met = _QUORUM.get(quorum.lower())
    if quorum_met is None:
        return ThresholdHeaders(HeaderOutcome.REJECTED, reason="quorum is neither true nor false")
    value = float(threshold) if _NUMBER.fullmatch(threshold) else math.nan
    return check_threshold(value, quorum_met=quorum_met)


def check_threshold(threshold: float, *, quorum_met: bool) -> ThresholdHeaders:
    """Accept a threshold that an agent may use; refuse every other number."""
    if not math.isfinite(threshold):
        return ThresholdHeaders(HeaderOutcome.REJECTED, reason="threshold is not a finite number")
    if not THRESHOLD_FLOOR <= threshold <= THRESHOLD_CEILING:
        return ThresholdHeaders(HeaderOutcome.REJECTED, reason="threshold is outside 0.1 to 0.99")
    return ThresholdHeaders(HeaderOutcome.HIT, threshold, quorum_met)


class CacheCounts(NamedTuple):
    """Answers since the start, by outcome."""

    n_hits: int
    n_misses: int
    n_rejected: int


_USABLE: Final = frozenset({HeaderOutcome.HIT, HeaderOutcome.WITHHELD})


def _keep(headers: ThresholdHeaders, mono_ns: int) -> CachedThreshold:
    value = headers.threshold if headers.outcome is HeaderOutcome.HIT else None
    return CachedThreshold(value, headers.quorum_met, mono_ns)


class ThresholdCache:
    """The last good threshold and the state of the path to Fleet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: CachedThreshold | None = None
        self._is_piggybacked = False
        self._n_failed = 0
        self._counts = dict.fromkeys(HeaderOutcome, 0)
        self._reason = ""
        self._answered_ns: int | None = None

    def record_response(self, headers: ThresholdHeaders, mono_ns: int) -> None:
        """Take the headers of an answer to a push.

        Only a usable value, or the notice that there is none now, stops the poller: an answer whose value is
        rejected leaves the agent without a threshold as surely as one without.
        """
        with self._lock:
            self._counts[headers.outcome] += 1
            self._answered_ns = mono_ns
            self._reason = headers.reason or self._reason
            self._is_piggybacked = headers.outcome in _USABLE
            if self._is_piggybacked:
                self._cached = _keep(headers, mono_ns)

    def record_poll(self, headers: ThresholdHeaders, mono_ns: int) -> None:
        """Take what the threshold page held; it does not change whether answers carry a value."""
        with self._lock:
            if headers.outcome in _USABLE:
                self._cached = _keep(headers, mono_ns)
            elif headers.outcome is HeaderOutcome.REJECTED:
                self._counts[headers.outcome] += 1
                self._reason = headers.reason

    def note_push(self, *, is_taken: bool) -> None:
        """Count a finished push toward reachability."""
        with self._lock:
            self._n_failed = 0 if is_taken else self._n_failed + 1

    @property
    def cached(self) -> CachedThreshold | None:
        """The last good value; None before the first."""
        with self._lock:
            return self._cached

    @property
    def answered_ns(self) -> int | None:
        """Monotonic time of Fleet's last answer to a push, whatever it held; None before the first."""
        with self._lock:
            return self._answered_ns

    @property
    def is_piggybacked(self) -> bool:
        """True while answers to pushes carry the threshold; the poller waits."""
        with self._lock:
            return self._is_piggybacked

    @property
    def is_reachable(self) -> bool:
        """False after three failed pushes in a row."""
        with self._lock:
            return self._n_failed < UNREACHABLE_AFTER

    @property
    def counts(self) -> CacheCounts:
        """Answers so far, by outcome."""
        with self._lock:
            counts = self._counts
            return CacheCounts(
                counts[HeaderOutcome.HIT],
                counts[HeaderOutcome.MISS],
                counts[HeaderOutcome.REJECTED],
            )

    @property
    def is_withheld(self) -> bool:
        """Fleet withholds the threshold now: no node is to judge itself."""
        with self._lock:
            return self._cached is not None and self._cached.value is None

    @property
    def last_rejection(self) -> str:
        """Why the last refused value was refused; empty when none was."""
        with self._lock:
            return self._reason
