"""Compiles the BPF objects, the simulator and the plug-in for NCCL into the wheel.

Nothing compiles after installation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Runs ``scripts/build_native.py`` before a wheel is packed.

    An editable install leaves that to ``scripts/setup``.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build for every kind of processor; the one wheel is marked as made for each."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "scripts"))
        import build_native  # noqa: PLC0415 - lies beside, is no package

        build_native.build_all()
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        platforms = (f"manylinux_2_28_{machine}" for machine in sorted(build_native.MACHINES))
        build_data["tag"] = f"py3-none-{'.'.join(platforms)}"
