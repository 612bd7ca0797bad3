"""Which of the libcudart on this machine the demos can run with."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.agent.capture.discover.library_paths import iter_installed
from ingero.agent.capture.gpu.driver import CONTROL, has_driver
from ingero.errors import UnsupportedError
from ingero.sim.programs.device import find_version, open_runtime

_BY_NAME: Final = ("libcudart.so.13", "libcudart.so.12")
_INSTALL: Final = (
    "pip install 'nvidia-cuda-runtime-cu12>=12.8' (for a driver of CUDA 12) or nvidia-cuda-runtime (13), apt install "
    "cuda-cudart-12-9, or name one with --libcudart"
)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A libcudart that can load a kernel.

    Attributes:
        path: Where it is or, where only the dynamic linker knows that, its name.
        version: Its own, (major, minor).
        driver: The newest version that the driver here takes; (0, 0) without a driver.
    """

    path: str
    version: tuple[int, int]
    driver: tuple[int, int]

    def is_taken(self) -> bool:
        """Whether the driver takes it, which the first number of the version decides (CUDA compatibility guide).

        Without a driver that is no reason to refuse: the first call says what is missing.
        """
        return not self.version[0] > self.driver[0] > 0


def check_device(control: Path = CONTROL) -> None:
    """Whether NVIDIA's driver is here.

    Args:
        control: The driver's control device.

    Raises:
        UnsupportedError: It is not.
    """
    if not has_driver(control):
        raise UnsupportedError(
            f"there is no NVIDIA device here (no driver answers at {control})",
            hint="use --sim, the GPU simulator; in a container, start that with --gpus all",
        )


def find_runtime(paths: Iterable[str]) -> str:
    """The newest libcudart that can load a kernel and that the driver takes.

    Args:
        paths: Files, or names for the dynamic linker.

    Raises:
        UnsupportedError: There is none; the message says why each file does not do.
    """
    reasons, found = [], []
    for path in dict.fromkeys(paths):
        try:
            cudart = open_runtime(path)
        except UnsupportedError as error:
            if path not in _BY_NAME or not isinstance(error.__cause__, OSError):
                reasons.append(error.message)
            continue
        runtime = Runtime(
            path,
            find_version(cudart, "cudaRuntimeGetVersion"),
            find_version(cudart, "cudaDriverGetVersion"),
        )
        if runtime.is_taken():
            found.append(runtime)
        else:
            reasons.append(
                f"{path} is of CUDA {runtime.version[0]}, the driver of {runtime.driver[0]}.{runtime.driver[1]}"
            )
    if found:
        return max(found, key=lambda runtime: runtime.version).path
    problem = (
        "; ".join(("no libcudart here does", *reasons)) if reasons else "no libcudart was found"
    )
    raise UnsupportedError(problem, hint=_INSTALL)


def iter_runtimes() -> Iterator[str]:
    """Every libcudart in this Python's environment, in the folders of the system and its toolkits, and by name."""
    for path in iter_installed(sys.executable):
        if path.name.startswith("libcudart"):
            yield str(path)
    yield from _BY_NAME
