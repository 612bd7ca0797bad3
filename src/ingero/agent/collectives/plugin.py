"""The plug-in that NCCL loads into a training process, and the environment variable that makes it do so.

Source: NCCL's documentation of its profiler interface: ``NCCL_PROFILER_PLUGIN`` may be the path of a library.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Final

from ingero.errors import UnsupportedError

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


def build_setting(path: Path) -> str:
    """What to put into the environment of the job, as a shell takes it."""
    return f"{VARIABLE}={path}"
