"""Recordings that ship with the package, so that the demo and the tests read one copy."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

PACKAGED: Final = ("AR",)
"""Names of the recordings under ``traces/data``; each has a PROVENANCE.md beside it."""


def find_packaged(name: str) -> Path | None:
    """Where a packaged recording lies, or None when there is none of that name."""
    if name not in PACKAGED:
        return None
    return Path(str(resources.files("ingero.job_traces"))) / "data" / name / f"trace-{name}.parquet"
