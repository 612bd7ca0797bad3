"""Places in a cluster's log at which its costs are cut, so that its next judge goes on from the same place.

The log is cut at whole multiples of the cost interval, by the time at which its server stored each push: every Fleet
that reads it has the same cuts. What was reported is kept as the last of them (`ingero.fleet.processors.collectives.
reported`), and the next judge reports what its own sums grew since that cut.

Lossy: a Fleet that follows a cluster remembers its last `MAX_CUTS` cuts. Where what was reported is older, the costs
before the oldest of them are charged by nobody.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from ingero.model.verdicts import Judgement

MAX_CUTS: Final = 8
_RECENT: Final = 6
"""Cuts of so many intervals ago are remembered while a log is read, and the first that was not reported."""


@dataclass(frozen=True, slots=True)
class CostCut:
    """What waiting had cost at a place in the log.

    Attributes:
        place_ns: Every push that was stored before this time is included, and none after it.
        history: As `Conclusion.history`.
        generation: As `Conclusion.generation`.
    """

    place_ns: int
    history: Judgement
    generation: int


class DueCut(NamedTuple):
    """A cut that is to be made.

    Attributes:
        place_ns: As in `CostCut`.
        n_before: Of the runs that wait to be judged, those that come before it.
        now_ns: When the push after it arrived.
    """

    place_ns: int
    n_before: int
    now_ns: int


class CostCuts:
    """The cuts of one cluster's log. Not thread-safe.

    Args:
        mark_ns: The last cut that was reported before the log was read; 0 when that is not known.

    Attributes:
        last_ns: The place of the last cut, made or due; 0 before the first push.
        is_dated: Whether pushes come from a log at all.
    """

    def __init__(self, mark_ns: int = 0) -> None:
        self.last_ns = 0
        self.is_dated = False
        self._mark_ns = mark_ns
        self._first_ns = 0
        self._noted_ns = 0
        self._is_live = False
        self._due: list[DueCut] = []
        self._made: deque[CostCut] = deque(maxlen=MAX_CUTS)

    def note(self, stored_ns: int, interval_ns: int, n_waiting: int, now_ns: int) -> None:
        """A push comes that was stored then."""
        place_ns = stored_ns // interval_ns * interval_ns
        self._noted_ns = now_ns
        if not self.is_dated:
            self.is_dated, self._first_ns, self.last_ns = True, place_ns, place_ns
        elif place_ns > self.last_ns:
            self._plan(place_ns, n_waiting, now_ns)

    def note_silence(self, interval_ns: int, n_waiting: int, now_ns: int) -> None:
        """Cut behind the last push of a cluster that pushes no more."""
        is_silent = self.is_dated and now_ns - self._noted_ns >= 2 * interval_ns
        newest_ns = self._made[-1].place_ns if self._made else 0
        if is_silent and not self._due and newest_ns <= self.last_ns and self._noted_ns:
            self._noted_ns = 0
            self._plan(self.last_ns + interval_ns, n_waiting, now_ns)

    def _plan(self, place_ns: int, n_waiting: int, now_ns: int) -> None:
        self.last_ns = place_ns
        if self._due and self._due[-1].n_before == n_waiting:
            self._due.pop()  # nothing came between the two
        self._due.append(DueCut(place_ns, n_waiting, now_ns))

    def take_due(self, interval_ns: int, now_ns: int) -> list[DueCut]:
        """The cuts to make, in their order, as far as they may be asked for: each takes as long as a report."""
        due, self._due = self._due, []
        has_mark = not self._mark_ns or any(cut.place_ns >= self._mark_ns for cut in self._made)
        taken = []
        for one in due:
            is_first = not has_mark and one.place_ns >= self._mark_ns
            if is_first or now_ns - one.now_ns <= _RECENT * interval_ns:
                taken.append(one)
            has_mark = has_mark or is_first
        return taken

    def add(self, cut: CostCut) -> None:
        """A cut was made."""
        self._made.append(cut)
        while self._is_live and len(self._made) > 1:
            self._made.popleft()

    def report_from_here(self) -> None:
        """Keep the newest cut alone from now on: this Fleet reports by it."""
        self._is_live = True

    @property
    def newest(self) -> CostCut | None:
        """The last cut that was made."""
        return self._made[-1] if self._made else None

    def has_all_since(self, mark_ns: int) -> bool:
        """Whether the whole log that was read came after a cut."""
        return self.is_dated and mark_ns <= self._first_ns

    def find(self, mark_ns: int) -> CostCut | None:
        """The first cut that is not before this one; None where the log ended before that."""
        return next((cut for cut in self._made if cut.place_ns >= mark_ns), None)
