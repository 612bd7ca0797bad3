"""Stays in alarm: where each began and what it added up to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from ingero.model.verdicts import Slowdown

_REMEMBERED: Final = 16
_BY_CHANCE: Final = 0.1


class Took(NamedTuple):
    """What a worker's compared operations add up to.

    Attributes:
        own_ns: Own time.
        excess_ns: Own time above the median peer's; may be negative.
        slack_ns: By how much its peers could have been faster as far as their CPU limits go; the own time where they
            have none.
        span_ns: The time of which that is a part.
        counted_ns: The excess, but in no interval of `slack` more than the slack in it: what the worker took beyond
            its peers for longer than that kept nobody waiting.
    """

    own_ns: int = 0
    excess_ns: int = 0
    slack_ns: int = 0
    span_ns: int = 0
    counted_ns: int = 0

    def plus(self, other: Took) -> Took:
        """Both."""
        return Took(*(one + more for one, more in zip(self, other, strict=True)))

    def since(self, before: Took) -> Took:
        """What came after it."""
        return Took(*(one - less for one, less in zip(self, before, strict=True)))

    def less(self, shared: float) -> Took:
        """The same beyond a factor by which others of its replica slowed down, too."""
        excess_ns = self.excess_ns - round((self.own_ns - self.excess_ns) * (shared - 1.0))
        return self._replace(excess_ns=excess_ns, counted_ns=min(self.counted_ns, excess_ns))

    @property
    def ratio(self) -> float:
        """Own time by the median peer's."""
        return self.own_ns / max(self.own_ns - self.excess_ns, 1)

    @property
    def is_bound(self) -> bool:
        """Whether limits leave out more of the excess than intervals of a few operations do by chance."""
        return self.excess_ns - self.counted_ns > _BY_CHANCE * abs(self.excess_ns)

    @property
    def ratio_within_limits(self) -> float:
        """The time that passed by what it would have been without the excess that counts."""
        return self.span_ns / max(self.span_ns - self.counted_ns, 1)


NOTHING: Final = Took()


@dataclass(frozen=True, slots=True)
class OnsetState:
    """Where a run of slowness began.

    Attributes:
        view: Index of (worker, communicator).
        seq: Sequence number there.
        entry_ns: Entry, on the worker's clock.
        segment: Its segment.
        before: What the operations before it add up to.
    """

    view: int = -1
    seq: int = 0
    entry_ns: int = 0
    segment: int = -1
    before: Took = NOTHING


@dataclass(frozen=True, slots=True)
class AlarmEpisode:
    """One stay in alarm; or the oldest ones of a tier, of which the times in between are not summed up.

    Attributes:
        tier: ALARM or NOTICE.
        onset: Where it began.
        onset_op: The onset's ordinal among the group's compared operations.
        since_op: The same in the group that the worker is in now: 0 if it joined that during the episode.
        detected_ns: Entry of the operation at which evidence sufficed.
        n_ops_to_detect: Operations from onset to there, both included.
        is_pooled: The pooled bet's wealth had grown more.
        by_sums: The sums bet's wealth alone sufficed, as where a worker is slow in some operations and as fast as its
            peers between.
        log10_evidence: At detection.
        cleared_ns: Entry of the operation at which it cleared; None while it is open.
        took: What its operations add up to, once it cleared.
        slowdown: Once it cleared.
        cleared_segment: Segment in which it cleared; None while it is open.
        log_peak: Natural log of the greatest wealth, once it cleared or the worker came among other peers.
        cut_among: Workers in its group before it came among too few peers to be compared on; 0 where evidence ended the
            episode.
    """

    tier: int
    onset: OnsetState
    onset_op: int
    since_op: int
    detected_ns: int
    n_ops_to_detect: int
    is_pooled: bool
    log10_evidence: float
    cleared_ns: int | None = None
    took: Took = NOTHING
    slowdown: Slowdown | None = None
    cleared_segment: int | None = None
    log_peak: float = 0.0
    by_sums: bool = False
    cut_among: int = 0

    def end(self, at_ns: int, segment: int, until: Took) -> AlarmEpisode:
        """The same once it cleared.

        Args:
            at_ns: When.
            segment: In which segment.
            until: What the worker's operations add up to until then.
        """
        took = until.since(self.onset.before)
        return replace(
            self,
            cleared_ns=at_ns,
            cleared_segment=segment,
            took=took,
            slowdown=Slowdown(took.ratio, took.ratio, took.ratio),
        )


def remember_episode(past: list[AlarmEpisode], episode: AlarmEpisode) -> None:
    """Add an episode that cleared; beyond 16 the two oldest of one tier become one, which took what both took."""
    past.append(episode)
    if len(past) <= _REMEMBERED:
        return
    n_of_tier = Counter(one.tier for one in past)
    tier = next(one.tier for one in past if n_of_tier[one.tier] > 1)
    first, second = [at for at, one in enumerate(past) if one.tier == tier][:2]
    past[first] = _merge(past[first], past.pop(second))


def _merge(first: AlarmEpisode, second: AlarmEpisode) -> AlarmEpisode:
    took = first.took.plus(second.took)
    return replace(
        first,
        cleared_ns=second.cleared_ns,
        cleared_segment=second.cleared_segment,
        log_peak=max(first.log_peak, second.log_peak),
        took=took,
        slowdown=Slowdown(took.ratio, took.ratio, took.ratio),
    )
