"""Waits until Fleet has compared every rank for a while, as long as it goes on comparing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ingero.config.environment import read_start_timeout
from ingero.errors import IngeroError
from ingero.model.verdicts import Judgement
from ingero.units import NS_PER_S

STEADY_OPS: Final = 100
"""Compared operations of every rank before a fault is injected."""

HANG_S: Final = 60.0
"""A job that stands so long before it ran evenly hangs by itself; one whose ranks start in turns stands for less."""


class WarmUp:
    """One wait.

    Args:
        n_ranks: How many must be compared.
        now_ns: Monotonic time at which it begins.

    Raises:
        ConfigError: As `read_start_timeout`, which is how long it may stand still: a real job loads PyTorch first.
    """

    def __init__(self, n_ranks: int, now_ns: int) -> None:
        self._n_ranks = n_ranks
        self._n_ops = 0
        self._moved_ns = now_ns
        self._timeout_s = read_start_timeout()

    def is_over(
        self, judgement: Judgement | None, now_ns: int, hang: Mapping[str, Any] | None = None
    ) -> bool:
        """Whether every rank has been compared often enough.

        Args:
            judgement: What Fleet says now; None before it says anything.
            now_ns: Monotonic time.
            hang: Whom ranks wait for, as Fleet's admin endpoint says it; None before it says anything.

        Raises:
            IngeroError: The job hangs, or nothing more was compared for too long.
        """
        compared = [one.n_ops for one in judgement.verdicts] if judgement else []
        if len(compared) == self._n_ranks and min(compared) >= STEADY_OPS:
            return True
        if sum(compared) > self._n_ops:
            self._n_ops, self._moved_ns = sum(compared), now_ns
        if hang and hang["roots"] and hang["standing_s"] >= HANG_S:
            raise IngeroError(
                "the job hangs before it ran evenly: " + "; ".join(map(_describe, hang["roots"])),
                hint="it does so by itself: no fault was injected",
            )
        if now_ns - self._moved_ns > self._timeout_s * NS_PER_S:
            so_far = f" more than {self._n_ops} operations" if self._n_ops else " the ranks"
            raise IngeroError(
                f"Fleet has not compared{so_far} for {self._timeout_s:.0f} s",
                hint="`ingero check` says what this machine can trace",
            )
        return False


def _describe(root: Mapping[str, Any]) -> str:
    """Who is missing, and what its agent saw it do."""
    summary = f"rank {root['rank']} never arrived ({root['cause']})"
    diagnosis = root["diagnosis"]
    if diagnosis is None:
        return summary
    facts = [fact for cause in diagnosis["causes"] for fact in cause["evidence"]]
    return ", ".join((summary, diagnosis["summary"], *facts))
