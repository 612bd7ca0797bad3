"""Whether NVIDIA's driver is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

CONTROL: Final = Path("/dev/nvidiactl")
"""The driver's control device."""


def has_driver(control: Path = CONTROL) -> bool:
    """Whether the driver's control device is there and a driver answers for it.

    The file proves nothing: libcuda makes it for root where no driver is loaded, and opening it fails then (ENXIO).

    Args:
        control: The control device.
    """
    try:
        os.close(os.open(control, os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:  # there is one, for other users
        return True
    except OSError:
        return False
    return True
