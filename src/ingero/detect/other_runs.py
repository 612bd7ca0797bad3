"""Whether states of ranks are of one run of a job, or some of an earlier run whose dumps were left in the same place.

A rank that cannot write a dump leaves the one that it wrote in an earlier run, under the same name. Sequence numbers of
two runs are not comparable. Pure functions over `ingero.model.hang.RankState`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from ingero.model.hang import RankState
from ingero.units import NS_PER_S, format_duration

DEFAULT_GROUP: Final = "default_pg"
"""What PyTorch calls the communicator of all ranks of a job."""
CLOCKS_NS: Final = 3600 * NS_PER_S
"""By how much ranks of one run may enter an operation apart, beyond its timeout: clocks of nodes may be off."""


def describe_other_run(states: Iterable[RankState]) -> str:
    """Why the states are not of one run, as a sentence; empty when nothing says so."""
    known = list(states)
    return _compare_members(known) or _compare_times(known)


def _compare_members(states: Sequence[RankState]) -> str:
    """A run has one default communicator; a rank that made it anew may have kept the former one too."""
    first: tuple[int, set[tuple[int, ...]]] | None = None
    for state in states:
        mine = {
            group.ranks
            for group in state.groups.values()
            if group.description == DEFAULT_GROUP and group.is_whole
        }
        if not mine:
            continue
        if first is None:
            first = (state.rank, mine)
        elif not mine & first[1]:
            return (
                f"the default group of rank {state.rank} has other members than that of rank {first[0]}:"
                " their dumps are of different runs or jobs, keep those of one"
            )
    return ""


def _compare_times(states: Sequence[RankState]) -> str:
    """Ranks of one run enter an operation within its timeout, after which those that came first give up."""
    earliest: dict[tuple[str, int], tuple[int, int]] = {}
    latest: dict[tuple[str, int], tuple[int, int]] = {}
    longest_ns = 0
    for state in states:
        for group, ops in state.recorded.items():
            for seq, op in ops.items():
                longest_ns = max(longest_ns, op.timeout_ns or 0)
                if op.entered_wall_ns is not None:
                    one = (op.entered_wall_ns, state.rank)
                    earliest[group, seq] = min(earliest.get((group, seq), one), one)
                    latest[group, seq] = max(latest.get((group, seq), one), one)
    apart = {place: latest[place][0] - earliest[place][0] for place in latest}
    place = max(apart, key=lambda one: (apart[one], one), default=None)
    if place is None or apart[place] <= longest_ns + CLOCKS_NS:
        return ""
    return (
        f"rank {earliest[place][1]} entered operation {place[1]} of group {place[0] or 'default'}"
        f" {format_duration(apart[place])} before rank {latest[place][1]} did: its dump is of an earlier run,"
        " then remove it, or its clock is off"
    )
