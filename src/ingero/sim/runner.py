"""Starts workloads: one process, or one per rank with the environment that torchrun gives."""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingero.closing import Closing
from ingero.config.environment import read_job
from ingero.errors import ConfigError, IngeroError, UnsupportedError
from ingero.sim.workloads import WORKLOADS, SimulatedWorkload, find_workload

_NATIVE: Final = Path(__file__).parent / "native"
_HOST: Final = "127.0.0.1"
_SHARED_DEVICE: Final = "SHARED_DEVICE_FD"  # the one device setting that processes inherit
_EVERY_WORKLOAD: Final = ("wait_us", "gate")  # sleep at first; wait for a line on standard input


def get_program() -> Path:
    """The workload program of this machine.

    Raises:
        UnsupportedError: The simulator was not built for it.
    """
    path = _NATIVE / platform.machine() / "workload"
    if not path.exists():
        raise UnsupportedError(
            f"the simulator was not built for {platform.machine()}",
            hint="in a source tree run `make native`",
        )
    return path


@dataclass(frozen=True, slots=True)
class SimSettings:
    """How to run a workload.

    Attributes:
        name: The workload.
        knobs: Settings that differ from its own.
        n_ranks: Processes; 0 takes the workload's own number.
        device: Settings of the simulated device, such as ``{"KERNEL_NS": 20000}``; all of them stand in
            ``gpusim/sim.h``.
        program: The program to start; None takes the built one.
    """

    name: str
    knobs: Mapping[str, int] = field(default_factory=dict)
    n_ranks: int = 0
    device: Mapping[str, int] = field(default_factory=dict)
    program: Path | None = None


class Simulation(Closing):
    """A running workload; leaving the ``with`` block ends what is left of it.

    Args:
        settings: What to run.

    Raises:
        ConfigError: No such workload or knob.
        UnsupportedError: The simulator was not built.
    """

    def __init__(self, settings: SimSettings) -> None:
        workload = _check(settings)
        n_ranks = settings.n_ranks or workload.n_ranks
        program = settings.program or get_program()
        self._processes: list[subprocess.Popen[str]] = []
        with socket.create_server((_HOST, 0), backlog=max(n_ranks, 1)) as listener:
            for rank in range(n_ranks):
                self._processes.append(
                    _start(
                        program,
                        settings,
                        {**workload.knobs, **settings.knobs},
                        (rank, n_ranks),
                        listener,
                    )
                )

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by rank."""
        return tuple(process.pid for process in self._processes)

    def wait(self, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Wait for all ranks; returns what each said of itself.

        Raises:
            IngeroError: A rank failed.
        """
        accounts = []
        for process in self._processes:
            out, err = process.communicate(timeout=timeout_s)
            if process.returncode:
                raise IngeroError(
                    f"a simulated rank ended with {process.returncode}: {err.strip()}"
                )
            accounts.append(json.loads(out.splitlines()[-1]))
        return accounts

    def read_line(self) -> str:
        """The next line that rank 0 prints."""
        stream = self._processes[0].stdout
        return stream.readline() if stream else ""

    def close(self) -> None:
        """End every rank that still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


def _check(settings: SimSettings) -> SimulatedWorkload:
    workload = find_workload(settings.name)
    if workload is None:
        names = ", ".join(known.name for known in WORKLOADS)
        raise ConfigError(f"there is no workload {settings.name!r}", hint=f"one of: {names}")
    for knob in settings.knobs:
        if knob not in workload.knobs and knob not in _EVERY_WORKLOAD:
            known_knobs = ", ".join((*workload.knobs, *_EVERY_WORKLOAD))
            raise ConfigError(
                f"the workload {workload.name!r} has no knob {knob!r}",
                hint=f"one of: {known_knobs}",
            )
    slow_rank, n_ranks = settings.knobs.get("slow_rank", 0), settings.n_ranks or workload.n_ranks
    if slow_rank >= n_ranks:
        raise ConfigError(
            f"slow_rank={slow_rank}: the last of {n_ranks} ranks is {n_ranks - 1}",
            hint="leave slow_rank out for a job without a slow rank",
        )
    return workload


def _start(
    program: Path,
    settings: SimSettings,
    knobs: Mapping[str, int],
    place: tuple[int, int],
    listener: socket.socket,
) -> subprocess.Popen[str]:
    rank, n_ranks = place
    environment = {
        "PATH": os.defpath,
        **read_job(),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(listener.getsockname()[1]),
        "GPUSIM_LISTEN_FD": str(listener.fileno()),
        **{f"GPUSIM_{name}": str(value) for name, value in settings.device.items()},
    }
    arguments: Sequence[str] = [f"{name}={value}" for name, value in knobs.items()]
    shared = settings.device.get(_SHARED_DEVICE)
    inherited = (*([listener.fileno()] if rank == 0 else []), *([shared] if shared else []))
    return subprocess.Popen(
        [str(program), settings.name, *arguments],
        env=environment,
        pass_fds=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
