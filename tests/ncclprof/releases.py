"""Releases of NVIDIA's NCCL, and what a process does with one where there is no device."""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripts.libraries import NCCL, choose_releases, find_fetched
from tests.support.compiler import CC

from ingero.agent.collectives.plugin import find_plugin

HERE = Path(__file__).parent
TABLE = HERE.parents[1] / "docs/evidence/nccl/README.md"
QUICK = ("2.18.1", "2.27.7", "2.32.3")
"""What `make test` takes where it is there; `make test-libraries` takes all, and `make test-libraries ONLY=2.28.*` some."""
CHOSEN = (
    choose_releases(os.environ["INGERO_LIBRARIES"]) if "INGERO_LIBRARIES" in os.environ else QUICK
)

only_x86 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="NCCL's CUDA runtime is taken out on x86-64 only"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A release in the table of docs/evidence/nccl.

    Attributes:
        release: The release of the wheel.
        n_functions: Functions of our table that it has.
        n_calls: Calls of both ranks that are seen.
        plugin: What becomes of our plug-in: the version of the interface, or why not.
        n_timed: Collectives of a rank that the plug-in timed.
    """

    release: str
    n_functions: int
    n_calls: int
    plugin: str
    n_timed: int


def read_table():
    """The rows of the table, by release."""
    rows = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] in NCCL:
            rows[cells[0]] = Row(cells[0], int(cells[1]), int(cells[2]), cells[3], int(cells[4]))
    return rows


def get_library(release):
    """The library of a release; skips the test where it was not fetched."""
    path = find_fetched("nvidia-nccl-cu12", release, "libnccl.so.2")
    if path is None:
        pytest.skip(f"NCCL {release} was not fetched: make test-libraries ONLY={release}")
    return path


def build_stand_in(folder):
    """no_device.c as a library that NCCL finds as NVML."""
    path = folder / "libnvidia-ml.so.1"
    command = [*CC, "-O1", "-shared", "-fPIC", str(HERE / "no_device.c")]
    subprocess.run([*command, "-o", str(path)], check=True)
    return path


def run_ranks(library, stand_in, rings, n_timed, *, plugin=None, **variables):
    """Run play.py; its account, and what NCCL said of its plug-ins."""
    environment = dict(os.environ) | {
        "LD_LIBRARY_PATH": str(stand_in.parent),
        "INGERO_NCCL_DIR": str(rings),
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": str(rings / "said.txt"),
        "NCCL_PROFILER_PLUGIN": str(find_plugin()) if plugin is None else plugin,
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    command = [sys.executable, str(HERE / "play.py"), str(library), str(stand_in), str(n_timed)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=150
    )
    said = (rings / "said.txt").read_text(encoding="utf-8", errors="replace")
    assert done.returncode == 0, f"{done.stderr[-2000:]}\n{said[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1]), said
