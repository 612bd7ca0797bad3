"""`RetentionClock`: the time that retention goes by, so that a wrong clock deletes nothing.

A clock that is set far ahead, or wrong at the start, would make every row too old at once. So a step ahead is not
believed at first: rows that arrived before it age by the time that is known to have passed, which is where the clock
was at the last upkeep and what the monotonic clock has counted since. Rows that arrived after it have their arrival
from the same clock, and age by it. The step is believed once the clock was steady for a week, which a host that was off
for months reaches, or at once where an operator says so. A clock that is behind is gone by at once, as that deletes
less, and forgotten when it is right again: many machines start with an old date. Pure; the backend keeps the mark.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S, NS_PER_US, format_duration

_LOG: Final = logging.getLogger("ingero.echo")
STEP: Final = timedelta(days=1)
"""How far the clock may be ahead of the time that is known to have passed: a process that was stopped, NTP, sleep."""
STEADY_NS: Final = 7 * 86_400 * NS_PER_S
"""How long a clock that stepped must be steady, counted while the process runs, until it is believed."""
_FIRST: Final = datetime(2025, 1, 1)  # noqa: DTZ001 - naive UTC, as the store has it
"""No release with this module is older: a clock that was before it knew no time, and what follows is no step."""
_SAVE_EVERY: Final = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class RetentionTime:
    """What is now, for retention; UTC without a zone.

    Attributes:
        wall: Where the clock is.
        known: The time that is known to have passed; ``wall``, or earlier while the clock is not believed.
        stepped: Where the clock was after its step: arrivals from here on age by ``wall``, the others by ``known``.
    """

    wall: datetime
    known: datetime
    stepped: datetime

    @staticmethod
    def at(now: datetime) -> RetentionTime:
        """Of a clock that is believed."""
        return RetentionTime(now, now, now)


@dataclass(frozen=True, slots=True)
class ClockMark:
    """What the database keeps for the next start; UTC without a zone.

    Attributes:
        known: The time that was known to have passed.
        wall: Where the clock was then.
        stepped: Where it was after the step, ahead or back, that is not believed; None while it is believed.
        steady_ns: How long it has been steady since.
    """

    known: datetime
    wall: datetime
    stepped: datetime | None = None
    steady_ns: int = 0

    @property
    def is_ahead(self) -> bool:
        """Whether the clock is ahead, and is not believed."""
        return self.stepped is not None and self.wall > self.known

    def build_time(self) -> RetentionTime:
        """The same for retention."""
        if self.stepped is None or not self.is_ahead:
            return RetentionTime.at(self.wall)
        return RetentionTime(self.wall, self.known, self.stepped)


class RetentionClock:
    """The writer's thread alone advances it; any thread reads how far the clock is ahead.

    Args:
        clock: What is checked, and the monotonic clock that it is checked by.
        is_trusted: An operator has said that the clock is right.
    """

    def __init__(self, clock: Clock, *, is_trusted: bool) -> None:
        self._clock = clock
        self._is_trusted = is_trusted
        self._mark: ClockMark | None = None
        self._saved: ClockMark | None = None
        self._read_ns = 0
        self._is_said = False

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called."""
        return self._mark is not None

    @property
    def ahead_s(self) -> float:
        """How far the clock is ahead of the time that is known to have passed; 0 where it is believed."""
        mark = self._mark
        if mark is None or not mark.is_ahead:
            return 0.0
        return (mark.wall - mark.known).total_seconds()

    def begin(self, found: ClockMark | None, newest: datetime | None, now: datetime) -> None:
        """Go on from what the database keeps.

        Args:
            found: Its mark; None in a new one, and in one of an older release.
            newest: Where there is no mark, the newest arrival of a row; None without rows.
            now: Where the clock is.
        """
        start = now if newest is None else newest
        self._mark = found or ClockMark(start, start)
        self._saved = found
        self._read_ns = self._clock.mono_ns()
        self.advance(now)

    def advance(self, now: datetime) -> RetentionTime:
        """Look at the clock again; what retention goes by until the next time."""
        assert self._mark is not None
        before, mono_ns = self._mark, self._clock.mono_ns()
        elapsed_ns, self._read_ns = mono_ns - self._read_ns, mono_ns
        elapsed = timedelta(microseconds=elapsed_ns // NS_PER_US)
        known = before.known + elapsed
        after = ClockMark(now, now)
        if abs(now - known) > STEP and known > _FIRST and not self._is_trusted:
            is_step = before.stepped is None or abs(now - before.wall - elapsed) > STEP
            stepped = now - elapsed if is_step else before.stepped
            steady_ns = 0 if is_step else before.steady_ns + elapsed_ns
            if steady_ns < STEADY_NS:
                after = ClockMark(known, now, stepped, steady_ns)
        if after.is_ahead != self._is_said:
            self._is_said = after.is_ahead
            _say(after)
        self._mark = after
        return after.build_time()

    def take_unsaved(self) -> ClockMark | None:
        """The mark where the database's is too old to start from."""
        mark, saved = self._mark, self._saved
        if (
            saved is None
            or mark is None
            or mark.stepped != saved.stepped
            or abs(mark.known - saved.known) >= _SAVE_EVERY
        ):
            return mark
        return None

    def note_saved(self, mark: ClockMark) -> None:
        """The database has it."""
        self._saved = mark


def _say(mark: ClockMark) -> None:
    if not mark.is_ahead:
        _LOG.warning("the clock says %s UTC, and retention goes by it again", f"{mark.wall:%F %T}")
        return
    ahead_ns = (mark.wall - mark.known) // timedelta(microseconds=1) * NS_PER_US
    _LOG.warning(
        "the clock says %s UTC, which is %s ahead of the time that is known to have passed: retention deletes nothing "
        "for this step. Set the clock right; where it is right, start once with --trust-clock. It is believed after "
        "%s without another step",
        f"{mark.wall:%F %T}",
        format_duration(ahead_ns),
        format_duration(STEADY_NS),
    )
