"""A call that had not returned when recording ended, and had been under way far longer than its kind ever takes."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.operations import CALLS
from ingero.recording.causal.evidence import Evidence, Process
from ingero.recording.causal.finding import Finding, Needs, name_cause, rule
from ingero.recording.causal.frames import name_place
from ingero.recording.causal.rules.hangs import find_hung
from ingero.units import NS_PER_S, format_duration

_MIN_HELD_NS: Final = NS_PER_S
_ALONE_NS: Final = 5 * NS_PER_S
_RATIO: Final = 10.0


@rule(
    "call_in_flight",
    "A call had not returned when recording ended, long after its kind usually does",
    Needs(CALLS, max_missing=1.0),
)
def call_in_flight(evidence: Evidence) -> list[Finding]:
    """The longest one of each thread, but of ranks that wait in a collective which another one did not enter."""
    hung = find_hung(evidence)
    return [
        finding
        for process in evidence.processes
        for tid in np.unique(process.open.tids).tolist()
        if (finding := _judge(evidence, process, tid)) is not None
        and not _is_waiting(finding, hung.get((process.node, process.pid)))
    ]


def _is_waiting(finding: Finding, hung_since_ns: int | None) -> bool:
    """Whether the call is how a member of a hung communicator waits: one that began well before may be why it hangs."""
    return hung_since_ns is not None and finding.span_ns[0] >= hung_since_ns - NS_PER_S


def _judge(evidence: Evidence, process: Process, tid: int) -> Finding | None:
    mine = process.open.by(tid)
    worst = mine.where(np.array([int(mine.durations.argmax())]))
    held_ns = int(worst.durations[0])
    known = evidence.statistics.get((process.node, process.pid, int(worst.codes[0])))
    n_before, longest = (known.count, known.max_ns) if known else (0, 0)
    least_ns = max(_MIN_HELD_NS, _RATIO * longest) if n_before else _ALONE_NS
    if held_ns < least_ns:
        return None
    facts = [f"under way for {format_duration(held_ns)} when recording ended"]
    if n_before:
        facts.append(f"the {n_before} before it took {format_duration(longest)} at most")
    stacks = evidence.stacks_of(worst)
    place = _name_first(evidence, stacks)
    return Finding(
        title=(
            f"{worst.op} of {process.name} has not returned for {format_duration(held_ns)}"
            + (f", called in {place}" if place else "")
        ),
        span_ns=(int(worst.starts[0]), int(worst.ends[0])),
        lost_ns=held_ns,
        causes=name_cause("unexplained", 1.0, *facts),
        process=process,
        tid=tid,
        op=worst.op,
        fix=(
            "look at what the thread waits for while it lasts: py-spy dump, cuda-gdb, `ingero hang`",
            (
                "a kernel that does not end, a peer that does not come, or a device that fell off the bus (dmesg) "
                "are the usual reasons"
            ),
        ),
        stacks=stacks,
    )


def _name_first(evidence: Evidence, stacks: tuple[int, ...]) -> str:
    """The innermost frame that has a name; empty without one."""
    places = (name_place(evidence.recording, key).partition(" < ")[0] for key in stacks)
    return next((place for place in places if place), "")
