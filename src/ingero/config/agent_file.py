"""Where the settings file of a node's agent is looked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ingero.config.invoker import find_invoker

SETTINGS_FILE: Final = "INGERO_CONFIG"
"""Names the file; it must exist then."""
CONFIG_PATHS: Final = ("./ingero.yaml", "/etc/ingero/ingero.yaml", "~/.config/ingero/ingero.yaml")
"""Where it is looked for else, the first that exists. Source: node identity of the existing agent v0.17."""


def choose_settings_file(file: str) -> None:
    """Have this process, and those it starts, go on as if the environment had named the file."""
    os.environ[SETTINGS_FILE] = file


def find_settings_file(
    environ: Mapping[str, str] | None = None, paths: tuple[str, ...] = CONFIG_PATHS
) -> Path | None:
    """The file that holds where nobody names one; None when there is none.

    One in the working directory counts only if it belongs to root or to the user who asks: root often works in a
    directory where others may write.
    """
    values = os.environ if environ is None else environ
    if values.get(SETTINGS_FILE):
        return Path(values[SETTINGS_FILE])
    invoker = find_invoker(values)
    for place in paths:
        file = Path(f"{invoker.home}{place[1:]}" if place.startswith("~") else place)
        if _is_usable(file, invoker.uid):
            return file
    return None


def _is_usable(file: Path, uid: int) -> bool:
    """Whether it is there; a place that may not even be looked into, such as a home that a unit hides, has none."""
    try:
        return file.is_file() and (file.is_absolute() or file.stat().st_uid in {0, uid})
    except OSError:
        return False
