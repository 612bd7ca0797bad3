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
_LOST: Final = (
    "lost_gpu_seconds",
    "lost_gpu_seconds_unscaled",
    "before_fault_ms",
    "twin_before_fault_ms",
)


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
    """What the steps since the fault took, less what they take where there is none; estimated by those before it.

    Two runs of one job differ in their pace by some per cent, from the first step on. That is not the fault's doing.
    The steps before the fault, which both runs have, show how large that is, and the twin's later steps are scaled
    by it (a difference in differences). ``lost_gpu_seconds_unscaled`` is without that.
    """
    fault_ns = first.moments.get("fault")
    runs = [run for run in first.runs if run]
    known = [one for one in runs[0] if one.at_ns <= fault_ns] if runs and fault_ns else []
    if not known or not twin.runs:
        return dict.fromkeys(_LOST) | _compare(None, None, None)
    begin, end = known[-1], runs[-1][-1]
    n_steps, took_ns = end.step - begin.step, end.at_ns - begin.at_ns

    def find_lost(step_ns: float | None) -> float | None:
        """GPU seconds beyond steps of this length."""
        if step_ns is None:
            return None
        return settings.up.n_ranks * (took_ns - n_steps * step_ns) / NS_PER_S

    before_ns = find_step_ns(known)
    twin_ns = _find_pace(twin.runs[0], begin.step, end.step)
    twin_before_ns = _find_pace(twin.runs[0], known[0].step, begin.step)
    scaled_ns = None
    if twin_ns and twin_before_ns and before_ns:
        scaled_ns = twin_ns * before_ns / twin_before_ns
    measured = find_lost(scaled_ns)
    shown = (_round(measured), _round(find_lost(twin_ns)), to_ms(before_ns), to_ms(twin_before_ns))
    compared = _compare(twin_ns, measured, find_lost(before_ns))
    return dict(zip(_LOST, shown, strict=True)) | compared


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
