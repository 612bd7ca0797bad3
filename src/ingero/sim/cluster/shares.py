"""The processor time of each host: a cgroup of its own with a quota, so that hosts do not slow each other down.

Where a host's disks are to become slow it has one for them too: in version 2 the same, in version 1 another.

Source: Linux, Documentation/scheduler/sched-bwc.rst (``cpu.cfs_quota_us``, ``cpu.cfs_period_us``),
Documentation/admin-guide/cgroup-v2.rst (``cpu.max``, ``io.max``) and
Documentation/admin-guide/cgroup-v1/blkio-controller.rst (``blkio.throttle.read_bps_device``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingero.errors import UnsupportedError
from ingero.sim.cluster.cleanup import REPORT_FD, Cleanup
from ingero.units import NS_PER_US

PERIOD_US: Final = 10_000
"""Short, so that a host that has used up its time stands still for less than a step of its job."""
MIN_QUOTA_US: Final = 1_000
"""The kernel takes no less."""
MAX_PERIOD_US: Final = 1_000_000
"""The kernel takes no more: ``max_cfs_quota_period`` of kernel/sched/core.c."""
RESERVED: Final = 0.5
"""Part of the machine that is left to agents, Fleet and everybody else."""
WHOLE: Final = 1 / (1 - RESERVED)
"""What part of its share a host has when all hosts divide the whole machine."""
PROCESSORS: Final = frozenset({"cpu"})
DISKS: Final = frozenset({"io", "blkio"})
"""What versions 2 and 1 call the controller."""
WEIGHTS: Final = {"cpu.shares": 10_240, "cpu.weight": 1_000}
"""Ten times what others have: a host gets its time whatever else this machine does."""
_MOUNTS: Final = Path("/proc/self/mountinfo")
_DISKS: Final = Path("/sys/block")
_OWN: Final = Path("/proc/self/cgroup")
# The processes of a host end before its cgroup can be removed, and a run that was killed has not ended them. Within
# the host's limits a process takes seconds to end: that is work of its own, the more the more memory it had.
_REMOVE: Final = """lift() { [ -w "$1/$2" ] && echo "$3" >"$1/$2"; }
lift "$1" cpu.cfs_quota_us -1; lift "$1" cpu.max max
for file in blkio.throttle.read_bps_device:0 io.max:rbps=max; do
[ -r "$1/${file%:*}" ] || continue
disks=; while read -r disk _; do disks="$disks $disk"; done <"$1/${file%:*}"
for disk in $disks; do lift "$1" "${file%:*}" "$disk ${file#*:}"; done; done
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25; do
rmdir "$1" 2>/dev/null && exit; while read -r pid; do kill -9 "$pid"; done <"$1/cgroup.procs"; sleep 0.2; done
pids=; while read -r pid; do pids="$pids $pid"; done <"$1/cgroup.procs"
echo "ingero: the cgroup $1 is left behind; once these have ended, rmdir $1:${pids:- groups in it}" >&"$2\""""

# What another cgroup is limited by would be gone with its controller. `ingero-*` are hosts of another run.
_DISABLE: Final = """for one in "$1"/*/; do
case "$one" in */ingero-[0-9]*) exit;; esac
for file in cpu.max cpu.weight io.max io.weight; do
[ -r "$one$file" ] && read -r now <"$one$file" || continue
case "$now" in "max 100000"|100|"default 100") ;; *) exit;; esac; done; done
echo "$2" >"$1/cgroup.subtree_control\""""


@dataclass(frozen=True, slots=True)
class ProcessorShare:
    """What one host has of the processors.

    Attributes:
        folder: Its cgroup.
        is_unified: Whether that is of version 2.
        n_processors: What it has when nothing is wrong, in processors.
        disk_folder: The cgroup of its disks; None where they stay as they are.
    """

    folder: Path
    is_unified: bool
    n_processors: float
    disk_folder: Path | None = None

    @property
    def members(self) -> tuple[Path, ...]:
        """The files that take process ids."""
        folders = dict.fromkeys(filter(None, (self.folder, self.disk_folder)))
        return tuple(folder / "cgroup.procs" for folder in folders)

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
        period_us = min(max(PERIOD_US, math.ceil(MIN_QUOTA_US / share)), MAX_PERIOD_US)
        quota_us = round(share * period_us)
        if self.is_unified:
            _write(self.folder / "cpu.max", f"{quota_us} {period_us}")
        else:
            _write(self.folder / "cpu.cfs_period_us", str(period_us))
            _write(self.folder / "cpu.cfs_quota_us", str(quota_us))

    def limit_reading(self, bytes_per_s: int, disks: Path = _DISKS) -> None:
        """From now on the host reads no more from any disk in a second than this.

        Raises:
            UnsupportedError: The kernel refuses.
        """
        assert self.disk_folder is not None, (
            "open_shares was given the hosts whose disks become slow"
        )
        for number in list_disks(disks):
            if self.is_unified:
                _write(self.disk_folder / "io.max", f"{number} rbps={bytes_per_s}")
            else:
                name = "blkio.throttle.read_bps_device"
                _write(self.disk_folder / name, f"{number} {bytes_per_s}")


