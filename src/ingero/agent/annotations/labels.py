"""What the node's workloads said last, for whoever tells of the node."""

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
    """The latest value of each key, whoever said it; forgotten after `KEPT_NS`. Any thread.

    Spans are not remembered: they are over when they are told.

    Args:
        clock: Ages what was said.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._said: dict[str, tuple[str, int]] = {}

    def take(self, admitted: Iterable[Admitted]) -> None:
        """Take annotations in the order they were said."""
        now_ns = self._clock.mono_ns()
        with self._lock:
            for one in admitted:
                if one.span_end_ns:
                    continue
                for key, value in one.labels.items():
                    self._said.pop(key, None)
                    self._said[key] = (value, now_ns)
            while len(self._said) > MAX_LABELS:
                del self._said[next(iter(self._said))]

    def current(self) -> dict[str, str]:
        """What holds now."""
        oldest_ns = self._clock.mono_ns() - KEPT_NS
        with self._lock:
            return {key: value for key, (value, at_ns) in self._said.items() if at_ns >= oldest_ns}
