"""The processor time of each host: a cgroup of its own with a quota, so that hosts do not slow each other down.

Source: Linux, Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``, ``cpu.cfs_period_us``) and
Documentation/admin-guide/cgroup-v2.rst (``cpu.max``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingero.errors import UnsupportedError
from ingero.sim.cluster.cleanup import Cleanup
from ingero.units import NS_PER_US

PERIOD_US: Final = 10_000
"""Short, so that a host that has used up its time stands still for less than a step of its job."""
MIN_QUOTA_US: Final = 1_000
"""The kernel takes no less."""
RESERVED: Final = 0.5
"""Part of the machine that is left to agents, Fleet and everybody else."""
WEIGHTS: Final = {"cpu.shares": 10_240, "cpu.weight": 1_000}
"""Ten times what others have: a host gets its time whatever else this machine does."""
_MOUNTS: Final = Path("/proc/self/mountinfo")
_OWN: Final = Path("/proc/self/cgroup")
# The processes of a host end before its cgroup can be removed, and a run that was killed has not ended them.
_REMOVE: Final = """for _ in 1 2 3 4 5 6 7 8 9 10; do
rmdir "$1" 2>/dev/null && exit; while read -r pid; do kill -9 "$pid"; done <"$1/cgroup.procs"; sleep 0.2; done"""


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """What one host has of the processors.

    Attributes:
        folder: Its cgroup.
        is_unified: Whether that is of version 2.
        n_processors: What it has when nothing is wrong, in processors.
    """

    folder: Path
    is_unified: bool
    n_processors: float

    @property
    def members(self) -> Path:
        """The file that takes process ids."""
        return self.folder / "cgroup.procs"

    def read_throttled(self) -> int:
        """How long the host was held back by its quota so far, in nanoseconds."""
        fields = dict(line.split() for line in _read(self.folder / "cpu.stat").splitlines())
        in_us = int(fields.get("throttled_usec", 0))
        return int(fields.get("throttled_time", 0)) or in_us * NS_PER_US

    def limit(self, part: float) -> None:
        """From now on the host has this part of what it should have.

        Raises:
            UnsupportedError: The kernel refuses.
        """
        share = part * self.n_processors
        period_us = max(PERIOD_US, math.ceil(MIN_QUOTA_US / share))
        quota_us = round(share * period_us)
        if self.is_unified:
            _write(self.folder / "cpu.max", f"{quota_us} {period_us}")
        else:
            _write(self.folder / "cpu.cfs_period_us", str(period_us))
            _write(self.folder / "cpu.cfs_quota_us", str(quota_us))


@contextmanager
def open_shares(
    n_hosts: int, cleanup: Cleanup, n_busy: int | None = None
) -> Iterator[tuple[ProcessorShare, ...]]:
    """Divide the processors among hosts; ``cleanup`` ends what runs on them and removes the cgroups.

    Args:
        n_hosts: How many.
        cleanup: Ends and removes.
        n_busy: So many of them work at a time; None for all.

    Raises:
        UnsupportedError: No cgroup can be made here.
    """
    parent, is_unified = find_parent()
    if is_unified:
        _write(parent / "cgroup.subtree_control", "+cpu")
    n_processors = (1 - RESERVED) * len(os.sched_getaffinity(0)) / (n_busy or n_hosts)
    shares = []
    for host in range(n_hosts):
        folder = parent / f"ingero-{os.getpid()}-{host}"
        try:
            folder.mkdir()
        except OSError as error:
            raise UnsupportedError(
                f"cannot make the cgroup {folder}: {error.strerror}", hint="run it as root"
            ) from error
        cleanup.add("/bin/sh", "-c", _REMOVE, "remove", str(folder))
        shares.append(ProcessorShare(folder, is_unified, n_processors))
        weight = "cpu.weight" if is_unified else "cpu.shares"
        _write(folder / weight, str(WEIGHTS[weight]))
        shares[-1].limit(1.0)
    yield tuple(shares)


def find_parent(mounts: Path = _MOUNTS, own: Path = _OWN) -> tuple[Path, bool]:
    """The cgroup in which hosts get theirs, and whether it is of version 2: ours, or the root of version 2.

    In version 2 only the root may have both processes and children with a quota.

    Raises:
        UnsupportedError: The processors are under no cgroup.
    """
    unified = None
    for line in mounts.read_text().splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(maxsplit=2)
        place = Path(mount.split()[4])
        if kind == "cgroup" and "cpu" in options.split(","):
            return place / find_own(own.read_text()).lstrip("/"), False
        if kind == "cgroup2" and "cpu" in _read(place / "cgroup.controllers").split():
            unified = place
    if unified is None:
        raise UnsupportedError(
            "hosts cannot be given processor time: no cgroup has the processors",
            hint="mount cgroup version 2, or run outside the container",
        )
    return unified, True


def find_own(text: str) -> str:
    """Our cgroup of version 1 for processors, in the contents of ``/proc/self/cgroup``; the root without one."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return next((path for _, names, path in lines if "cpu" in names.split(",")), "/")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise UnsupportedError(
            f"cannot write {text!r} to {path}: {error.strerror}",
            hint="processor time is divided by root, outside of containers that may not",
        ) from error
