"""Steps of a server, from the calls that its threads make towards the GPU.

A step is what one result takes: from the first copy in, launch or collective after the result before, to the return of
the wait that brings its own result back. Assumed:

- A result comes back as a small copy to the host that somebody then waits for. Where no such copy is ever seen on a
  stream, every wait with launches before it ends a step.
- Work and its wait are on one stream. A wait for an event is a wait for the stream that the event was recorded on. A
  copy or wait on a stream without launches belongs to the stream on which its thread launched last, or else to the
  stream of its process with the most launches.
- Time in which nothing was asked of the stream is no part of a step.

Launches may be sampled: their number is then estimated from their rows' weights, and a step that begins with a launch
may seem to begin later than it did. Waits, and copies while the agent watches inference, are not sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.arrays import BoolArray, IntArray, Records
from ingero.model.events import CopyKind, CudaOp, DriverOp, EventFlag, Events, Source
from ingero.model.operations import BLOCKING_COPIES, OpKind, code_of, find_failures, find_kinds
from ingero.units import NS_PER_S

STEP: Final = np.dtype([
    ("start_ns", "<i8"),  # Unix time
    ("end_ns", "<i8"),
    ("pid", "<i4"),
    ("tid", "<i4"),  # thread that waited for the result
    ("stream", "<i8"),  # handle, as the 64 bits of the call; 0 is the default stream
    ("n_launches", "<i8"),  # estimated where they are sampled; graphs are not among them
    ("n_graphs", "<i8"),
    ("n_collectives", "<i8"),
    ("input_bytes", "<i8"),  # host to device
    ("output_bytes", "<i8"),  # device to host
    ("blocks", "<f8"),  # mean size of a launch's grid; 0 without a launch
    ("is_estimated", "?"),  # some of its launches have no row
])
"""One step."""

MAX_RESULT_BYTES: Final = 64 * 1024
"""A greater copy to the host is no token: a swapped block of the cache, or hidden states."""
MAX_STEP_NS: Final = 60 * NS_PER_S
MAX_CARRIED: Final = 100_000
"""Rows of steps that have not ended: 10 MiB."""
_MAX_EVENTS: Final = 16_384
"""CUDA events that are remembered by the stream that they were recorded on last."""

_CALL: Final = np.dtype([
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
    ("pid", "<i4"),
    ("tid", "<i4"),
    ("stream", "<i8"),
    ("handle", "<i8"),
    ("amount", "<i8"),
    ("weight", "<i8"),
    ("what", "u1"),
])
_LAUNCH, _GRAPH, _COLLECTIVE, _INPUT, _OUTPUT, _WAIT, _MARK, _OTHER = 1, 2, 3, 4, 5, 6, 7, 8
_WORK: Final = (_LAUNCH, _GRAPH)
_BEGINS: Final = (_LAUNCH, _GRAPH, _COLLECTIVE, _INPUT)
_MARKS: Final = code_of(CudaOp.EVENT_RECORD)
_EVENT_WAITS: Final = list(map(code_of, (CudaOp.EVENT_SYNC, DriverOp.EVENT_SYNC)))
_STREAM_WAITS: Final = list(map(code_of, (CudaOp.STREAM_SYNC, DriverOp.STREAM_SYNC)))
_BLOCKING: Final = [*BLOCKING_COPIES, code_of(DriverOp.MEMCPY_DTOH), code_of(DriverOp.MEMCPY_HTOD)]
_UNKNOWN: Final = -(1 << 62)
"""Stands for a stream that the call does not say; no handle is like it."""

_Key = tuple[int, int]


def build_calls(events: Events) -> Records:
    """What a step is made of, from rows of EVENT; a blocking copy is two rows, the copy and the wait.

    Calls inside other calls, failed calls and calls in flight are left out.
    """
    flags = events["flags"]
    is_inner = (flags & (EventFlag.NESTED | EventFlag.IN_FLIGHT)) != 0
    is_failure = find_failures(events["source"], events["op"], events["ret_code"])
    events = events[~is_inner & ~is_failure]
    kinds = find_kinds(events["source"], events["op"])
    codes = events["source"].astype(np.int64) << 8 | events["op"]
    calls = np.zeros(len(events), _CALL)
    calls["start_ns"] = events["start_ns"]
    calls["end_ns"] = events["start_ns"] + events["duration_ns"]
    for name in ("pid", "tid", "weight"):
        calls[name] = events[name]
    calls["stream"] = np.where(kinds == OpKind.COPY, events["arg2"], events["arg1"])
    calls["handle"] = events["arg0"]
    is_copy, is_launch = kinds == OpKind.COPY, kinds == OpKind.LAUNCH
    calls["amount"] = np.select([is_launch, is_copy], [events["arg2"], events["arg0"]], 0)
    is_nccl = events["source"] == Source.NCCL
    is_wait = kinds == OpKind.SYNC
    has_no_stream = is_nccl | (is_wait & ~np.isin(codes, _STREAM_WAITS))
    calls["stream"][has_no_stream] = _UNKNOWN
    calls["what"] = np.select(
        [
            is_launch,
            kinds == OpKind.GRAPH_LAUNCH,
            (kinds == OpKind.COLLECTIVE) & is_nccl,
            is_copy & (events["arg1"] == CopyKind.HOST_TO_DEVICE),
            is_copy & (events["arg1"] == CopyKind.DEVICE_TO_HOST),
            is_wait,
            codes == _MARKS,
            is_copy,
        ],
        [_LAUNCH, _GRAPH, _COLLECTIVE, _INPUT, _OUTPUT, _WAIT, _MARK, _OTHER],
        0,
    )
    calls["weight"][calls["what"] != _LAUNCH] = 1
    is_event_wait = np.isin(codes, _EVENT_WAITS)
    calls["handle"][~is_event_wait & (codes != _MARKS)] = 0
    waits = calls[np.isin(codes, _BLOCKING)]
    waits["what"] = _WAIT
    calls = np.concatenate([calls[calls["what"] != 0], waits])
    return calls[np.argsort(calls["start_ns"], kind="stable")]


@dataclass(slots=True)
class StepFinder:
    """Finds the steps in batches of calls.

    Attributes:
        n_dropped: Calls that were forgotten because too many waited for the end of their step.
        n_long: Steps that were left out because they took over a minute.
    """

    n_dropped: int = 0
    n_long: int = 0
    _carried: Records = field(default_factory=lambda: np.zeros(0, _CALL))
    _marks: Records = field(default_factory=lambda: np.zeros(0, _CALL))
    _launched: dict[_Key, int] = field(default_factory=dict)
    _last: dict[_Key, int] = field(default_factory=dict)
    _brings: set[_Key] = field(default_factory=set)

    def take(self, calls: Records) -> Records:
        """Take calls and give the steps that ended.

        Args:
            calls: From `build_calls`, in order of time, none earlier than those of the batch before.

        Returns:
            Rows of STEP, by process and stream, in order of time within them.
        """
        if not len(calls):
            return np.zeros(0, STEP)
        self._resolve_events(calls)
        self._note_launches(calls)
        self._resolve_streams(calls)
        is_part = ~np.isin(calls["what"], (_MARK, _OTHER)) & (calls["stream"] != _UNKNOWN)
        calls = calls[is_part]
        calls = np.concatenate([self._carried, calls])
        calls = calls[np.lexsort((calls["start_ns"], calls["stream"], calls["pid"]))]
        is_result = (calls["what"] == _OUTPUT) & (calls["amount"] <= MAX_RESULT_BYTES)
        self._brings.update(_pairs(calls[is_result], "stream"))
        is_end = _find_ends(calls, is_result, self._find_bringing(calls))
        steps, is_open = _sum_up(calls, is_end)
        self._carry(calls[is_open])
        is_long = steps["end_ns"] - steps["start_ns"] > MAX_STEP_NS
        self.n_long += int(is_long.sum())
        kept: Records = steps[~is_long]
        return kept

    def forget(self, pids: set[int]) -> None:
        """Forget processes that ended."""
        gone = list(pids)
        for known in (self._launched, self._last):
            for key in [key for key in known if key[0] in pids]:
                del known[key]
        self._brings = {key for key in self._brings if key[0] not in pids}
        self._carried = self._carried[~np.isin(self._carried["pid"], gone)]
        self._marks = self._marks[~np.isin(self._marks["pid"], gone)]

    def _resolve_events(self, calls: Records) -> None:
        """Give waits for an event the stream that it was recorded on last."""
        is_mark = calls["what"] == _MARK
        is_event_wait = (calls["what"] == _WAIT) & (calls["handle"] != 0)
        marks = np.concatenate([self._marks, calls[is_mark]])
        if is_event_wait.any() and len(marks):
            waits = calls[is_event_wait]
            both = np.concatenate([marks, waits])
            order = np.lexsort((both["start_ns"], both["handle"], both["pid"]))
            both = both[order]
            is_known = both["what"] == _MARK
            newest = np.maximum.accumulate(np.where(is_known, np.arange(len(both)), -1))
            at = np.maximum(newest, 0)
            is_same = (
                (newest >= 0)
                & (both["pid"][at] == both["pid"])
                & (both["handle"][at] == both["handle"])
            )
            found = np.empty(len(both), np.int64)
            found[order] = np.where(is_same, both["stream"][at], _UNKNOWN)
            calls["stream"][is_event_wait] = found[len(marks) :]
        if is_mark.any():
            keys = np.stack([marks["pid"], marks["handle"]], axis=1)[::-1]
            _, first = np.unique(keys, axis=0, return_index=True)
            self._marks = marks[np.sort(len(marks) - 1 - first)][-_MAX_EVENTS:]

    def _note_launches(self, calls: Records) -> None:
        work = calls[np.isin(calls["what"], _WORK)]
        for key, n_launches in _pairs(work, "stream").items():
            self._launched[key] = self._launched.get(key, 0) + n_launches

    def _resolve_streams(self, calls: Records) -> None:
        """Give each call the stream whose step it is part of."""
        is_work = np.isin(calls["what"], _WORK)
        last = _find_last(calls, is_work, self._last)
        pairs, which = _unique_pairs(calls, "stream")
        is_home = np.array([key in self._launched for key in pairs], bool)[which]
        busiest: dict[int, int] = {}
        for (pid, stream), n in self._launched.items():
            if pid not in busiest or n > self._launched[pid, busiest[pid]]:
                busiest[pid] = stream
        pids, which_pid = np.unique(calls["pid"], return_inverse=True)
        fallback = np.array([busiest.get(pid, _UNKNOWN) for pid in pids.tolist()], np.int64)
        known = np.where(last != _UNKNOWN, last, fallback[which_pid])
        calls["stream"] = np.where(is_home, calls["stream"], known)

    def _find_bringing(self, calls: Records) -> BoolArray:
        """Which calls are on streams that bring results back."""
        pairs, which = _unique_pairs(calls, "stream")
        found: BoolArray = np.array([key in self._brings for key in pairs], bool)[which]
        return found

    def _carry(self, calls: Records) -> None:
        """Keep calls of steps that have not ended."""
        self.n_dropped += max(len(calls) - MAX_CARRIED, 0)
        newest = np.sort(np.argsort(calls["start_ns"], kind="stable")[-MAX_CARRIED:])
        self._carried = calls[newest]


def _unique_pairs(calls: Records, name: str) -> tuple[list[_Key], IntArray]:
    """Pairs of the process and one more field, and which of them each row has."""
    _, first, which = np.unique(
        _mix(calls["pid"], calls[name]), return_index=True, return_inverse=True
    )
    rows = calls[first]
    return list(zip(rows["pid"].tolist(), rows[name].tolist(), strict=True)), which


def _mix(pids: IntArray, values: IntArray) -> Records:
    """Two columns as one that compares by both."""
    pairs = np.empty(len(pids), [("pid", "<i8"), ("value", "<i8")])
    pairs["pid"], pairs["value"] = pids, values
    return pairs


def _pairs(calls: Records, name: str) -> dict[_Key, int]:
    """How many rows have each pair of a process and one more field."""
    pairs, which = _unique_pairs(calls, name)
    counts = np.bincount(which, minlength=len(pairs)).tolist()
    return dict(zip(pairs, counts, strict=True))


def _find_last(calls: Records, is_work: BoolArray, before: dict[_Key, int]) -> IntArray:
    """The stream on which each call's thread launched last, up to then; updates what was known before."""
    pairs, which = _unique_pairs(calls, "tid")
    order = np.lexsort((np.arange(len(calls)), which))
    position = np.where(is_work[order], np.arange(len(calls)), -1)
    newest = np.maximum.accumulate(position)
    begins = np.searchsorted(which[order], np.arange(len(pairs)))
    is_here = newest >= begins[which[order]]
    earlier = np.array([before.get(key, _UNKNOWN) for key in pairs], np.int64)
    streams = np.where(
        is_here, calls["stream"][order][np.maximum(newest, 0)], earlier[which[order]]
    )
    found = np.empty(len(calls), np.int64)
    found[order] = streams
    ends = np.append(begins[1:], len(calls)) - 1
    newest_of = zip(pairs, streams[ends].tolist(), strict=True)
    before.update({key: stream for key, stream in newest_of if stream != _UNKNOWN})
    return found


