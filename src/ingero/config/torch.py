"""Which Python has the PyTorch that jobs and tests run with; it is never in this program's own environment."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

TORCH_PYTHON: Final = "INGERO_TORCH_PYTHON"
"""An interpreter that can import torch; beats the search."""
_ENVIRONMENTS: Final = (
    ".venv*",
    "venv*",
    "~/.venv*",
    "~/venv*",
    "~/.virtualenvs/*",
    "~/*conda*/envs/*",
    "~/*conda*",
    "/opt/*",
)
"""Where people keep environments."""
_TORCH: Final = "lib/python3*/site-packages/torch/version.py"


def find_torch_python(environ: Mapping[str, str] | None = None) -> Path | None:
    """``$INGERO_TORCH_PYTHON``, or the first interpreter with torch; None where there is none.

    Looked for on PATH, then in environments of the usual places. An interpreter is recognised by the files beside it;
    none is started.
    """
    values = os.environ if environ is None else environ
    if values.get(TORCH_PYTHON):
        return Path(values[TORCH_PYTHON])
    return next((python for python in _iter_pythons(values) if has_torch(python)), None)


def has_torch(python: Path) -> bool:
    """Whether torch is installed beside an interpreter."""
    return python.is_file() and any(python.parent.parent.glob(_TORCH))


def _iter_pythons(values: Mapping[str, str]) -> Iterator[Path]:
    for folder in filter(None, values.get("PATH", "").split(os.pathsep)):
        yield Path(folder) / "python3"
    home = values.get("HOME") or "/"
    for pattern in _ENVIRONMENTS:
        beside = Path(home if pattern.startswith("~/") else "").absolute()
        place = Path(glob.escape(str(beside)), pattern.removeprefix("~/"))
        for found in sorted(Path("/").glob(str(place.relative_to("/")))):
            yield found / "bin" / "python3"
