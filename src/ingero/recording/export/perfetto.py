"""A recording as a Chrome JSON trace, for Perfetto and chrome://tracing.

Calls lie on their thread's own track, thread waits on a track beside it, requests that overlap are asynchronous slices,
a collective is joined across ranks by a flow, the machine's load is a counter, incidents are slices on a track of their
node. Times are µs with ns as decimals from the first event, which ``otherData`` dates.

Source: "Trace Event Format" (Chromium project): phases X, b/e, C, M, s/f; JSON object form.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np

from ingero.errors import StoreError
from ingero.model.arrays import IntArray
from ingero.model.events import Source, op_name, source_name
from ingero.model.incidents import Incident
from ingero.model.operations import LAST_CALL, OpKind, find_kinds
from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.causal.engine import explain
from ingero.units import NS_PER_S

Element = dict[str, Any]

_WAIT_TID: Final = (
    1 << 24
)  # added to a thread's id for its track of waits: above any Linux pid (2**22)
_INCIDENT_TID: Final = 1
_CHUNK: Final = 20_000
_LEAD_NS: Final = 10 * NS_PER_S
_COLOURS: Final = {"HIGH": "bad", "MEDIUM": "yellow", "LOW": "good"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    n_events: int
    n_incidents: int
    n_bytes: int


class _Numbering:
    """Track numbers: one process per (node, pid), counted from 1 in ascending order; nodes follow."""

    def __init__(self, recording: Recording) -> None:
        keys = recording.events["node"].astype(np.int64) << 32 | recording.events["pid"]
        self.keys = np.unique(keys)
        self.of_event: IntArray = np.searchsorted(self.keys, keys) + 1

    def of_process(self, node: int, pid: int) -> int:
        at = int(np.searchsorted(self.keys, node << 32 | pid))
        is_known = at < len(self.keys) and self.keys[at] == node << 32 | pid
        return at + 1 if is_known else self.of_node(node)

    def of_node(self, node: int) -> int:
        return len(self.keys) + 1 + node


def write_perfetto(recording: Recording, out: BinaryIO) -> Exported:
    """Write a recording and its incidents; the same recording always gives the same bytes."""
    explained = explain(recording)
    numbers = _Numbering(recording)
    start_ns = _find_start(recording, explained.start_ns)
    n_bytes = out.write(
        b'{"displayTimeUnit":"ns","otherData":{"start_unix_ns":"%d"},"traceEvents":[' % start_ns
    )
    encoder = msgspec.json.Encoder()
    is_first = True
    for chunk in _chunks(_iter_elements(recording, numbers, explained.incidents, start_ns)):
        body = b",\n".join(encoder.encode(element) for element in chunk)
        n_bytes += out.write(body if is_first else b",\n" + body)
        is_first = False
    n_bytes += out.write(b"]}\n")
    return Exported(len(recording.events), len(explained.incidents), n_bytes)


def _find_start(recording: Recording, first_ns: int) -> int:
    """Where the trace begins: with the first event, or with the machine's load shortly before it.

    Perfetto drops what has a negative time.
    """
    walls = recording.snapshots["wall_ns"]
    shortly = walls[walls >= first_ns - _LEAD_NS]
    return min(first_ns, int(shortly.min())) if len(shortly) else first_ns


def _chunks(elements: Iterator[Element]) -> Iterator[list[Element]]:
    chunk: list[Element] = []
    for element in elements:
        chunk.append(element)
        if len(chunk) >= _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _iter_elements(
    recording: Recording, numbers: _Numbering, incidents: tuple[Incident, ...], start_ns: int
) -> Iterator[Element]:
    yield from _iter_names(recording, numbers)
    yield from _iter_events(recording, numbers, start_ns)
    yield from _iter_flows(recording, numbers, start_ns)
    yield from _iter_counters(recording, numbers, start_ns)
    yield from _iter_incidents(recording, numbers, incidents, start_ns)


def _us(at_ns: int, start_ns: int) -> float:
    return (at_ns - start_ns) / 1000


def _named(kind: str, pid: int, tid: int, name: str) -> Element:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": clean(name)}}


def _iter_names(recording: Recording, numbers: _Numbering) -> Iterator[Element]:
    """Names of processes, threads, their wait tracks and the nodes."""
    events = recording.events
    for key in numbers.keys.tolist():
        node, pid = key >> 32, key & 0xFFFF_FFFF
        place = recording.ranks.get((node, pid))
        rank = f" (rank {place.rank})" if place is not None and place.rank >= 0 else ""
        where = f" on {recording.nodes[node]}" if recording.nodes[node] else ""
        name = f"{recording.process_name(node, pid)} [{pid}]{where}{rank}"
        yield _named("process_name", numbers.of_process(node, pid), 0, name)
    kinds = find_kinds(events["source"], events["op"])
    tracks = numbers.of_event << 32 | events["tid"]
    for waits, mask in ((False, kinds <= LAST_CALL), (True, kinds == OpKind.OFF_CPU)):
        for track in np.unique(tracks[mask]).tolist():
            number, tid = track >> 32, track & 0xFFFF_FFFF
            node = int(numbers.keys[number - 1]) >> 32
            name = recording.process_name(node, tid)
            yield _named(
                "thread_name",
                number,
                tid + (_WAIT_TID if waits else 0),
                f"{name} waits" if waits else name,
            )
    for node, name in enumerate(recording.nodes):
        yield _named("process_name", numbers.of_node(node), 0, f"node {name}".strip())
        yield _named("thread_name", numbers.of_node(node), _INCIDENT_TID, "incidents")


def _iter_events(recording: Recording, numbers: _Numbering, start_ns: int) -> Iterator[Element]:
    events = recording.events
    kinds = find_kinds(events["source"], events["op"])
    names: dict[int, tuple[str, str]] = {}
    for i, event in enumerate(events):
        source, op = int(event["source"]), int(event["op"])
        if (source << 8 | op) not in names:
            names[source << 8 | op] = (op_name(source, op), source_name(source))
        name, category = names[source << 8 | op]
        element: Element = {
            "name": name,
            "cat": category,
            "pid": int(numbers.of_event[i]),
            "tid": int(event["tid"]),
            "ts": _us(int(event["start_ns"]), start_ns),
        }
        arguments = _arguments(event)
        if arguments:
            element["args"] = arguments
        yield from _shaped(element, int(event["duration_ns"]), int(kinds[i]), i)


def _arguments(event: np.void) -> Element:
    """What is not 0, by a name a person reads."""
    names = ("gpu_id", "ret_code", "arg0", "arg1", "arg2", "arg3", "other_pid", "wait_ns")
    return {name: int(event[name]) for name in names if event[name]}


def _shaped(element: Element, duration_ns: int, kind: int, number: int) -> Iterator[Element]:
    """The element in the phase its kind needs: calls and waits nest, requests overlap, facts are moments."""
    if not duration_ns:
        yield element | {"ph": "i", "s": "t"}
    elif kind <= LAST_CALL:
        yield element | {"ph": "X", "dur": duration_ns / 1000}
    elif kind == OpKind.OFF_CPU:
        yield element | {"ph": "X", "dur": duration_ns / 1000, "tid": element["tid"] + _WAIT_TID}
    else:
        identity = {"id": number}
        yield element | {"ph": "b"} | identity
        end: Element = {key: element[key] for key in ("name", "cat", "pid", "tid")}
        yield end | {"ph": "e", "ts": element["ts"] + duration_ns / 1000} | identity


def _iter_flows(recording: Recording, numbers: _Numbering, start_ns: int) -> Iterator[Element]:
    """An arrow through the calls of one collective, in order of arrival."""
    events = recording.events
    idx = np.flatnonzero((events["source"] == Source.NCCL) & (events["arg1"] != 0))
    keys = np.stack((events["arg1"][idx], events["arg2"][idx]), axis=1)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    in_groups = idx[np.argsort(group, kind="stable")]
    ends = np.cumsum(np.bincount(group))
    for number, part in enumerate(np.split(in_groups, ends[:-1])):
        members = part.tolist()
        if len(members) < 2:
            continue
        for i, at in enumerate(members):
            yield {
                "ph": "s" if not i else ("f" if i == len(members) - 1 else "t"),
                "name": "collective",
                "cat": "nccl",
                "id": number + 1,
                "bp": "e",
                "pid": int(numbers.of_event[at]),
                "tid": int(events["tid"][at]),
                "ts": _us(int(events["start_ns"][at]), start_ns),
            }


def _iter_counters(recording: Recording, numbers: _Numbering, start_ns: int) -> Iterator[Element]:
    for shot in recording.snapshots[recording.snapshots["wall_ns"] >= start_ns]:
        for name, key in (("CPU %", "cpu_pct"), ("memory %", "mem_pct"), ("load", "load1")):
            yield {
                "ph": "C",
                "name": name,
                "pid": numbers.of_node(int(shot["node"])),
                "ts": _us(int(shot["wall_ns"]), start_ns),
                "args": {"value": float(shot[key])},
            }


def _iter_incidents(
    recording: Recording, numbers: _Numbering, incidents: tuple[Incident, ...], start_ns: int
) -> Iterator[Element]:
    """One asynchronous slice each, so that incidents may overlap."""
    for i, incident in enumerate(incidents):
        node = recording.nodes.index(incident.node)
        both: Element = {
            "name": f"{incident.severity.value}: {clean(incident.title, 512)}",
            "cat": "incident",
            "pid": numbers.of_node(node),
            "tid": _INCIDENT_TID,
            "id": f"incident-{i}",
        }
        causes = "; ".join(f"{cause.share:.0%} {clean(cause.name)}" for cause in incident.causes)
        yield both | {
            "ph": "b",
            "ts": _us(incident.start_ns, start_ns),
            "cname": _COLOURS[incident.severity.value],
            "args": {"id": incident.id, "causes": causes, "fix": "; ".join(incident.fix)},
        }
        yield both | {"ph": "e", "ts": _us(incident.end_ns, start_ns)}


def export_file(recording: Recording, path: Path) -> Exported:
    """Write a recording's trace to a file, whole or not at all.

    Raises:
        StoreError: The file cannot be written.
    """
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        raise StoreError(f"cannot write {path}: not a regular file")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")  # another export may write there, too
    try:
        with part.open("wb") as out:
            exported = write_perfetto(recording, out)
        part.replace(path)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return exported
