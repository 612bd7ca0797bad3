"""Which of the files to merge hold the same recordings, decided before anything is written. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingero.errors import BadDataError
from ingero.recording.store.identity import Part, SourceState


@dataclass(frozen=True, slots=True)
class MergeSource:
    """A file to merge.

    Attributes:
        path: The file.
        parts: The recordings it holds, and how far each had come.
        is_merged: It is the result of a merge.
        nodes: Nodes that its rows carry, or are given.
        given_node: What rows without a node are given; empty where the file's rows carry one.
        first_ns: Its first event, Unix time; 0 without.
    """

    path: Path
    parts: Mapping[Part, SourceState]
    is_merged: bool
    nodes: tuple[str, ...]
    given_node: str = ""
    first_ns: int = 0

    @property
    def n_events(self) -> int:
        """Rows of events."""
        return sum(state.events for state in self.parts.values())


@dataclass(slots=True)
class MergeGroup:
    """Files that are added together.

    Attributes:
        sources: One merged file, or states of one recording, the latest last.
        is_merged: The former.
    """

    sources: list[MergeSource]
    is_merged: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What a merge does.

    Attributes:
        groups: In the order to be written.
        repeated: Files whose recordings another one holds whole.
    """

    groups: list[MergeGroup]
    repeated: list[MergeSource]


def plan_merge(sources: Sequence[MergeSource]) -> Plan:
    """Put every recording into one group; the answer is the same in any order of the files.

    Raises:
        BadDataError: Two merged files share a part of their recordings, or hold one in different states: what is
            counted twice could not be distinguished from what is not.
    """
    groups: list[MergeGroup] = []
    repeated: list[MergeSource] = []
    held: dict[Part, tuple[MergeGroup, SourceState]] = {}
    for source in sorted(sources, key=_order):
        shared = [part for part in source.parts if part in held]
        if not shared:
            group = MergeGroup([source], source.is_merged)
            groups.append(group)
            held |= {part: (group, state) for part, state in source.parts.items()}
        elif not source.is_merged and not held[shared[0]][0].is_merged:
            held[shared[0]][0].sources.append(source)
        elif len(shared) == len(source.parts) and all(
            held[part][1] == state for part, state in source.parts.items()
        ):
            repeated.append(source)
        else:
            other = held[shared[0]][0].sources[0].path
            raise BadDataError(
                f"{source.path} and {other} hold the same recording, and not to the same extent",
                hint="merge the files that these were made of, each once",
            )
    for group in groups:
        group.sources.sort(key=lambda one: (*_extent(one), str(one.path)))
    groups.sort(key=lambda group: _written(group.sources[-1]))
    return Plan(groups, repeated)


def _written(source: MergeSource) -> tuple[bool, int, list[tuple[str, str]]]:
    """By time, so that the last row is the latest; without identities the largest first, which may hold the others."""
    is_derived = any(part.is_derived for part in source.parts)
    return is_derived, -source.n_events if is_derived else source.first_ns, _names(source)


def _names(source: MergeSource) -> list[tuple[str, str]]:
    return sorted((part.id, part.node) for part in source.parts)


def _extent(source: MergeSource) -> tuple[int, int]:
    return sum(state.calls for state in source.parts.values()), source.n_events


def _order(source: MergeSource) -> tuple[bool, int, bool, int, list[tuple[str, str]], str]:
    """Merged files before others and larger ones first, so that what another file holds comes after that."""
    is_derived = any(part.is_derived for part in source.parts)
    return (
        *(not source.is_merged, -len(source.parts), is_derived, -source.n_events),
        _names(source),
        str(source.path),
    )
