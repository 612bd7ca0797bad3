"""Libraries that are installed where they usually are, so that they are probed before a program loads them.

Only saves the milliseconds between loading and probing; what is not found here is found when it is loaded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_SYSTEM: Final = (
    "usr/lib/*/libcuda.so.1",
    "usr/lib64/libcuda.so.1",
    "usr/lib/*/libnccl.so.2",
    "usr/lib64/libnccl.so.2",
    "usr/lib/*/libcudart.so.*",
    "usr/local/cuda*/lib64/libcudart.so.*",
)
_SITE: Final = "lib/python3*/site-packages"
_PACKAGES: Final = (
    "nvidia/*/lib/libcudart.so.*",
    "nvidia/*/lib/libnccl.so.*",
    "torch/lib/libcudart*.so*",
    "torch/lib/libtorch_cuda.so",
)


def iter_installed(program: str = "") -> Iterator[Path]:
    """Libraries in the system's folders and in the Python environment that a program lies in.

    Args:
        program: A program's name or path; looked up in PATH. An environment's ``bin/`` leads to its packages.
    """
    for pattern in _SYSTEM:
        yield from Path("/").glob(pattern)
    found = shutil.which(program) if program else None
    if found is None:
        return
    environment = Path(found).absolute().parent.parent
    for site in environment.glob(_SITE):
        for pattern in _PACKAGES:
            yield from site.glob(pattern)
