"""By how much peers could be faster as far as their CPU limits go.

A rank whose host has used up its CPU limit works also while it seems to wait: a loader prepares the next batches, as
far as the limit lets it. Where all peers are so, the one that comes last never waits, its loader has no such time, and
so it stays the last, for minutes: by own times alone 1.2 to 1.5 times as slow as the others, who would be hardly
faster without it.

What a worker takes beyond its peers is compared with that in intervals, by its own clock: once another rank is slower
still, its peers wait and have room in their limits, which says nothing of the time before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ingero.detect.episodes import NOTHING, Took
from ingero.detect.groups import PairedOps
from ingero.detect.medians import row_medians
from ingero.model.arrays import BoolArray, IntArray
from ingero.model.collectives import FULL_LIMIT
from ingero.units import NS_PER_S

INTERVAL_NS: Final = 15 * NS_PER_S
"""Three times what agents look back for the use of a limit: a moment in which all stood still leaves little unused."""
_NO_LIMIT: Final = -1


class LimitSlack(NamedTuple):
    """What limits leave to gain.

    Attributes:
        slack_ns: The time up to each operation that the median peer's limit leaves unused, shape (T, m).
        span_ns: The time of which that is a part, likewise; both are the own time where no limit is known.
        is_limited: At which operations one is, shape (T,).
    """

    slack_ns: IntArray
    span_ns: IntArray
    is_limited: BoolArray


@dataclass(slots=True)
class LimitInterval:
    """The interval of a worker's latest operations.

    Attributes:
        number: Which one, by the worker's clock; -1 of one in which its peers have no limit, or none is known.
        excess_ns: What it took beyond its peers in it.
        slack_ns: What their limits left unused in it.
        began: What its operations added up to before it.
        previous: The same of the interval before it.
    """

    number: int = _NO_LIMIT
    excess_ns: int = 0
    slack_ns: int = 0
    began: Took = NOTHING
    previous: Took = NOTHING


def find_slack(
    ops: PairedOps, own_ns: IntArray, counts: BoolArray, last_ns: Sequence[int]
) -> LimitSlack:
    """By how much peers could be faster; no bound on what a worker takes beyond them where no limit is known.

    Args:
        ops: The operations.
        own_ns: Own time before each, 0 where it does not count, shape (T, m).
        counts: Whether it does, shape (T, m).
        last_ns: By worker, when it entered the one before them; 0 where there was none.
    """
    if not (ops.limit_use > 0).any():
        return LimitSlack(own_ns, own_ns, np.zeros(ops.segment.size, np.bool_))
    used = row_medians(np.where(ops.limit_use >= 0, ops.limit_use, np.nan).astype(np.float64))
    entered = np.concatenate([np.array([last_ns], np.int64), np.where(counts, ops.entry_ns, 0)])
    before = np.maximum.accumulate(entered, axis=0)[:-1]
    since = np.where(counts & (before > 0), ops.entry_ns - before, 0)
    is_limited = used > 0.0
    span = np.where(is_limited[:, None], np.maximum(since, own_ns), own_ns)
    unused = np.round(span * (1.0 - used[:, None] / FULL_LIMIT)).astype(np.int64)
    return LimitSlack(np.where(is_limited[:, None], unused, own_ns), span, is_limited)


def count_excess(
    ops: PairedOps,
    excess_ns: IntArray,
    counts: BoolArray,
    slack: LimitSlack,
    latest: Sequence[LimitInterval],
) -> tuple[IntArray, IntArray]:
    """What counts of the excess: in each interval no more than its slack.

    Args:
        ops: The operations.
        excess_ns: Before each, 0 where it does not count, shape (T, m).
        counts: Whether it does, shape (T, m).
        slack: Of `find_slack`.
        latest: By worker, the interval of its operation before; the sums of its last one are put into it.

    Returns:
        What each operation adds, shape (T, m); and the operation with which its interval began, -1 for one before
        these, of the same shape.
    """
    if not slack.is_limited.any() and all(one.number == _NO_LIMIT for one in latest):
        return excess_ns, np.broadcast_to(np.int64(-1), excess_ns.shape)
    state = np.array([(one.number, one.excess_ns, one.slack_ns) for one in latest], np.int64).T
    rows = np.arange(excess_ns.shape[0] + 1)[:, None]
    numbers = np.where(slack.is_limited[:, None], ops.entry_ns // INTERVAL_NS, _NO_LIMIT)
    last = np.maximum.accumulate(np.where(counts, rows[1:], 0), axis=0)
    numbers = np.concatenate([state[:1], numbers])
    numbers[1:] = np.take_along_axis(numbers, last, axis=0)
    is_first = numbers[1:] != numbers[:-1]
    first = np.maximum.accumulate(np.where(is_first, rows[1:], 0), axis=0)
    opened = np.concatenate([state[1:, None], np.stack([excess_ns, slack.slack_ns])], axis=1)
    sums = np.cumsum(opened, axis=1)
    opened = sums[:, 1:] - np.take_along_axis(sums - opened, first[None], axis=1)
    within = np.concatenate([state[1:].min(axis=0)[None], opened.min(axis=0)])
    ended = np.cumsum(np.where(is_first, within[:-1], 0), axis=0)
    counted = np.diff(ended + within[1:], axis=0, prepend=within[:1])
    for at, one in enumerate(latest):
        one.number = int(numbers[-1, at])
        one.excess_ns, one.slack_ns = opened[:, -1, at].tolist()
    return counted, first - 1


def note_intervals(before: IntArray, began: IntArray, latest: Sequence[LimitInterval]) -> None:
    """Keep what each worker's operations added up to before its last two intervals.

    Args:
        before: As in `Took`, before each operation, shape (5, T, m).
        began: As `count_excess` says.
        latest: By worker.
    """
    for at in np.flatnonzero(began[-1] >= 0).tolist():
        one, first = latest[at], int(began[-1, at])
        earlier = int(began[first - 1, at]) if first else -1
        one.previous = Took._make(before[:, earlier, at].tolist()) if earlier >= 0 else one.began
        one.began = Took._make(before[:, first, at].tolist())
