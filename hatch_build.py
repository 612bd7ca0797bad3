"""Compiles the BPF objects and the simulator into the wheel; nothing compiles after installation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeBuildHook(BuildHookInterface):
    """Runs ``scripts/build_native.py`` before a wheel is packed; an editable install leaves that to ``scripts/setup``."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and mark the wheel as made for this platform."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root) / "scripts"))
        import build_native  # noqa: PLC0415 - lies beside, is no package

        build_native.build_all()
        build_data["pure_python"] = False
        build_data["infer_tag"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"


def _platform_tag() -> str:
    import platform  # noqa: PLC0415

    return f"manylinux_2_28_{platform.machine()}"
