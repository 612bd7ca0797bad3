"""Where the plug-in for NCCL puts its rings when not in shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

RINGS: Final = "INGERO_NCCL_DIR"
"""Parent of the rings' folders, for the plug-in (ncclprof/ring.c) and the agent alike; beats the default."""


def ring_parent(environ: Mapping[str, str] | None = None) -> Path:
    """``$INGERO_NCCL_DIR`` or ``/dev/shm``, as the traced process sees it."""
    values = os.environ if environ is None else environ
    return Path(values.get(RINGS) or "/dev/shm")  # noqa: S108 - folders in it are their owners' alone
