"""A synchronous training job of many ranks whose faults can be turned on while it runs.

Each rank is a process of its own, started where the caller says (a command prefix, such as ``nsenter``), and held until
`Job.release`. The page of faults is shared memory; a rank's own tracer sees none of it.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from ingero.closing import Closing
from ingero.errors import IngeroError
from ingero.sim.runner import get_program
from ingero.units import NS_PER_MS

MAX_RANKS: Final = 256
REPORT: Final = np.dtype([
    ("what", "<u4"),
    ("rank", "<i4"),
    ("n_ranks", "<i4"),
    ("n_launches", "<u4"),
    ("mono_ns", "<u8"),
    ("duration_ns", "<u8"),
    ("comm", "<u8"),
    ("seq", "<u8"),
    ("bytes", "<u8"),
    ("reserved", "<u8"),
])
"""A call that a rank tells of itself: ``struct report`` of gpusim/job.c, docs/specs/simulator-calls.md."""
COLLECTIVE: Final = 1
WAIT: Final = 2
PPM: Final = 1_000_000
_HOLD: Final = 'read -r go && exec "$@"'
_LIMIT_S: Final = 5.0


_FIELDS: Final = (
    "seed",
    "step_ns",
    "cpu_ns",
    "jitter_ppm",
    "imbalance_ppm",
    "load_ns",
    "load_bytes",
)
"""``struct control`` of gpusim/job.c: these as u64, then ``extra_ppm`` by rank."""
_WORD: Final = struct.Struct("=Q")
_EXTRA_AT: Final = _WORD.size * len(_FIELDS)


@dataclass(frozen=True, slots=True)
class JobSettings:
    """A job.

    Attributes:
        n_ranks: Processes.
        folder: Where the shared page lies.
        address: Where ranks meet; every rank must reach it.
        prefixes: By rank, what its command line begins with; empty for none.
        seed: Of the jitter and of which rank a step's imbalance falls on.
        step_ns: A rank's own work per step.
        cpu_ns: Spent on the processor meanwhile.
        jitter_ppm: Greatest random addition to a step's work.
        load_ns: Processor time that a rank's data takes before each step.
        data: By rank, a file of which each step reads `load_bytes` past the page cache; other ranks read nothing.
        load_bytes: See `data`; a multiple of 4096.
        has_pairs: Ranks 2k and 2k + 1 also meet on a link of their own, before all do.
        has_reports: Every rank tells its calls in its file of `report_path`, for where no probe can be had.
    """

    n_ranks: int
    folder: Path
    address: str = "127.0.0.1"
    prefixes: Sequence[Sequence[str]] = ()
    seed: int = 0
    step_ns: int = 50 * NS_PER_MS
    cpu_ns: int = NS_PER_MS
    jitter_ppm: int = 20_000
    load_ns: int = 0
    data: Mapping[int, Path] = field(default_factory=dict)
    load_bytes: int = 0
    has_pairs: bool = False
    has_reports: bool = False

    def report_path(self, rank: int) -> Path:
        """Where a rank tells its calls."""
        return self.folder / f"calls-{rank}"


class Job(Closing):
    """A held or running job; leaving the ``with`` block ends every rank.

    Args:
        settings: What to run.

    Raises:
        UnsupportedError: The simulator was not built.
    """

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        program = get_program().with_name("job")
        path = settings.folder / "job-control"
        path.write_bytes(bytes(_EXTRA_AT + _WORD.size * MAX_RANKS))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)
        for name in ("seed", "step_ns", "cpu_ns", "jitter_ppm", "load_ns", "load_bytes"):
            self._set(_WORD.size * _FIELDS.index(name), getattr(settings, name))
        self._ranks: list[subprocess.Popen[bytes]] = []
        with socket.create_server((settings.address, 0), backlog=settings.n_ranks) as listener:
            environment = {
                "PATH": os.defpath,
                "WORLD_SIZE": str(settings.n_ranks),
                "MASTER_ADDR": settings.address,
                "MASTER_PORT": str(listener.getsockname()[1]),
                "GPUSIM_LISTEN_FD": str(listener.fileno()),
                "GPUSIM_HOST": settings.address,
                "GPUSIM_CONTROL": str(path),
                "GPUSIM_PAIRS": str(int(settings.has_pairs)),
            }
            self._store = subprocess.Popen(
                [str(program), "store"],
                env=environment,
                pass_fds=(listener.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        for rank in range(settings.n_ranks):
            prefix = settings.prefixes[rank] if settings.prefixes else ()
            own = {"RANK": str(rank), "LOCAL_RANK": "0"}
            if settings.has_reports:
                own["GPUSIM_REPORT"] = str(settings.report_path(rank))
            if rank in settings.data:
                own["GPUSIM_DATA"] = str(settings.data[rank])
            self._ranks.append(
                subprocess.Popen(
                    [*prefix, "/bin/sh", "-c", _HOLD, "rank", str(program), "rank"],
                    env={**environment, **own},
                    stdin=subprocess.PIPE,
                    start_new_session=True,
                )
            )

    def _set(self, at: int, value: int) -> None:
        _WORD.pack_into(self._page, at, value)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return tuple(process.pid for process in self._ranks)

    def release(self) -> None:
        """Let every rank begin."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
            process.stdin.close()

    def slow(self, rank: int, factor: float) -> None:
        """From its next step on the rank's own work takes this many times as long; 1 ends it."""
        self._set(_EXTRA_AT + _WORD.size * rank, round((factor - 1.0) * PPM))

    def unbalance(self, factor: float) -> None:
        """From now on one rank, another in each step, works this many times as long."""
        self._set(_WORD.size * _FIELDS.index("imbalance_ppm"), round((factor - 1.0) * PPM))

    def pause(self, rank: int) -> None:
        """Stop a rank where it is."""
        self._ranks[rank].send_signal(signal.SIGSTOP)

    def kill(self, rank: int) -> None:
        """End a rank as if its node had been deleted."""
        self._ranks[rank].kill()
        self._ranks[rank].wait()

    def check(self, expected_dead: Sequence[int] = ()) -> None:
        """Raise when a rank ended by itself.

        Raises:
            IngeroError: It did; the message names the rank.
        """
        for rank, process in enumerate(self._ranks):
            if rank not in expected_dead and process.poll() is not None:
                raise IngeroError(f"rank {rank} of the job ended with {process.returncode}")

    def close(self) -> None:
        """End every rank that still runs."""
        for process in (*self._ranks, self._store):
            if process.poll() is None:
                process.kill()
            process.wait(_LIMIT_S)
            if process.stdin is not None:
                process.stdin.close()
        self._page.close()
