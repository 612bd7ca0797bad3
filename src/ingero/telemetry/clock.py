"""The one place that reads time.

Everything that waits, expires or stamps takes a `Clock`, so a test can move time by hand
(`ingero.testing.clock.ManualClock`). ``mono_ns`` orders and measures; ``wall_ns`` is for display and for the wire.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of both times, in integer nanoseconds."""

    def mono_ns(self) -> int:
        """Nanoseconds on a clock that never steps; its zero means nothing."""
        ...

    def wall_ns(self) -> int:
        """Nanoseconds since the Unix epoch, as this machine believes."""
        ...


class SystemClock:
    """CLOCK_MONOTONIC and CLOCK_REALTIME of this machine."""

    __slots__ = ()

    def mono_ns(self) -> int:
        """Read CLOCK_MONOTONIC."""
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """Read CLOCK_REALTIME."""
        return time.time_ns()
