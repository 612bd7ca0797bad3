"""Load beside a rank: processes that want its processor all the time, and everybody else out of their way."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ingero.errors import UnsupportedError
from ingero.gpusim.runner import get_program

N_SPINNERS: Final = 12
"""Neighbours of equal weight: together they leave the rank a thirteenth of its processor."""


class Processor:
    """A processor that one rank has to itself until neighbours come. Make one with `reserve_processor`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._spinners: list[subprocess.Popen[bytes]] = []

    def give(self, pid: int) -> None:
        """Run a process here and nowhere else."""
        os.sched_setaffinity(pid, {self.number})

    def crowd(self) -> None:
        """Let the neighbours in."""
        # A session each: some kernels share a processor between sessions, others between processes.
        for _ in range(N_SPINNERS):
            spinner = subprocess.Popen(
                [str(get_program().with_name("job")), "spin"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._spinners.append(spinner)
            self.give(spinner.pid)

    def clear(self) -> None:
        """End the neighbours."""
        for spinner in self._spinners:
            spinner.kill()
            spinner.wait()


@contextmanager
def reserve_processor() -> Iterator[Processor]:
    """Keep one processor free of this process and of all that it starts from now on.

    Raises:
        UnsupportedError: There is no second one for everybody else.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        raise UnsupportedError(
            "cpu-hog needs two processors: one for the rank and its neighbours, one for everybody else",
            hint="slow-rank:R:1.5x shows a rank that is slow by itself",
        )
    processor = Processor(max(allowed))
    os.sched_setaffinity(0, allowed - {processor.number})
    try:
        yield processor
    finally:
        processor.clear()
        os.sched_setaffinity(0, allowed)
