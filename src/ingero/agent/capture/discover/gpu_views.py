"""Which GPUs a process is shown, out of ``/proc``.

NVIDIA's container toolkit makes device nodes in a container under the host's names, so ``nvidia3`` is the same device
for all. Source: nvidia-container-toolkit, "Low-level components"; MIG user guide, "Device Nodes and Capabilities".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ingero.model.gpu_view import UNKNOWN, GpuView

_NODE: Final = re.compile(r"nvidia\d+")
_CAPABILITY: Final = re.compile(r"nvidia-cap\d+")
_CAPABILITIES: Final = "nvidia-caps"
_MAX_CHARS: Final = 4096


def read_gpu_view(folder: Path, variables: Mapping[str, str] | None) -> GpuView:
    """What a process is shown; `UNKNOWN` where its root may not be read, or it is gone.

    Args:
        folder: ``/proc/PID``.
        variables: Its environment; None where it may not be read.
    """
    if variables is None:
        return UNKNOWN
    devices = folder / "root/dev"
    try:
        nodes = [one.name for one in devices.iterdir() if _NODE.fullmatch(one.name)]
    except OSError:
        return UNKNOWN
    try:
        capabilities = [
            f"{_CAPABILITIES}/{one.name}"
            for one in (devices / _CAPABILITIES).iterdir()
            if _CAPABILITY.fullmatch(one.name)
        ]
    except OSError:  # no device is cut by MIG
        capabilities = []
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    return GpuView(
        tuple(sorted([*nodes, *capabilities])),
        None if visible is None else visible[:_MAX_CHARS],
        variables.get("CUDA_DEVICE_ORDER", "")[:_MAX_CHARS],
    )
