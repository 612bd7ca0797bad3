"""Plays a scenario for real: a program on a GPU or on the simulator, traced by the real probes into a recording."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import ingero
from ingero.agent.capture.discover.library_paths import iter_installed
from ingero.agent.capture.gpu.driver import CONTROL
from ingero.agent.capture.privileges import check_privileges
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.host import PROBES
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.agent.trace.host_sampler import HostSampler
from ingero.agent.trace.recorder import Recorder
from ingero.config.invoker import build_child_environment, find_invoker
from ingero.errors import UnsupportedError
from ingero.sim.programs.handshake import begin, check_end, read_ready, start_program
from ingero.sim.programs.program import PROGRAMS
from ingero.sim.programs.runtime import check_device, find_runtime, iter_runtimes
from ingero.sim.runner import get_program
from ingero.telemetry.clock import SystemClock

_CUDART: Final = "libcudart.so.12"
_NODE: Final = "demo"
_SOURCES: Final = {"PYTHONPATH": str(Path(ingero.__file__).parent.parent)}
_PAY_EVERY_TIME: Final = {"CUDA_CACHE_DISABLE": "1", "CUDA_MODULE_LOADING": "LAZY"}
"""First uses cost what they cost in the first run.

No code is compiled before, and each kernel is loaded when it is launched.

CUDA programming guide, environment variables.
"""


@dataclass(frozen=True, slots=True)
class Target:
    """What a scenario runs on.

    Attributes:
        description: In words.
        library: Its libcudart.
        files: Libraries to probe before the program loads them.
        environment: Of the program.
        is_simulated: It takes the simulator's settings.
    """

    description: str
    library: str
    files: tuple[Path, ...]
    environment: Mapping[str, str]
    is_simulated: bool


def find_simulator() -> Target:
    """The GPU simulator.

    Raises:
        UnsupportedError: It was not built.
    """
    folder = get_program().parent
    return Target(
        description="a program on the simulator, traced: no GPU was involved",
        library=str(folder / _CUDART),
        files=tuple(sorted(folder.glob("lib*"))),
        environment={"PATH": os.defpath, "LD_LIBRARY_PATH": str(folder), **_SOURCES},
        is_simulated=True,
    )


def find_gpu(libcudart: Path | None = None, control: Path = CONTROL) -> Target:
    """The first GPU of this machine, as its environment orders them.

    Args:
        libcudart: The CUDA runtime; None looks for one.
        control: The driver's control device.

    Raises:
        UnsupportedError: There is no device or no CUDA runtime that does.
    """
    check_device(control)
    library = find_runtime([str(libcudart)] if libcudart else iter_runtimes())
    drivers = [path for path in iter_installed() if path.name.startswith("libcuda.so")]
    return Target(
        description=f"a program on this machine's GPU with {library}, traced",
        library=library,
        files=(*([Path(library)] if "/" in library else []), *drivers),
        environment={**build_child_environment(find_invoker()), **_SOURCES, **_PAY_EVERY_TIME},
        is_simulated=False,
    )


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
            hint="run it with sudo; without --sim or --gpu a demo is a recording and needs nothing",
        ) from error


def record_scenario(name: str, path: Path, target: Target) -> None:
    """Run a scenario and trace it, every call, into a new recording.

    Takes two to six seconds. Where it is allowed to, the program runs above the machine's other tasks, so that theirs
    are not what is found.

    Args:
        name: The scenario.
        path: The recording, which does not exist yet.
        target: What it runs on.

    Raises:
        UnsupportedError: Nothing can be probed here, or a call of CUDA failed; the message names it.
        IngeroError: The program failed.
    """
    check_probes()
    with _started(name, target) as (program, others):
        recorder = Recorder(path, _NODE, SystemClock(), invoker=find_invoker(), keep_all=True)
        try:
            settings = TraceSettings(
                engine=EngineSettings(host_probes=tuple(probe.name for probe in PROBES)),
                pids=(program.pid, *others),
                keep_one_in=1,
                files=target.files,
            )
            with TraceSession(settings, [recorder, HostSampler(recorder)]) as session:
                begin(program)
                session.run(lambda: program.poll() is not None)
        finally:
            recorder.close()
        check_end(program)


@contextmanager
def _started(name: str, target: Target) -> Iterator[tuple[subprocess.Popen[str], tuple[int, ...]]]:
    """The program, prepared and waiting, and the other processes that belong to it; it is ended on the way out."""
    chosen = PROGRAMS[name]
    settings: dict[str, str] = {}
    if target.is_simulated:
        settings = {f"GPUSIM_{key}": str(value) for key, value in chosen.settings.items()}
    with (
        _open_device(is_shared=target.is_simulated and chosen.has_one_device) as device,
        start_program(
            name, target.library, {**target.environment, **settings, **device}
        ) as program,
    ):
        try:
            yield program, read_ready(program)
        finally:
            if program.poll() is None:
                program.kill()


@contextmanager
def _open_device(*, is_shared: bool) -> Iterator[dict[str, str]]:
    """What a program gets to share its simulated device with its children: a setting, none where it does not.

    The memory has no name and does not outlive the processes that hold it.
    """
    if not is_shared:
        yield {}
        return
    device = os.memfd_create("gpusim-device", 0)
    try:
        yield {"GPUSIM_SHARED_DEVICE_FD": str(device)}
    finally:
        os.close(device)
