"""The latest annotations of the node's workloads, for events about the node."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Final

from ingero.agent.annotations.admission import Admitted
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.annotations import MAX_LABELS

KEPT_NS: Final = 600 * NS_PER_S


class LatestLabels:
    """The latest value of each key, from any workload; forgotten after `KEPT_NS`. Any thread.

    Spans are not remembered: they are over when they are sent.

    Args:
        clock: Ages the values.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[str, int]] = {}

    def take(self, admitted: Iterable[Admitted]) -> None:
        """Take annotations in the order in which they were sent."""
        now_ns = self._clock.mono_ns()
        with self._lock:
            for one in admitted:
                if one.span_end_ns:
                    continue
                for key, value in one.labels.items():
                    self._latest.pop(key, None)
                    self._latest[key] = (value, now_ns)
            while len(self._latest) > MAX_LABELS:
                del self._latest[next(iter(self._latest))]

    def current(self) -> dict[str, str]:
        """The labels that hold now."""
        oldest_ns = self._clock.mono_ns() - KEPT_NS
        with self._lock:
            return {
                key: value for key, (value, at_ns) in self._latest.items() if at_ns >= oldest_ns
            }
