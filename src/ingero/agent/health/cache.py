"""What Fleet last said: the threshold from answers and polls, and whether Fleet can be reached.

Shared by the push lane, the poller and the loop; every method is safe from any thread.
"""

from __future__ import annotations

import math
import re
import threading
from enum import StrEnum
from typing import Final, NamedTuple

from ingero.agent.health.mode import CachedThreshold
from ingero.detect.threshold import THRESHOLD_CEILING, THRESHOLD_FLOOR

UNREACHABLE_AFTER: Final = 3
"""Failed pushes in a row that make Fleet unreachable; one success ends it."""

_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
_QUORUM: Final = {"true": True, "false": False}


class Heard(StrEnum):
    """What an answer told about the threshold."""

    HIT = "hit"
    WITHHELD = "withheld"
    MISS = "miss"
    REJECTED = "rejected"


class ThresholdHeaders(NamedTuple):
    """A pair of headers, read.

    Attributes:
        heard: Whether there is a usable value.
        threshold: The value; 0 unless `heard` is a hit.
        quorum_met: Likewise False.
        reason: Why it was rejected; empty otherwise.
    """

    heard: Heard
    threshold: float = 0.0
    quorum_met: bool = False
    reason: str = ""


def parse_told(
    threshold: str | None, quorum: str | None, panic: str | None = None
) -> ThresholdHeaders:
    """Read the two header values; both count or none does. Fleet's word of panic, which comes without them, is a third.

    Source: wire contract of agent v0.17, response headers: a decimal in [0.1, 0.99] and ``true`` or ``false`` in any
    case. That agent does not know the third.
    """
    threshold, quorum = (threshold or "").strip(), (quorum or "").strip()
    if (panic or "").strip().lower() == "true":
        return ThresholdHeaders(Heard.WITHHELD)
    if not threshold or not quorum:
        return ThresholdHeaders(Heard.MISS)
    quorum_met = _QUORUM.get(quorum.lower())
    if quorum_met is None:
        return ThresholdHeaders(Heard.REJECTED, reason="quorum is neither true nor false")
    value = float(threshold) if _NUMBER.fullmatch(threshold) else math.nan
    return check_told(value, quorum_met=quorum_met)


def check_told(threshold: float, *, quorum_met: bool) -> ThresholdHeaders:
    """Accept a threshold that an agent may use; refuse every other number."""
    if not math.isfinite(threshold):
        return ThresholdHeaders(Heard.REJECTED, reason="threshold is not a finite number")
    if not THRESHOLD_FLOOR <= threshold <= THRESHOLD_CEILING:
        return ThresholdHeaders(Heard.REJECTED, reason="threshold is outside 0.1 to 0.99")
    return ThresholdHeaders(Heard.HIT, threshold, quorum_met)


class CacheCounts(NamedTuple):
    """How answers were heard since the start."""

    n_hits: int
    n_misses: int
    n_rejected: int


_USABLE: Final = frozenset({Heard.HIT, Heard.WITHHELD})


def _keep(told: ThresholdHeaders, mono_ns: int) -> CachedThreshold:
    value = told.threshold if told.heard is Heard.HIT else None
    return CachedThreshold(value, told.quorum_met, mono_ns)


class ThresholdCache:
    """The last good threshold and the state of the path to Fleet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cached: CachedThreshold | None = None
        self._is_piggybacked = False
        self._n_failed = 0
        self._counts = dict.fromkeys(Heard, 0)
        self._reason = ""
        self._heard_ns: int | None = None

    def hear(self, told: ThresholdHeaders, mono_ns: int) -> None:
        """Take what an answer to a push told.

        Only a usable value, or word that there is none now, puts the poller to sleep: an answer whose value is
        rejected leaves the agent without a threshold as surely as one without.
        """
        with self._lock:
            self._counts[told.heard] += 1
            self._heard_ns = mono_ns
            self._reason = told.reason or self._reason
            self._is_piggybacked = told.heard in _USABLE
            if self._is_piggybacked:
                self._cached = _keep(told, mono_ns)

    def hear_poll(self, told: ThresholdHeaders, mono_ns: int) -> None:
        """Take what the threshold page told; it does not change whether answers carry a value."""
        with self._lock:
            if told.heard in _USABLE:
                self._cached = _keep(told, mono_ns)
            elif told.heard is Heard.REJECTED:
                self._counts[told.heard] += 1
                self._reason = told.reason

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
    def heard_ns(self) -> int | None:
        """Monotonic time of Fleet's last answer to a push, whatever it told; None before the first."""
        with self._lock:
            return self._heard_ns

    @property
    def is_piggybacked(self) -> bool:
        """True while answers to pushes carry the threshold; the poller sleeps."""
        with self._lock:
            return self._is_piggybacked

    @property
    def is_reachable(self) -> bool:
        """False after three failed pushes in a row."""
        with self._lock:
            return self._n_failed < UNREACHABLE_AFTER

    @property
    def counts(self) -> CacheCounts:
        """Answers heard, by kind."""
        with self._lock:
            counts = self._counts
            return CacheCounts(
                counts[Heard.HIT],
                counts[Heard.MISS],
                counts[Heard.REJECTED],
            )

    @property
    def is_withheld(self) -> bool:
        """Fleet's last word is that nobody is to judge itself now."""
        with self._lock:
            return self._cached is not None and self._cached.value is None

    @property
    def last_rejection(self) -> str:
        """Why the last refused value was refused; empty when none was."""
        with self._lock:
            return self._reason
