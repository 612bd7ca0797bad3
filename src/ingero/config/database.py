"""Where the recording is when nobody says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DATABASE: Final = "INGERO_DB"
"""Path of the recording; beats the default."""


def default_database(environ: Mapping[str, str] | None = None) -> Path:
    """``$INGERO_DB``, or ``.ingero/ingero.db`` in the home of the user who called sudo, of this user, or in /tmp."""
    values = os.environ if environ is None else environ
    if values.get(DATABASE):
        return Path(values[DATABASE])
    home = values.get("HOME") or "/tmp"  # noqa: S108 - the documented last resort of the existing agent
    if os.geteuid() == 0 and values.get("SUDO_USER"):
        home = str(Path(f"~{values['SUDO_USER']}").expanduser())
    return Path(home) / ".ingero" / "ingero.db"