def _find_ends(calls: Records, is_result: BoolArray, is_bringing: BoolArray) -> BoolArray:
    """Which waits end a step: those with a result, or for streams without results a launch, since the wait before.

    A wait without one since the wait before is no end whatever came earlier: the wait before was the end then.
    """
    index = np.arange(len(calls))
    is_wait = calls["what"] == _WAIT
    counted = np.where(is_bringing, is_result, np.isin(calls["what"], _WORK))
    n_before = np.concatenate([[0], np.cumsum(counted)])
    is_first = np.ones(len(calls), bool)
    is_first[1:] = (calls["pid"][1:] != calls["pid"][:-1]) | (
        calls["stream"][1:] != calls["stream"][:-1]
    )
    after_wait = np.zeros(len(calls), np.int64)  # the row after the newest wait before this one
    after_wait[1:] = np.maximum.accumulate(np.where(is_wait, index + 1, 0))[:-1]
    begins = np.maximum(after_wait, np.maximum.accumulate(np.where(is_first, index, 0)))
    ends: BoolArray = is_wait & (n_before[index + 1] > n_before[begins])
    return ends


def _sum_up(calls: Records, is_end: BoolArray) -> tuple[Records, BoolArray]:
    """Rows of STEP, and which calls belong to none that ended."""
    n_calls = len(calls)
    ends = np.flatnonzero(is_end)
    is_open = np.ones(n_calls, bool)
    if not len(ends):
        return np.zeros(0, STEP), is_open
    step_of = np.searchsorted(ends, np.arange(n_calls))
    at = np.minimum(step_of, len(ends) - 1)
    is_open = (
        (step_of == len(ends))
        | (calls["pid"] != calls["pid"][ends[at]])
        | (calls["stream"] != calls["stream"][ends[at]])
    )
    inside = ~is_open
    own, which = calls[inside], step_of[inside]

    def total(mask: BoolArray, values: IntArray) -> IntArray:
        sums = np.bincount(which, np.where(mask, values, 0), len(ends))
        return np.rint(sums).astype(np.int64)

    ones = np.ones(len(own), np.int64)
    is_launch = own["what"] == _LAUNCH
    steps = np.zeros(len(ends), STEP)
    steps["end_ns"] = calls["end_ns"][ends]
    for name in ("pid", "tid", "stream"):
        steps[name] = calls[name][ends]
    steps["n_launches"] = total(is_launch, own["weight"])
    for name, what in (("n_graphs", _GRAPH), ("n_collectives", _COLLECTIVE)):
        steps[name] = total(own["what"] == what, ones)
    for name, what in (("input_bytes", _INPUT), ("output_bytes", _OUTPUT)):
        steps[name] = total(own["what"] == what, own["amount"])
    blocks = np.bincount(which, np.where(is_launch, own["weight"] * own["amount"], 0), len(ends))
    steps["blocks"] = blocks / np.maximum(steps["n_launches"], 1)
    steps["is_estimated"] = total(is_launch & (own["weight"] > 1), ones) > 0
    never = np.iinfo(np.int64).max
    firsts = np.full(len(ends), never)
    np.minimum.at(firsts, which, np.where(np.isin(own["what"], _BEGINS), own["start_ns"], never))
    steps["start_ns"] = firsts
    return steps[firsts != never], is_open


def find_workloads(steps: Records) -> Mapping[_Key, IntArray]:
    """Row numbers of the steps of each process and stream, in their order."""
    if not len(steps):
        return {}
    pairs, which = _unique_pairs(steps, "stream")
    order = np.argsort(which, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(which, minlength=len(pairs)))[:-1])
    return dict(zip(pairs, parts, strict=True))
