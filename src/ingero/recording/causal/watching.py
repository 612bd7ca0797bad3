"""When a recording was watched: from the begin to the end of each run of the agent, and while a pid was somebody's.

Of other time the lack of rows says nothing.
"""

from __future__ import annotations

import functools
from functools import cached_property

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.events import HostOp
from ingero.model.operations import code_of
from ingero.model.recording import Recording
from ingero.recording.causal.intervals import NO_TIME, Intervals, Times


class NodeWatch:
    """The runs of the agent on one node; what needs the node's rows is found when it is asked for, once.

    Args:
        recording: What was seen.
        node: Index into its nodes.
    """

    def __init__(self, recording: Recording, node: int) -> None:
        self._recording = recording
        self._node = node
        name = recording.nodes[node]
        here = [one for one in recording.sessions if one.node == name]
        self._stops = [one.stopped_wall_ns for one in here]
        self._said = sorted(
            (one.started_wall_ns, one.stopped_wall_ns) for one in here if one.started_wall_ns
        )

    @cached_property
    def unwatched(self) -> Intervals:
        """The time between two runs."""
        runs = np.array(self._runs, np.int64).reshape(-1, 2)
        if len(runs) < 2:
            return NO_TIME
        return Intervals.of(runs[:, 0], runs[:, 1]).gaps(int(runs[0, 0]), int(runs[-1, 0]))

    def until(self, moment_ns: int) -> int:
        """When the run that saw a moment ended, the first to end of several; the moment itself where none saw it.

        A node with one run at most, which need not say when it began, was watched to its last row or beyond.
        """
        if len(self._runs) > 1:
            until = [
                stop_ns for start_ns, stop_ns in self._runs if start_ns <= moment_ns <= stop_ns
            ]
            return min(until, default=moment_ns)
        return max([moment_ns, self._last_ns[-1], *self._stops])

    @cached_property
    def _runs(self) -> list[tuple[int, int]]:
        """Begin and end of each run that says when it began, by begin.

        One that does not say when it stopped lasted to the last row before the next one, the newest to the last row.
        """
        runs = self._said
        if len(runs) < 2:
            return runs
        found = [
            (start_ns, stop_ns or min(max(last_ns, start_ns), next_ns))
            for (start_ns, stop_ns), (next_ns, _), last_ns in zip(
                runs[:-1], runs[1:], self._last_ns[:-1], strict=True
            )
        ]
        start_ns, stop_ns = runs[-1]
        return [*found, (start_ns, max(stop_ns, start_ns, self._last_ns[-1]))]

    @cached_property
    def _last_ns(self) -> list[int]:
        """The last end of the node's rows that began before each run but the first did, then of all; 0 without rows."""
        events = self._recording.events
        is_here = events["node"] == self._node
        starts = events["start_ns"][is_here]
        latest = np.maximum.accumulate(starts + events["duration_ns"][is_here])
        begins = np.array([start_ns for start_ns, _ in self._said[1:]], np.int64)
        n_rows = [*np.searchsorted(starts, begins).tolist(), len(starts)]
        return [int(latest[n - 1]) if n else 0 for n in n_rows]


def find_watched(recording: Recording) -> Intervals:
    """The time of a recording's window in which at least one of its nodes was watched."""
    parts = [
        NodeWatch(recording, node).unwatched.gaps(*recording.window_ns)
        for node in range(len(recording.nodes))
    ]
    return functools.reduce(Intervals.union, parts, NO_TIME)


def find_between_lives(starts: Times, ends: Times, codes: IntArray) -> Intervals:
    """From the end of a process to the first row of another one of its pid, by the pid's rows in time order."""
    exits = ends[codes == code_of(HostOp.EXIT)]
    never = np.iinfo(np.int64).max
    later = np.append(starts, never)[np.searchsorted(starts, exits, side="right")]
    return Intervals.of(exits[later < never], later[later < never])
