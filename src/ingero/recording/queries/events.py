"""Rows of a recording as people read them: names for codes, one object per event."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ingero.model.events import OP_NAMES, find_op, op_name, source_name
from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.queries.labels import LabelsInTime
from ingero.recording.queries.window import AskedError, format_wall
from ingero.recording.store.annotations import StoredAnnotation
from ingero.units import format_duration


class EventRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """One event; what is absent or 0 is left out."""

    timestamp: str
    pid: int
    tid: int
    source: str
    op: str
    duration_ns: int
    duration: str
    args: list[int]
    comm: str = ""
    node: str = ""
    gpu_id: int = 0
    return_code: int = 0
    cgroup_id: int = 0
    stack_hash: int = 0
    labels: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class ListedEvents:
    """Events of a recording.

    Attributes:
        rows: The newest of those that were found, in time order.
        n_found: How many were found.
    """

    rows: list[EventRow]
    n_found: int


def list_events(
    recording: Recording,
    *,
    op: str = "",
    limit: int = 10_000,
    annotations: Iterable[StoredAnnotation] = (),
) -> ListedEvents:
    """The newest events of a recording in time order, with the labels that workloads gave them.

    Raises:
        AskedError: No operation has that name.
    """
    events = recording.events
    if op:
        wanted = find_op(op)
        if wanted is None:
            known = ", ".join(
                sorted(name for names in OP_NAMES.values() for name in names.values())
            )
            raise AskedError(f"no operation is called {op!r}", hint=f"one of: {known}")
        events = events[(events["source"] == wanted[0]) & (events["op"] == wanted[1])]
    rows = list(_iter_rows(recording, events[-limit:], LabelsInTime(annotations)))
    return ListedEvents(rows, len(events))


def _iter_rows(
    recording: Recording, events: np.ndarray[Any, np.dtype[np.void]], labels: LabelsInTime
) -> Iterator[EventRow]:
    for event in events:
        node, pid = int(event["node"]), int(event["pid"])
        yield EventRow(
            timestamp=format_wall(int(event["start_ns"])),
            pid=pid,
            tid=int(event["tid"]),
            source=source_name(int(event["source"])),
            op=op_name(int(event["source"]), int(event["op"])),
            duration_ns=int(event["duration_ns"]),
            duration=format_duration(int(event["duration_ns"])),
            args=[int(event["arg0"]), int(event["arg1"])],
            comm=clean(recording.process_names.get((node, pid), "")),
            node=recording.nodes[node],
            gpu_id=int(event["gpu_id"]),
            return_code=int(event["ret_code"]),
            cgroup_id=int(event["cgroup_id"]),
            stack_hash=int(event["stack_hash"]),
            labels=labels.find(recording.nodes[node], pid, int(event["start_ns"])),
        )
