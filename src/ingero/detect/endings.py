"""Which rank of a job ended first, of those that ended without success: the others end of that.

When one process of a job is gone, its peers' connections break and they end by an error, or their launcher ends them.
The time tells who was first where it differs by more than it can be wrong; where it does not, a process that was killed
or crashed comes before those that ended by an error of their own. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from ingero.detect.snapshots import MIN_HANG_NS
from ingero.model.hang import HangCause, HangRoot, StoppedGroup
from ingero.model.progress import Ending, RankProgress
from ingero.units import NS_PER_MS

NEAR_NS: Final = 500 * NS_PER_MS
"""Endings closer than this have no order: each was timed by its own agent, and took its own way here."""
STRUCK: Final = frozenset({
    signal.SIGKILL,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
})
"""Signals that end a process which had no error of its own to end by. Others are how programs and launchers end what
failed with the rest: SIGABRT after an exception that nobody caught, SIGTERM and SIGINT."""

_Key = TypeVar("_Key")


def find_first_ended(endings: Mapping[_Key, Ending]) -> tuple[_Key, ...]:
    """Who ended first without success; empty where nobody did, or where it cannot be said.

    Args:
        endings: Of the members of one job that ended.
    """
    failed = {key: ending for key, ending in endings.items() if ending.has_failed}
    if not failed:
        return ()
    first_ns = min(ending.at_ns for ending in failed.values())
    near = [key for key, ending in failed.items() if ending.at_ns - first_ns <= NEAR_NS]
    struck = [key for key in near if failed[key].signal in STRUCK]
    if struck:
        return tuple(struck)
    return tuple(near) if len(near) == 1 else ()


def blame_first_ended(
    roots: Sequence[HangRoot],
    failed: Mapping[int, RankProgress],
    moved_ns: Mapping[int, int],
    groups: Mapping[str, StoppedGroup],
) -> tuple[HangRoot, ...]:
    """The roots of a job of which processes ended without success: of those only the first.

    A rank that still ran when the first ended, and stands since, is about to end of it too.

    Args:
        roots: Whom ranks wait for.
        failed: Where the ranks that ended without success were then.
        moved_ns: When ranks that stand entered their last operation, on the clock of the endings.
        groups: Of the job.
    """
    first = find_first_ended({
        rank: stall.ending for rank, stall in failed.items() if stall.ending is not None
    })
    first_ns = min(
        (one.at_ns for rank in first if (one := failed[rank].ending) is not None), default=None
    )
    kept = [
        root
        for root in roots
        if root.rank not in failed
        and (first_ns is None or moved_ns.get(root.rank, 0) < first_ns - MIN_HANG_NS)
    ]
    known = {root.rank: root for root in roots}
    for rank in first:
        stall = failed[rank]
        root = known.get(rank) or HangRoot(
            rank, HangCause.ENDED, groups[stall.comm], stall.entered + 1, stall.left, ()
        )
        followers = {other.rank for other in roots if other not in kept}
        blocks = tuple(sorted({*root.blocks, *failed.keys(), *followers} - set(first)))
        if blocks:
            kept.append(replace(root, cause=HangCause.ENDED, blocks=blocks))
    return tuple(sorted(kept, key=lambda root: root.rank))
