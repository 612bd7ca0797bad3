"""Time as a judge has it: while a push from the stream is applied, the moment at which it was received."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

MAX_BEHIND_NS: Final = 10 * NS_PER_S
"""A push that was just stored and looks older than this was stored by a server whose clock is behind."""


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

    def date(self, stored_wall_ns: int, last_ns: int, *, is_live: bool) -> int:
        """The monotonic time of a stored push: never later than now, never before the push before it.

        Receivers' clocks take no part, so that one of them may step.

        Args:
            stored_wall_ns: When it was stored, by the server's clock.
            last_ns: What this returned for the push before it.
            is_live: Whether it was stored while its cluster was judged here, and so a moment ago.
        """
        now_ns = self._clock.mono_ns()
        at_ns = min(stored_wall_ns - self._offset_ns, now_ns)
        if is_live and now_ns - at_ns > MAX_BEHIND_NS:
            at_ns = now_ns
        return max(at_ns, min(last_ns, now_ns))

    @contextmanager
    def at(self, mono_ns: int) -> Iterator[None]:
        """A moment of the monotonic clock, for this thread, and the wall's time then."""
        self._set.mono_ns = mono_ns
        self._set.wall_ns = mono_ns + self._offset_ns
        try:
            yield
        finally:
            del self._set.wall_ns, self._set.mono_ns
