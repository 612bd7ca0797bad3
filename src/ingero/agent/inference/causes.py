"""Why one step of a server took far longer than its like, from the rows around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from ingero.detect.inference.phases import find_heavier, measure_work
from ingero.model.arrays import FloatArray, Records
from ingero.model.events import Events, op_name
from ingero.model.incidents import Cause
from ingero.model.operations import LAST_CALL, OpKind, find_kinds
from ingero.model.recording import Recording
from ingero.recording.causal.attribution import (
    NAMED_SHARE,
    NO_REASON,
    ON_CPU,
    SLEEPING,
    attribute,
    find_waits,
)
from ingero.recording.causal.evidence import Evidence
from ingero.units import format_duration

UNEXPLAINED: Final = "unexplained"
MORE_WORK: Final = "more work than usual"
_FEATURES: Final = ("launches", "bytes copied in", "blocks of a launch")


def find_causes(
    events: Events, names: Mapping[int, str], step: Records, usual: tuple[float, FloatArray]
) -> tuple[Cause, ...]:
    """What the step's thread waited for, the calls it was inside of, and whether it had more to do.

    Args:
        events: Rows of EVENT that overlap the step, at least those of its process.
        names: Names of processes.
        step: One row of STEP.
        usual: Median duration of such steps in nanoseconds, and their median work (`measure_work`), shape (3,).

    Returns:
        Causes with their shares of the step's time, greatest first; `UNEXPLAINED` where they do not add up.
    """
    duration_ns = int(step["end_ns"] - step["start_ns"])
    found = [*_iter_waits(events, names, step), *_iter_calls(events, step, duration_ns)]
    work = measure_work(step.reshape(1))[0]
    typical_ns, typical_work = usual
    if find_heavier(work[None, :], typical_work).any():
        at = int(np.argmax(work - typical_work))
        facts = (
            f"{2 ** work[at] - 1:.0f} {_FEATURES[at]} instead of {2 ** typical_work[at] - 1:.0f}",
        )
        share = 1.0 - typical_ns / duration_ns
        explained = sum(cause.share for cause in found)
        if share - explained >= NAMED_SHARE:
            found.append(Cause(MORE_WORK, round(share - explained, 4), facts))
    found.sort(key=lambda cause: -cause.share)
    rest = 1.0 - typical_ns / duration_ns - sum(cause.share for cause in found)
    if rest >= NAMED_SHARE or not found:
        found.append(Cause(UNEXPLAINED, round(max(rest, 0.0), 4)))
    return tuple(found)


def _iter_waits(events: Events, names: Mapping[int, str], step: Records) -> Iterator[Cause]:
    """What the thread that waited for the result was off its CPU for, other than the GPU."""
    pid, tid = int(step["pid"]), int(step["tid"])
    recording = Recording(
        events=events[np.argsort(events["start_ns"], kind="stable")],
        process_names={(0, pid): name for pid, name in names.items()},
    )
    evidence = Evidence(recording)
    for process in evidence.processes:
        if process.pid == pid:
            shares = attribute(
                find_waits(evidence, process, tid),
                np.array([step["start_ns"]]),
                np.array([step["end_ns"]]),
            )
            for cause in shares.causes(without=(ON_CPU, SLEEPING, NO_REASON)):
                if cause.name != UNEXPLAINED:
                    yield cause


def _iter_calls(events: Events, step: Records, duration_ns: int) -> Iterator[Cause]:
    """Calls that are no wait and yet took much of the step: an allocation, a module, a full launch queue."""
    kinds = find_kinds(events["source"], events["op"])
    is_call = (kinds > OpKind.OTHER) & (kinds <= LAST_CALL)
    is_call &= ~np.isin(kinds, (OpKind.SYNC, OpKind.COPY, OpKind.COLLECTIVE))
    is_call &= (events["pid"] == step["pid"]) & (events["tid"] == step["tid"])
    starts = np.maximum(events["start_ns"], step["start_ns"])
    ends = np.minimum(events["start_ns"] + events["duration_ns"], step["end_ns"])
    is_call &= ends > starts
    codes = events["source"].astype(np.int64) << 8 | events["op"]
    for code in np.unique(codes[is_call]).tolist():
        is_it = is_call & (codes == code)
        spent_ns = int((ends - starts)[is_it].sum())
        if spent_ns >= NAMED_SHARE * duration_ns:
            yield Cause(
                f"inside {op_name(code >> 8, code & 0xFF)}",
                round(min(spent_ns / duration_ns, 1.0), 4),
                (f"{format_duration(spent_ns)} in {int(is_it.sum())} calls",),
            )