@dataclass(slots=True)
class HostShares:
    """The hosts' processor time: the whole machine while the job only loads libraries, in each of its runs.

    Attributes:
        shares: By host.
        parts: What hosts with a fault have, whatever the job does.
        is_loading: Whether they divide the whole machine now.
    """

    shares: Sequence[ProcessorShare]
    parts: dict[int, float] = field(default_factory=dict)
    is_loading: bool = False

    def hit(self, host: int, part: float) -> None:
        """From now on a host has this part of its share."""
        self.parts[host] = part
        self.shares[host].limit(part)

    def divide(self, *, is_loading: bool) -> None:
        """Give every host but those with a fault its share of the whole machine, or its own and no more.

        Args:
            is_loading: The job's log shows no step yet.
        """
        if is_loading == self.is_loading:
            return
        self.is_loading = is_loading
        for host, share in enumerate(self.shares):
            share.limit(self.parts.get(host, WHOLE if is_loading else 1.0))


def list_disks(disks: Path = _DISKS) -> list[str]:
    """The device numbers of this machine's disks that have a medium and are no memory, as the kernel writes them."""
    return [
        (disk / "dev").read_text().strip()
        for disk in sorted(disks.iterdir())
        if not disk.name.startswith(("loop", "ram", "zram")) and _read(disk / "size").strip() != "0"
    ]


def count_processors(n_hosts: int) -> float:
    """What each of so many hosts has when nothing is wrong, in processors."""
    return (1 - RESERVED) * len(os.sched_getaffinity(0)) / n_hosts


def find_least_part(n_hosts: int) -> float:
    """The least part of that to which one of so many hosts can be limited."""
    return MIN_QUOTA_US / MAX_PERIOD_US / count_processors(n_hosts)


@contextmanager
def open_shares(
    n_hosts: int,
    cleanup: Cleanup,
    n_busy: int | None = None,
    slow_disks: Collection[int] = (),
) -> Iterator[tuple[ProcessorShare, ...]]:
    """Divide the processors among hosts; ``cleanup`` ends what runs on them and removes the cgroups.

    Args:
        n_hosts: How many.
        cleanup: Ends and removes.
        n_busy: So many of them work at a time; None for all.
        slow_disks: Hosts whose disks can be made slow.

    Raises:
        UnsupportedError: No cgroup can be made here.
    """
    parent, is_unified = find_parent(PROCESSORS)
    disks = find_parent(DISKS) if slow_disks else None
    if disks is not None and disks[1] != is_unified:
        raise UnsupportedError(
            "a disk cannot be made slow: it and the processors are in different cgroups"
        )
    controllers = ("cpu", "io") if slow_disks else ("cpu",)
    added = _add_controllers(parent, controllers) if is_unified else []
    n_processors = count_processors(n_busy or n_hosts)
    shares = []
    try:
        for host in range(n_hosts):
            name = f"ingero-{os.getpid()}-{host}"
            folder = _make_group(parent / name, cleanup)
            disk_folder = None
            if disks is not None and host in slow_disks:
                disk_folder = folder if is_unified else _make_group(disks[0] / name, cleanup)
            shares.append(ProcessorShare(folder, is_unified, n_processors, disk_folder))
            weight = "cpu.weight" if is_unified else "cpu.shares"
            _write(folder / weight, str(WEIGHTS[weight]))
            shares[-1].limit(1.0)
    finally:
        if added:  # behind the commands that remove the hosts' own
            off = " ".join(f"-{name}" for name in added)
            cleanup.add("/bin/sh", "-c", _DISABLE, "disable", str(parent), off)
    yield tuple(shares)


def _add_controllers(parent: Path, controllers: Collection[str]) -> list[str]:
    """Let children of a cgroup of version 2 be limited; the controllers that were not there before."""
    control = parent / "cgroup.subtree_control"
    known = _read(control).split()
    _write(control, " ".join(f"+{name}" for name in controllers))
    return [name for name in controllers if name not in known]


def _make_group(folder: Path, cleanup: Cleanup) -> Path:
    try:
        folder.mkdir()
    except OSError as error:
        raise UnsupportedError(
            f"cannot make the cgroup {folder}: {error.strerror}", hint="run it as root"
        ) from error
    cleanup.add("/bin/sh", "-c", _REMOVE, "remove", str(folder), str(REPORT_FD))
    return folder


def find_parent(
    controllers: AbstractSet[str], mounts: Path = _MOUNTS, own: Path = _OWN
) -> tuple[Path, bool]:
    """The cgroup in which hosts get theirs, and whether it is of version 2: ours, or the root of version 2.

    In version 2 only the root may have both processes and children with limits.

    Args:
        controllers: Names of what it must control, of which each version knows one: `PROCESSORS` or `DISKS`.
        mounts: This process's mounts.
        own: Its groups.

    Raises:
        UnsupportedError: No cgroup controls that.
    """
    unified = None
    for line in mounts.read_text().splitlines():
        mount, _, filesystem = line.partition(" - ")
        kind, _, options = filesystem.split(maxsplit=2)
        place = Path(mount.split()[4])
        if kind == "cgroup" and not controllers.isdisjoint(options.split(",")):
            return place / find_own(own.read_text(), controllers).lstrip("/"), False
        if kind == "cgroup2" and not controllers.isdisjoint(
            _read(place / "cgroup.controllers").split()
        ):
            unified = place
    if unified is None:
        raise UnsupportedError(
            f"hosts cannot be limited: no cgroup has the {' or '.join(sorted(controllers))} controller",
            hint="mount cgroup version 2, or run outside the container",
        )
    return unified, True


def find_own(text: str, controllers: AbstractSet[str] = PROCESSORS) -> str:
    """Our cgroup of version 1 for a controller, in the contents of ``/proc/self/cgroup``; the root without one."""
    lines = (line.split(":", 2) for line in text.splitlines() if line.count(":") >= 2)
    return next(
        (path for _, names, path in lines if not controllers.isdisjoint(names.split(","))), "/"
    )


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
            hint="hosts are limited by root, outside of containers that may not",
        ) from error
