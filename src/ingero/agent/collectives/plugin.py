"""The plug-in that NCCL loads into a training process, and the environment variable that makes it do so.

Source: NCCL's documentation of its profiler interface: ``NCCL_PROFILER_PLUGIN`` may be the path of a library.
"""

from __future__ import annotations

import platform
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.processes import iter_pids
from ingero.agent.collectives.plugin_ring import find_rings_of
from ingero.errors import StoreError, UnsupportedError
from ingero.whole_files import replace_file


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One process with the plug-in.

    Attributes:
        pid: As we see it.
        api: Version of NCCL's interface that is in use.
        n_comms: Communicators it has.
        n_ops: Collectives that ended since the first communicator was made.
        n_lost: Collectives that the plug-in could not tell of.
        n_unplaced: Communicators so far that found its table full: a hang on one of them is not seen.
    """

    pid: int
    api: int
    n_comms: int
    n_ops: int
    n_lost: int
    n_unplaced: int


def find_plugins(parent: Path) -> list[PluginStatus]:
    """Every process whose plug-in tells and that we may look at, by pid.

    Args:
        parent: Where plug-ins make their rings, as the processes see it.
    """
    found = []
    with ExitStack() as stack:
        for pid in iter_pids():
            for ring in find_rings_of(pid, parent).values():
                stack.enter_context(ring)
                n_comms, n_ops = len(ring.read_communicators()), ring.count()
                lost = ring.counts
                found.append(
                    PluginStatus(pid, ring.api, n_comms, n_ops, lost.n_lost, lost.n_unplaced)
                )
    return sorted(found, key=lambda one: one.pid)


VARIABLE: Final = "NCCL_PROFILER_PLUGIN"
NAME: Final = "libnccl-profiler-ingero.so"
INTERFACES: Final = (4, 5, 6)
"""Versions of the interface that it has. NCCL has version 4 since 2.27 and still takes the older ones."""
_NATIVE: Final = Path(__file__).parent / "native"


def find_plugin() -> Path:
    """The library for this machine.

    Raises:
        UnsupportedError: It was not built for it.
    """
    path = _NATIVE / platform.machine() / NAME
    if not path.exists():
        raise UnsupportedError(
            f"the NCCL plug-in was not built for {platform.machine()}",
            hint="in a source tree run `make native`",
        )
    return path


def install_plugin(folder: Path) -> Path:
    """Copy the library into a folder that jobs see, such as one of the host that containers mount; its path there.

    One that is there already is replaced at once; processes that have loaded it keep what they have.

    Raises:
        StoreError: The folder cannot be made or written.
        UnsupportedError: The library was not built for this machine.
    """
    source, path = find_plugin(), folder / NAME
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(path, source.read_bytes(), 0o755)
    except OSError as error:
        raise StoreError(
            f"the NCCL plug-in cannot be copied to {path}: {error.strerror or error}"
        ) from error
    return path


def build_setting(path: Path) -> str:
    """What to put into the environment of the job, as a shell takes it."""
    return f"{VARIABLE}={path}"
