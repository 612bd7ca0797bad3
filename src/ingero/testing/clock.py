"""Time that moves only when a test says so."""

from __future__ import annotations


class ManualClock:
    """A `Clock` that stands still between calls of `advance`.

    Args:
        mono_ns: Where the monotonic clock starts.
        wall_ns: Where the wall clock starts; the default is 2026-01-01T00:00:00Z.
    """

    def __init__(
        self, mono_ns: int = 1_000_000_000, wall_ns: int = 1_767_225_600_000_000_000
    ) -> None:
        self._mono_ns = mono_ns
        self._wall_ns = wall_ns

    def mono_ns(self) -> int:
        """The monotonic time a test has set."""
        return self._mono_ns

    def wall_ns(self) -> int:
        """The wall time a test has set."""
        return self._wall_ns

    def advance(self, duration_ns: int) -> None:
        """Move both clocks forward together."""
        self._mono_ns += duration_ns
        self._wall_ns += duration_ns

    def step_wall(self, offset_ns: int) -> None:
        """Step the wall clock alone, as an operator or NTP does."""
        self._wall_ns += offset_ns
