"""The same job once more, without the fault or without the action, and how far the estimates of the first run were off.

What the first run says of itself is an estimate: it did not see what would have been. A twin is seen. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from ingero.sim.cluster.act_result import ActProgress, ActSettings, find_savings, find_step_times
from ingero.sim.cluster.savings import StepPoint, find_step_ns
from ingero.units import NS_PER_MS, NS_PER_S

TwinKind = Literal["without-fault", "without-action"]
TWINS: Final[tuple[TwinKind, ...]] = ("without-fault", "without-action")


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
    """What the steps since the fault took, less what they take where there is none; estimated by those before it."""
    fault_ns = first.moments.get("fault")
    runs = [run for run in first.runs if run]
    known = [one for one in runs[0] if one.at_ns <= fault_ns] if runs and fault_ns else []
    if not known:
        return {"lost_gpu_seconds": None} | _compare(None, None, None)
    begin, end = known[-1], runs[-1][-1]
    step_ns = _find_pace(twin.runs[0] if twin.runs else (), begin.step, end.step)
    before_ns = find_step_times(first).before
    n_ranks, n_steps = settings.up.n_ranks, end.step - begin.step
    measured, estimated = (
        None if ns is None else n_ranks * (end.at_ns - begin.at_ns - n_steps * ns) / NS_PER_S
        for ns in (step_ns, before_ns)
    )
    return {"lost_gpu_seconds": _round(measured)} | _compare(step_ns, measured, estimated)


def _find_pace(points: Sequence[StepPoint], first: int, last: int) -> float | None:
    """Mean time of those steps."""
    return find_step_ns([one for one in points if first <= one.step <= last])


def _compare(
    step_ns: float | None, measured: float | None, estimated: float | None
) -> dict[str, Any]:
    return {
        "step_ms": None if step_ns is None else round(step_ns / NS_PER_MS, 1),
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
