"""Faults inside a training program, to try what finds them: slow Python, a slow loader, garbage, uneven batches.

`ingero up --job FILE --fault slow-python:R:20ms` asks rank R's process for one by two variables, and all others for
nothing. Where they are not set, nothing here does anything.
"""

import gc
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

FAULT = "INGERO_JOB_FAULT"
"""What is asked for: a kind, a colon and an amount."""
FILE = "INGERO_JOB_FAULT_FILE"
"""The fault begins when there is such a file; one with `.seen` at its end answers that it has begun."""
LOOK_EVERY_S = 0.05
"""How often the file is looked for, however often a program asks, so that a rank is as fast as others until then."""


class Faults:
    """The fault that this process is asked for, if any."""

    def __init__(self) -> None:
        asked = os.environ.get(FAULT, "")  # noqa: TID251 - an example
        self._kind, _, amount = asked.partition(":")
        self._amount = float(amount or 0)
        self._file = Path(os.environ.get(FILE, ""))  # noqa: TID251
        self._has_begun = False
        self._look_at_s = 0.0
        self._kept: list[list[object]] = []
        self._n_batches = 0

    def _is_on(self, kind: str) -> bool:
        if self._kind != kind:
            return False
        if not self._has_begun:
            self._look()
        return self._has_begun

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        if self._file.exists():
            self._has_begun = True
            self._file.with_name(f"{self._file.name}.seen").touch()

    def step(self) -> None:
        """Call it once in each step of training."""
        if self._is_on("slow-python"):
            compute_in_python(self._amount)
        if self._is_on("garbage"):
            self._collect_garbage()
        if self._is_on("first-use"):
            compute_in_python(self._amount, time.perf_counter)
            self._kind = ""

    def load(self) -> None:
        """Call it for each row that a data loader reads."""
        if self._is_on("slow-loader"):
            compute_in_python(self._amount)

    def rows(self, n_rows: int) -> int:
        """How many rows a batch of so many has; call it once in each step."""
        self._n_batches += 1
        is_more = self._is_on("uneven") or (self._is_on("imbalance") and self._is_my_turn())
        return round(n_rows * self._amount) if is_more else n_rows

    def _is_my_turn(self) -> bool:
        """Whether this rank is the one with more work in this step: any of them, and all say the same."""
        turns = random.Random(self._n_batches)  # noqa: S311
        turn = turns.randrange(int(os.environ["WORLD_SIZE"]))  # noqa: TID251
        return turn == int(os.environ["RANK"])  # noqa: TID251

    def _collect_garbage(self) -> None:
        if not self._kept:
            self._kept = [[] for _ in range(round(self._amount))]
        gc.collect()


def compute_in_python(seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
    """Count for so long, in time on a processor if no other clock is given."""
    until = clock() + seconds
    while clock() < until:
        sum(range(100))
