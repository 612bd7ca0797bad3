"""The same job once more, without the fault or without the action, and how far the estimates of the first run were off.

What the first run says of itself is an estimate: it did not see what would have been. A twin is seen. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from ingero.sim.cluster.act_result import (
    ActProgress,
    ActSettings,
    find_savings,
    find_step_times,
    to_ms,
)
from ingero.sim.cluster.savings import StepPoint, find_step_ns
from ingero.units import NS_PER_S

TwinKind = Literal["without-fault", "without-action"]
TWINS: Final[tuple[TwinKind, ...]] = ("without-fault", "without-action")
_LOST: Final = ("lost_gpu_seconds", "later_gpu_seconds", "before_fault_ms")


def measure_twin(
    kind: TwinKind, settings: ActSettings, first: ActProgress, twin: ActProgress
) -> dict[str, Any]:
    """A twin's figures beside those of the run that it repeats; null where too few steps of one of them were seen."""
    if kind == "without-action":
        return _measure_saved(settings, first, twin)
    return _measure_lost(settings, first, twin)


def _measure_saved(settings: ActSettings, first: ActProgress, twin: ActProgress) -> dict[str, Any]:
    """What the steps after the action took without it, less what they took."""
    savings = find_savings(settings, first)
    step_ns = find_step_times(twin).during
    measured = estimated = None
    if savings is not None and step_ns is not None:
        measured = savings.n_ranks * (savings.n_steps * step_ns - savings.passed_ns) / NS_PER_S
        estimated = savings.saved_ns / NS_PER_S
    return {"saved_gpu_seconds": _round(measured)} | _compare(step_ns, measured, estimated)


def _measure_lost(settings: ActSettings, first: ActProgress, twin: ActProgress) -> dict[str, Any]:
    """What the fault and the restart took, beyond the twin's time for the same steps; estimated by those before it.

    Counted are the steps from the fault to the first one that had not been done when the job was stopped: with it the
    job is as far as before. Later steps have neither fault nor restart in them; what they took beyond the twin's is
    shown beside it, because two runs of one job differ there by some per cent whatever happened to them earlier.
    """
    fault_ns = first.moments.get("fault")
    runs = [run for run in first.runs if run]
    known = [one for one in runs[0] if one.at_ns <= fault_ns] if runs and fault_ns else []
    if not known or not twin.runs:
        return dict.fromkeys(_LOST) | _compare(None, None, None)
    begin, back, end = known[-1], _find_back(runs), runs[-1][-1]
    before_ns = find_step_ns(known)
    measured = estimated = later = twin_ns = None
    if back is not None:
        twin_ns = _find_pace(twin.runs[0], begin.step, back.step)
        measured = _find_lost(settings, begin, back, twin_ns)
        estimated = _find_lost(settings, begin, back, before_ns)
        later = _find_lost(settings, back, end, _find_pace(twin.runs[0], back.step, end.step))
    shown = (_round(measured), _round(later), to_ms(before_ns))
    return dict(zip(_LOST, shown, strict=True)) | _compare(twin_ns, measured, estimated)


def _find_back(runs: Sequence[Sequence[StepPoint]]) -> StepPoint | None:
    """The first step after the last restart that no run before had done, or the last one where none was restarted."""
    if len(runs) == 1:
        return runs[0][-1]
    reached = max(run[-1].step for run in runs[:-1])
    return next((one for one in runs[-1] if one.step > reached), None)


def _find_lost(
    settings: ActSettings, begin: StepPoint, end: StepPoint, step_ns: float | None
) -> float | None:
    """GPU seconds from one step to another beyond steps of that length."""
    if step_ns is None:
        return None
    n_steps, took_ns = end.step - begin.step, end.at_ns - begin.at_ns
    return settings.up.n_ranks * (took_ns - n_steps * step_ns) / NS_PER_S


def _find_pace(points: Sequence[StepPoint], first: int, last: int) -> float | None:
    """Mean time of those steps."""
    return find_step_ns([one for one in points if first <= one.step <= last])


def _compare(
    step_ns: float | None, measured: float | None, estimated: float | None
) -> dict[str, Any]:
    return {
        "step_ms": to_ms(step_ns),
        "estimated_gpu_seconds": _round(estimated),
        "off_by_percent": find_off_by(estimated, measured),
    }


def find_off_by(estimated: float | None, measured: float | None) -> float | None:
    """How far an estimate is from what was measured, in percent of that; None where one is missing or nothing was."""
    if estimated is None or not measured:
        return None
    return round(100 * (estimated - measured) / abs(measured), 1)


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 1)
