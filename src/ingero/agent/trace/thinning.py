"""Fewer rows of the kinds that are sampled: each that stays carries the weights of those left out beside it."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray
from ingero.model.events import EventFlag, Events
from ingero.model.sampling import is_never_sampled

MAX_PER_KIND: Final = 4
"""Rows of one operation of one process that stay, of one batch: the recorder's batches are a second's."""
_WEIGHT_LIMIT: Final = (1 << 31) - 1


def is_kept_whole(events: Events) -> BoolArray:
    """Which rows are never left out: kinds that are never sampled, and what was first, slow, large or failed."""
    kept = is_never_sampled(events["source"], events["op"])
    kept |= (events["flags"] & (EventFlag.EXEMPLAR | EventFlag.IN_FLIGHT)) != 0
    return kept


def thin(events: Events, max_rows: int = MAX_PER_KIND) -> Events:
    """Leave out ordinary rows of sampled kinds until at most `max_rows` of each process and operation are left.

    The weights of each process and operation add up to what they did before: a row that stays carries those of the rows
    left out just before it.

    Args:
        events: Rows of EVENT in any order.
        max_rows: Ordinary rows that stay of one process and operation.

    Returns:
        The rows that stay, in the order they had.
    """
    kept = is_kept_whole(events)
    ordinary = np.flatnonzero(~kept)
    if not ordinary.size:
        return events
    rows = events[ordinary]
    keys = (
        (rows["pid"].astype(np.int64) << 16) | (rows["source"].astype(np.int64) << 8) | rows["op"]
    )
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
    n_rows = np.diff(begins, append=len(ordered))
    number = np.arange(len(ordered)) - np.repeat(begins, n_rows)
    n_of_kind = np.repeat(n_rows, n_rows)
    n_stay = np.minimum(n_of_kind, max_rows)
    part = number * n_stay // n_of_kind  # of as many parts as rows stay; none is empty
    firsts = np.flatnonzero((number == 0) | (np.diff(part, prepend=-1) != 0))
    lasts = np.append(firsts[1:], len(ordered)) - 1
    weights = np.add.reduceat(rows["weight"][order].astype(np.int64), firsts)
    staying = ordinary[order[lasts]]
    result = events.copy()
    result["weight"][staying] = np.minimum(weights, _WEIGHT_LIMIT)
    kept[staying] = True
    return result[kept]
