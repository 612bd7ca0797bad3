"""Plays a scenario for real: a program on the simulator, traced by the real probes into a recording."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import ingero
from ingero.agent.app.privileges import check_privileges
from ingero.agent.app.recorder import Recorder
from ingero.agent.app.surroundings import Surroundings
from ingero.agent.app.tracing import TraceSession, TraceSettings
from ingero.agent.probes.engine import EngineSettings
from ingero.agent.probes.host import PROBES
from ingero.agent.scenarios.program import PROGRAMS
from ingero.config.invoker import find_invoker
from ingero.errors import IngeroError, UnsupportedError
from ingero.gpusim.runner import get_program
from ingero.telemetry.clock import SystemClock

_MODULE: Final = "ingero.agent.scenarios.program"
_CUDART: Final = "libcudart.so.12"
_NODE: Final = "demo"


def check_probes() -> None:
    """Whether a scenario can be traced here.

    Raises:
        UnsupportedError: It cannot; the message says why.
    """
    try:
        check_privileges()
    except UnsupportedError as error:
        raise UnsupportedError(
            "a real run needs root, or CAP_BPF and CAP_PERFMON: it is traced by BPF programs",
            hint="sudo ingero demo --sim; without --sim a demo is a recording and needs nothing",
        ) from error


def record_scenario(name: str, path: Path) -> None:
    """Run a scenario on the simulator and trace it, every call, into a new recording.

    Takes two to six seconds. Where it is allowed to, the program runs above the machine's other tasks, so that theirs are
    not what is found.

    Args:
        name: The scenario.
        path: The recording, which does not exist yet.

    Raises:
        UnsupportedError: Nothing can be probed here.
        IngeroError: The program failed.
    """
    check_probes()
    libraries = get_program().parent
    recorder = Recorder(path, _NODE, SystemClock(), invoker=find_invoker(), keep_all=True)
    try:
        with _started(name, libraries) as program:
            settings = TraceSettings(
                engine=EngineSettings(host_probes=tuple(probe.name for probe in PROBES)),
                pids=(program.pid,),
                keep_one_in=1,
                files=tuple(sorted(libraries.glob("lib*"))),
            )
            with TraceSession(settings, [recorder, Surroundings(recorder)]) as session:
                _let_go(program)
                session.run(lambda: program.poll() is not None)
    finally:
        recorder.close()
    if program.returncode:
        raise IngeroError(f"the program of {name} ended with {program.returncode}")


@contextmanager
def _started(name: str, libraries: Path) -> Iterator[subprocess.Popen[str]]:
    """The program, prepared and waiting; it is ended on the way out."""
    chosen = PROGRAMS[name]
    environment = {
        "PATH": os.defpath,
        "LD_LIBRARY_PATH": str(libraries),
        "PYTHONPATH": str(Path(ingero.__file__).parent.parent),
        **{f"GPUSIM_{key}": str(value) for key, value in chosen.settings.items()},
    }
    with (
        _open_device(is_shared=chosen.has_one_device) as (settings, inherited),
        subprocess.Popen(
            [sys.executable, "-m", _MODULE, name, str(libraries / _CUDART)],
            env=environment | settings,
            pass_fds=inherited,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as program,
    ):
        try:
            if program.stdout is None or program.stdout.readline() != "ready\n":
                raise IngeroError(f"the program of {name} did not start")
            yield program
        finally:
            if program.poll() is None:
                program.kill()


@contextmanager
def _open_device(*, is_shared: bool) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """What a program gets to share its device with its children: settings and descriptors, none where it does not.

    The memory has no name and does not outlive the processes that hold it.
    """
    if not is_shared:
        yield {}, ()
        return
    device = os.memfd_create("gpusim-device")
    try:
        yield {"GPUSIM_SHARED_DEVICE_FD": str(device)}, (device,)
    finally:
        os.close(device)


def _let_go(program: subprocess.Popen[str]) -> None:
    if program.stdin is not None:
        program.stdin.write("\n")
        program.stdin.flush()
