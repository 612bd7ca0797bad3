"""Time as a judge has it: while a push from the stream is applied, the moment at which it was received."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ingero.telemetry.clock import Clock


class StreamClock:
    """A `Clock` whose time a thread may set for what it calls.

    Args:
        clock: What other threads read, and this one outside of `at`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._set = threading.local()
        self._offset_ns = clock.wall_ns() - clock.mono_ns()

    def mono_ns(self) -> int:
        """Monotonic time."""
        set_ns: int | None = getattr(self._set, "mono_ns", None)
        return self._clock.mono_ns() if set_ns is None else set_ns

    def wall_ns(self) -> int:
        """Wall time."""
        set_ns: int | None = getattr(self._set, "wall_ns", None)
        return self._clock.wall_ns() if set_ns is None else set_ns

    @contextmanager
    def at(self, wall_ns: int) -> Iterator[None]:
        """Both times of a moment, for this thread; never later than now on the monotonic one."""
        self._set.wall_ns = wall_ns
        self._set.mono_ns = min(wall_ns - self._offset_ns, self._clock.mono_ns())
        try:
            yield
        finally:
            del self._set.wall_ns, self._set.mono_ns
