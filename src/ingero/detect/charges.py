"""To whom a worker's waiting is charged.

In a synchronous job what one worker takes beyond its peers is what the others wait, so a culprit's excess own time
bounds what it can have cost the others. Slowdowns beside each other delay the job by the greatest, not by the sum, and
share that in proportion to their excesses; those after each other delay it by the sum. Each worker's wait is charged to
them in the order in which they were, so that a later one takes nothing back from an earlier one. What exceeds the
bound, such as a pipeline's own bubbles, stays unattributed.

Slowdowns are dated by the clocks of their workers. Where these differ by more than reports take to arrive they are
brought to one clock first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple


class SlowSpan(NamedTuple):
    """A time in which a worker was slow.

    Attributes:
        start_ns: Since when.
        end_ns: Until when; infinite while it lasts.
        excess_ns: What it took beyond its peers in it.
    """

    start_ns: float
    end_ns: float
    excess_ns: int


ALWAYS: Final = (-math.inf, math.inf)
"""Start and end of what has no dates."""


def align_spans(
    spans: Mapping[int, Sequence[SlowSpan]], lags_ns: Mapping[int, int], at_least_ns: int
) -> dict[int, Sequence[SlowSpan]]:
    """Spans on one clock, that of the worker whose clock is furthest ahead; as they are where all clocks are one.

    Args:
        spans: By worker, each on its clock.
        lags_ns: By how much the clock of arrivals is ahead of each, where that is known.
        at_least_ns: Clocks of which none differs by more are taken for one: so long a report may take.
    """
    least_ns, most_ns = min(lags_ns.values(), default=0), max(lags_ns.values(), default=0)
    if most_ns - least_ns <= at_least_ns:
        return dict(spans)
    aligned: dict[int, Sequence[SlowSpan]] = {}
    for worker, of_worker in spans.items():
        behind_ns = lags_ns.get(worker, least_ns) - least_ns
        aligned[worker] = [
            SlowSpan(one.start_ns + behind_ns, one.end_ns + behind_ns, one.excess_ns)
            for one in of_worker
        ]
    return aligned


def charge_wait(
    wait_ns: int, worker: int, judged: Mapping[int, Sequence[SlowSpan]]
) -> dict[int, int]:
    """Whom a worker's wait is charged to, worker → nanoseconds.

    Args:
        wait_ns: What it waited.
        worker: Who.
        judged: When each who may be charged was slow, by worker.
    """
    charged: dict[int, int] = {}
    left_ns = wait_ns
    for excess in _find_together((w, one) for w, of in judged.items() if w != worker for one in of):
        to_share = min(left_ns, max(excess.values()))
        left_ns -= to_share
        for other, share in _share(to_share, excess).items():
            charged[other] = charged.get(other, 0) + share
    return {other: share for other, share in charged.items() if share > 0}


def _find_together(spans: Iterable[tuple[int, SlowSpan]]) -> list[dict[int, int]]:
    """Excesses by worker of those that were slow beside each other, directly or through others; earliest first."""
    together: list[dict[int, int]] = []
    until_ns = -math.inf
    for worker, span in sorted(spans, key=lambda one: (one[1].start_ns, one[0])):
        if span.excess_ns <= 0:
            continue
        if not together or span.start_ns > until_ns:
            together.append({})
        until_ns = max(until_ns, span.end_ns)
        excess = together[-1]
        excess[worker] = excess.get(worker, 0) + span.excess_ns
    return together


def _share(amount: int, excess: Mapping[int, int]) -> dict[int, int]:
    """An amount in proportion to excesses; what does not divide goes to the greatest."""
    total = sum(excess.values())
    shares = {other: amount * part // total for other, part in excess.items()}
    greatest = max(excess, key=lambda other: (excess[other], -other))
    shares[greatest] += amount - sum(shares.values())
    return shares


def invert_charges(charges: Mapping[int, Mapping[int, int]]) -> dict[int, dict[int, int]]:
    """Who owes each worker: worker → whose wait is charged to it → nanoseconds."""
    owed: dict[int, dict[int, int]] = {}
    for worker, charged in charges.items():
        for other, amount in charged.items():
            owed.setdefault(other, {})[worker] = amount
    return owed
