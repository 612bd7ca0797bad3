"""What an agent knows about its node before the first sample: name, cohort, GPUs.

Read once at the start; nothing here is needed for the loop to run.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

SELF_CGROUP: Final = Path("/proc/self/cgroup")
_QUERY_TIMEOUT_S: Final = 2.0
_MAX_OUTPUT: Final = 4096


class GpuFacts(NamedTuple):
    """The node's GPUs.

    Attributes:
        model: The first one's name, verbatim as nvidia-smi prints it; empty without a GPU.
        n_gpus: How many.
    """

    model: str = ""
    n_gpus: int = 0


def hash_cgroup_path(path: str) -> str:
    """The cohort of a cgroup: first 16 hexadecimal digits of the path's SHA-256; empty for an empty path.

    Source: wire contract of agent v0.17, ``ingero.cgroup_path_hash``.
    """
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:16] if path else ""


def find_cgroup_path(proc_file: Path = SELF_CGROUP) -> str:
    """The cgroup of a process: the v2 path where there is one, else the longest v1 path; empty when unreadable.

    Source: cgroups(7), ``/proc/[pid]/cgroup``: lines of ``hierarchy:controllers:path``.
    """
    try:
        text = proc_file.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    paths = []
    for line in text.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            return path
        paths.append(path)
    return max(paths, key=len, default="")


def find_gpus() -> GpuFacts:
    """Ask nvidia-smi; no GPU when it is missing, slow or fails."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            timeout=_QUERY_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return GpuFacts()
    return parse_gpu_names(result.stdout[:_MAX_OUTPUT].decode("utf-8", "replace"))


def parse_gpu_names(text: str) -> GpuFacts:
    """Read nvidia-smi's list of names, one GPU per line."""
    names = [line.strip() for line in text.splitlines() if line.strip()]
    return GpuFacts(names[0], len(names)) if names else GpuFacts()
