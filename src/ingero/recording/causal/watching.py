"""When a recording was watched: from the begin to the end of each run of the agent, and while a pid was somebody's.

Of other time the lack of rows says nothing.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.events import HostOp
from ingero.model.operations import code_of
from ingero.model.recording import Recording
from ingero.recording.causal.intervals import NO_TIME, Intervals, Times


def find_unwatched(recording: Recording, node: int) -> Intervals:
    """The time between two runs of the agent on a node."""
    runs = np.array(list(_iter_runs(recording, node)), np.int64).reshape(-1, 2)
    if len(runs) < 2:
        return NO_TIME
    return Intervals.of(runs[:, 0], runs[:, 1]).gaps(int(runs[0, 0]), int(runs[-1, 0]))


def find_watched(recording: Recording) -> Intervals:
    """The time of a recording's window in which at least one of its nodes was watched."""
    parts = [
        find_unwatched(recording, node).gaps(*recording.window_ns)
        for node in range(len(recording.nodes))
    ]
    return functools.reduce(Intervals.union, parts, NO_TIME)


def find_watched_until(recording: Recording, node: int, moment_ns: int) -> int:
    """When the run that saw a moment ended, the first to end of several; the moment itself where none saw it.

    A node with one run at most, which need not say when it began, was watched to its last row or beyond.
    """
    runs = list(_iter_runs(recording, node))
    if len(runs) > 1:
        until = [stop_ns for start_ns, stop_ns in runs if start_ns <= moment_ns <= stop_ns]
        return min(until, default=moment_ns)
    name = recording.nodes[node]
    stops = [one.stopped_wall_ns for one in recording.sessions if one.node == name]
    _, ends = _find_times(recording, node)
    return max([int(ends.max(initial=moment_ns)), *stops])


def find_between_lives(starts: Times, ends: Times, codes: IntArray) -> Intervals:
    """From the end of a process to the first row of another one of its pid, by the pid's rows in time order."""
    exits = ends[codes == code_of(HostOp.EXIT)]
    never = np.iinfo(np.int64).max
    later = np.append(starts, never)[np.searchsorted(starts, exits, side="right")]
    return Intervals.of(exits[later < never], later[later < never])


def _iter_runs(recording: Recording, node: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each run on a node that says when it began, by begin.

    One that does not say when it stopped lasted to the last row before the next one, the newest to the last row.
    """
    name = recording.nodes[node]
    runs = sorted(
        (one.started_wall_ns, one.stopped_wall_ns)
        for one in recording.sessions
        if one.node == name and one.started_wall_ns
    )
    if len(runs) < 2:
        yield from runs
        return
    starts, ends = _find_times(recording, node)
    for (start_ns, stop_ns), (next_ns, _) in itertools.pairwise(runs):
        last_ns = min(int(ends[starts < next_ns].max(initial=start_ns)), next_ns)
        yield start_ns, stop_ns or last_ns
    start_ns, stop_ns = runs[-1]
    yield start_ns, max(stop_ns, int(ends.max(initial=start_ns)))


def _find_times(recording: Recording, node: int) -> tuple[Times, Times]:
    """Start and end of each row of a node."""
    events = recording.events[recording.events["node"] == node]
    return events["start_ns"], events["start_ns"] + events["duration_ns"]
