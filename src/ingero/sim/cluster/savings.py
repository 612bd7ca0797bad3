"""What an action saved, from steps that were seen and nothing else.

Measured are the time of a step while the fault was on, and what really happened after the action: waiting, loading,
steps done twice, and the steps until the end. Assumed is one thing: without the action the job would have gone on
with the steps that it had. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ingero.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step that a job's log shows.

    Attributes:
        at_ns: When that was seen, on the watcher's monotonic clock.
        step: Its number, which counts on over restarts.
    """

    at_ns: int
    step: int


def find_step_ns(
    points: Sequence[StepPoint], since_ns: int = 0, until_ns: int | None = None
) -> float | None:
    """Mean time of a step within a stretch of time; None where fewer than two different steps were seen in it."""
    inside = [
        one
        for one in points
        if since_ns <= one.at_ns and (until_ns is None or one.at_ns <= until_ns)
    ]
    if len(inside) < 2 or inside[-1].step <= inside[0].step:
        return None
    first, last = inside[0], inside[-1]
    return (last.at_ns - first.at_ns) / (last.step - first.step)


@dataclass(frozen=True, slots=True)
class Savings:
    """What became of a job after an action, against what it would have become.

    Attributes:
        n_ranks: Ranks that waited for the slow one, itself included.
        slow_ns: A step while the fault was on.
        fast_ns: A step after the action; None where fewer than two were seen.
        restart_ns: From the action to the first step that the log shows after it.
        resumed_at: The first step that the log shows after the action.
        n_repeated: Steps that had been done and were done again, as the log shows them.
        n_steps: Steps from the action to the end of what was seen.
        passed_ns: Time that they really took, with all of the restart.
    """

    n_ranks: int
    slow_ns: float
    fast_ns: float | None
    restart_ns: int
    resumed_at: int
    n_repeated: int
    n_steps: int
    passed_ns: int

    @property
    def saved_ns(self) -> float:
        """GPU time: what the same steps would have taken as they were, less what they took. Negative is a loss."""
        return self.n_ranks * (self.n_steps * self.slow_ns - self.passed_ns)

    @property
    def gained_ns(self) -> float | None:
        """GPU time that each further second of the job saves; None where the steps after are not known."""
        if self.fast_ns is None:
            return None
        return self.n_ranks * NS_PER_S * (self.slow_ns / self.fast_ns - 1)

    def as_json(self) -> dict[str, Any]:
        """JSON-able values, in seconds."""
        gained_ns = self.gained_ns
        return {
            "saved_gpu_seconds": round(self.saved_ns / NS_PER_S, 1),
            "saved_gpu_seconds_per_further_hour": None
            if gained_ns is None
            else round(gained_ns * 3600 / NS_PER_S, 1),
            "restart_s": round(self.restart_ns / NS_PER_S, 1),
            "resumed_at_step": self.resumed_at,
            "repeated_steps": self.n_repeated,
            "steps_after_action": self.n_steps,
            "took_s": round(self.passed_ns / NS_PER_S, 1),
            "would_have_taken_s": round(self.n_steps * self.slow_ns / NS_PER_S, 1),
        }


def count_savings(
    before: Sequence[StepPoint], after: Sequence[StepPoint], n_ranks: int, span_ns: tuple[int, int]
) -> Savings | None:
    """What an action saved.

    Args:
        before: Steps of the run that the action ended.
        after: Steps of the run after it.
        n_ranks: Ranks of the job.
        span_ns: When the fault began and when the action took effect.

    Returns:
        None where the steps that it takes were not seen.
    """
    began_ns, acted_ns = span_ns
    slow_ns = find_step_ns(before, began_ns, acted_ns)
    reached = [one for one in before if one.at_ns <= acted_ns]
    if slow_ns is None or not reached or not after:
        return None
    here, end = reached[-1], after[-1]
    return Savings(
        n_ranks,
        slow_ns,
        find_step_ns(after),
        after[0].at_ns - acted_ns,
        after[0].step,
        max(0, here.step - after[0].step),
        end.step - here.step,
        end.at_ns - here.at_ns,
    )
