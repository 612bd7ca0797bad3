"""Part of a recording from one program to another, and several parts as one recording.

The rows travel as this version's own arrays, so both ends must lay them out alike; the layout is sent along and
checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from ingero.errors import BadDataError
from ingero.model.arrays import Records
from ingero.model.events import EVENT, EventFlag
from ingero.model.gpu_view import GpuView
from ingero.model.recording import (
    AGGREGATE,
    COVERAGE,
    HISTOGRAM,
    SNAPSHOT,
    ProcessRank,
    Recording,
    Session,
    Unprobed,
    Unwritten,
)

MAX_ROWS: Final = 250_000
"""Rows of one part: 28 MB."""

_STACK_BYTES: Final = 2 * 1024 * 1024
"""Of stacks in one part; the rows and these fit into what `ingero.recording.queries.fanout` takes."""

_TABLES: Final = {
    "events": EVENT, "aggregates": AGGREGATE, "coverage": COVERAGE, "snapshots": SNAPSHOT,
    "histograms": HISTOGRAM,
}  # fmt: skip
FactT = TypeVar("FactT")
_LAYOUT: Final = repr([dtype.descr for dtype in _TABLES.values()])


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    layout: str
    nodes: list[str]
    names: list[tuple[int, int, str]]
    ranks: list[tuple[int, int, int, int, int]]
    sessions: list[Session]
    unprobed: list[Unprobed]
    tables: dict[str, bytes]
    n_events_stored: int
    is_truncated: bool
    has_gpu_ids: bool
    asked_ns: tuple[int, int] = (0, 0)
    pids: list[int] = []
    unwritten: list[Unwritten] = []
    n_damaged: int = 0
    stacks: dict[int, str] = {}
    gpu_views: list[tuple[int, int, GpuView]] = []
    parents: list[tuple[int, int, int]] = []


def encode_part(recording: Recording) -> bytes:
    """A recording as MessagePack."""
    return msgspec.msgpack.encode(
        _Part(
            _LAYOUT,
            list(recording.nodes),
            [(*key, name) for key, name in recording.process_names.items()],
            [
                (*key, rank.rank, rank.local_rank, rank.world_size)
                for key, rank in recording.ranks.items()
            ],
            list(recording.sessions),
            list(recording.unprobed),
            {name: getattr(recording, name).tobytes() for name in _TABLES},
            recording.n_events_stored,
            recording.is_truncated,
            recording.has_gpu_ids,
            recording.asked_ns,
            list(recording.pids),
            list(recording.unwritten),
            recording.n_damaged,
            _choose_stacks(recording),
            [(*key, view) for key, view in recording.gpu_views.items()],
            [(*key, parent) for key, parent in recording.parents.items()],
        )
    )


def _choose_stacks(recording: Recording) -> dict[int, str]:
    """Stacks of calls that had not returned, then of the longest, as many as fit."""
    events = recording.events[recording.events["stack_hash"] != 0]
    is_open = (events["flags"] & EventFlag.IN_FLIGHT) != 0
    order = np.lexsort((-events["duration_ns"], ~is_open))
    chosen: dict[int, str] = {}
    left = _STACK_BYTES
    for key in dict.fromkeys(events["stack_hash"][order].tolist()):
        frames = recording.stacks.get(key, "")
        left -= len(frames.encode()) + 16
        if left < 0:
            break
        if frames:
            chosen[key] = frames
    return chosen


def decode_part(body: bytes) -> Recording:
    """The recording that another program encoded.

    Raises:
        BadDataError: It is not one, or its rows are laid out differently.
    """
    try:
        part = msgspec.msgpack.decode(body, type=_Part)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadDataError(f"not part of a recording: {error}") from error
    if part.layout != _LAYOUT:
        raise BadDataError(
            "its rows are laid out differently", hint="use one version of ingero everywhere"
        )
    tables = {name: _as_rows(part, name, dtype) for name, dtype in _TABLES.items()}
    return Recording(
        events=tables["events"],
        nodes=tuple(part.nodes),
        process_names={(node, pid): name for node, pid, name in part.names},
        ranks={(node, pid): ProcessRank(*place) for node, pid, *place in part.ranks},
        aggregates=tables["aggregates"],
        coverage=tables["coverage"],
        snapshots=tables["snapshots"],
        histograms=tables["histograms"],
        sessions=tuple(part.sessions),
        unprobed=tuple(part.unprobed),
        n_events_stored=part.n_events_stored,
        is_truncated=part.is_truncated,
        has_gpu_ids=part.has_gpu_ids,
        asked_ns=part.asked_ns,
        pids=tuple(part.pids),
        unwritten=tuple(part.unwritten),
        n_damaged=part.n_damaged,
        stacks=part.stacks,
        gpu_views={(node, pid): view for node, pid, view in part.gpu_views},
        parents={(node, pid): parent for node, pid, parent in part.parents},
    )


def _as_rows(part: _Part, name: str, dtype: np.dtype[np.void]) -> Records:
    body = part.tables.get(name, b"")
    if len(body) % dtype.itemsize:
        raise BadDataError(f"its {name} are cut short")
    rows: Records = np.frombuffer(body, dtype).copy()
    if len(rows) and int(rows["node"].max()) >= len(part.nodes):
        raise BadDataError(f"its {name} name a node that it does not have")
    return rows


def _shift(
    of_processes: Mapping[tuple[int, int], FactT], first: int
) -> dict[tuple[int, int], FactT]:
    """Facts of processes whose nodes get other numbers."""
    return {(node + first, pid): fact for (node, pid), fact in of_processes.items()}


def _join_asked(parts: Sequence[tuple[str, Recording]]) -> dict[str, Any]:
    """What was asked for of all parts: from when of each node, and until when."""
    begins = tuple(recording.asked_ns[0] for _, recording in parts for _ in recording.nodes)
    ends = (recording.asked_ns[1] for _, recording in parts)
    first, last = (min(filter(None, moments), default=0) for moments in (begins, ends))
    return {"asked_ns": (first, last), "asked_from_ns": begins}


def join_parts(parts: Sequence[tuple[str, Recording]]) -> Recording:
    """Several recordings as one, each on its own clock.

    Args:
        parts: (address, recording) each. A node without a name gets the address; two of one name get theirs added.
    """
    nodes: list[str] = []
    tables: dict[str, list[Records]] = {name: [] for name in _TABLES}
    names: dict[tuple[int, int], str] = {}
    ranks: dict[tuple[int, int], ProcessRank] = {}
    sessions: list[Session] = []
    unprobed: list[Unprobed] = []
    unwritten: list[Unwritten] = []
    stacks: dict[int, str] = {}
    gpu_views: dict[tuple[int, int], GpuView] = {}
    parents: dict[tuple[int, int], int] = {}
    for address, recording in parts:
        first = len(nodes)
        for name in recording.nodes:
            free = name or address
            nodes.append(f"{free}@{address}" if free in nodes else free)
        named = dict(zip(recording.nodes, nodes[first:], strict=True))
        sessions += [
            replace(session, node=named.get(session.node, session.node))
            for session in recording.sessions
        ]
        if len(recording.nodes) == 1:
            named[""] = nodes[first]  # what names no node is of the only one
        unprobed += [replace(one, node=named.get(one.node, one.node)) for one in recording.unprobed]
        unwritten += [
            replace(one, node=named.get(one.node, one.node)) for one in recording.unwritten
        ]
        for table, rows in tables.items():
            mine = getattr(recording, table).copy()
            mine["node"] += first
            rows.append(mine)
        names |= _shift(recording.process_names, first)
        stacks |= recording.stacks
        gpu_views |= _shift(recording.gpu_views, first)
        parents |= _shift(recording.parents, first)
        ranks |= _shift(recording.ranks, first)
    joined: dict[str, Any] = {
        name: np.concatenate(rows) if rows else np.empty(0, _TABLES[name])
        for name, rows in tables.items()
    }
    joined["events"] = joined["events"][np.argsort(joined["events"]["start_ns"], kind="stable")]
    joined["snapshots"] = np.sort(joined["snapshots"], order="wall_ns")
    return Recording(
        nodes=tuple(nodes),
        process_names=names,
        ranks=ranks,
        sessions=tuple(sessions),
        unprobed=tuple(unprobed),
        unwritten=tuple(unwritten),
        n_damaged=sum(recording.n_damaged for _, recording in parts),
        stacks=stacks,
        gpu_views=gpu_views,
        parents=parents,
        n_events_stored=sum(recording.n_events_stored for _, recording in parts),
        is_truncated=any(recording.is_truncated for _, recording in parts),
        has_gpu_ids=all(recording.has_gpu_ids for _, recording in parts),
        pids=tuple(sorted({pid for _, recording in parts for pid in recording.pids})),
        **joined,
        **_join_asked(parts),
    )
