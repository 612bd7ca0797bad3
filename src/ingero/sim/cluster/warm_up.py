"""Waits until Fleet has compared every rank for a while, as long as it goes on comparing."""

from __future__ import annotations

from typing import Final

from ingero.config.environment import read_start_timeout
from ingero.errors import IngeroError
from ingero.model.verdicts import Judgement
from ingero.units import NS_PER_S

STEADY_OPS: Final = 100
"""Compared operations of every rank before a fault is injected."""


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

    def is_over(self, judgement: Judgement | None, now_ns: int) -> bool:
        """Whether every rank has been compared often enough.

        Args:
            judgement: What Fleet says now; None before it says anything.
            now_ns: Monotonic time.

        Raises:
            IngeroError: Nothing more was compared for too long.
        """
        compared = [one.n_ops for one in judgement.verdicts] if judgement else []
        if len(compared) == self._n_ranks and min(compared) >= STEADY_OPS:
            return True
        if sum(compared) > self._n_ops:
            self._n_ops, self._moved_ns = sum(compared), now_ns
        if now_ns - self._moved_ns > self._timeout_s * NS_PER_S:
            so_far = f" more than {self._n_ops} operations" if self._n_ops else " the ranks"
            raise IngeroError(
                f"Fleet has not compared{so_far} for {self._timeout_s:.0f} s",
                hint="`ingero check` says what this machine can trace",
            )
        return False
