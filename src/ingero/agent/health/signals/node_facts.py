"""What an agent knows about its node before the first sample: name, cohort, GPUs.

Read once at the start; nothing here is needed for the loop to run.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Final, NamedTuple

from ingero.agent.capture.discover.cgroups import parse_memberships

_PROC: Final = Path("/proc")
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


def find_own_cohort(proc: Path = _PROC) -> str:
    """The cohort that this process belongs to: its cgroup's as its own namespace shows it; empty when unreadable.

    The host's path of a pod has the pod's uid, so no two nodes would have the same. The path is that of version 2 where
    there is one, else the longest.

    Source: wire contract of agent v0.17, ``ingero.cgroup_path_hash``.
    """
    try:
        text = (proc / "self/cgroup").read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    own = parse_memberships(text)
    unified = next((one.shown for one in own if not one.controllers), None)
    longest = max((one.shown for one in own), key=len, default="")
    return hash_cgroup_path(longest if unified is None else unified)


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
