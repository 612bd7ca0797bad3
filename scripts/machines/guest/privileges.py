"""Checks of privileges and settings: what `ingero check` says with each is what `ingero trace` then meets."""

from __future__ import annotations

import ctypes
import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from scripts.machines.guest.running import (
    INGERO,
    CheckError,
    compare,
    refuse_denials,
    run,
    sum_launches,
)

from ingero.sim.runner import get_program

# docs/guides/trace.md: for one's own program; and the unit in deploy/systemd.
SETS: Final = {
    "own program": ("bpf", "perfmon"),
    "service": ("bpf", "perfmon", "sys_ptrace", "dac_read_search"),
}
_SINCE_LINKS: Final = (6, 6)  # Linux that probes without perf events
_STEPS: Final = 11
# Without news of mappings a library is found within two seconds, and emulated ones are long.
_WAIT_US: Final = 6_000_000
# Source: linux/mount.h.
_MS_RDONLY: Final = 1
_MS_REMOUNT: Final = 32
_libc = ctypes.CDLL(None, use_errno=True)


def _as_nobody(capabilities: tuple[str, ...]) -> tuple[str, ...]:
    given = ",".join(f"+{one}" for one in capabilities)
    return (
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
        *(
            f"--bounding-set=-all,{given}",
            f"--inh-caps=-all,{given}",
            f"--ambient-caps=-all,{given}",
        ),
    )


def check_set(name: str) -> str:
    """A user with these capabilities traces a program exactly, and `ingero check` names beforehand what is missing.

    Where calls are probed by perf events, both refuse them first, and name the capability that is needed besides.
    """
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    if release >= _SINCE_LINKS:
        return _compare_promise(_as_nobody(SETS[name]))
    _compare_refusal(_as_nobody(SETS[name]))
    return _compare_promise(_as_nobody((*SETS[name], "sys_admin"))) + ", with CAP_SYS_ADMIN besides"


def _compare_refusal(user: Sequence[str]) -> None:
    report = json.loads(run(*user, *INGERO, "check", "--json").out)
    blocking = {
        one["name"]: one for one in report["checks"] if not one["pass"] and not one["optional"]
    }
    compare("what `ingero check` misses", list(blocking), ["probe engine"])
    command = (*user, *INGERO, "trace", "--no-record", "--", str(get_program()), "train", "steps=1")
    refused = run(*command, is_checked=False)
    compare("exit status of `ingero trace`", refused.status, 3)
    for text in (blocking["probe engine"]["recommendation"], refused.err):
        if "CAP_SYS_ADMIN" not in text:
            raise CheckError(f"CAP_SYS_ADMIN is not asked for: {text}")


def _compare_promise(user: Sequence[str] = ()) -> str:
    """Nothing that is needed is missing, a trace counts exactly, and finds libraries as late as `ingero check` says."""
    report = json.loads(run(*user, *INGERO, "check", "--json").out)
    missing = {one["name"]: one["value"] for one in report["checks"] if not one["pass"]}
    blocking = [one["name"] for one in report["checks"] if not one["pass"] and not one["optional"]]
    compare("what `ingero check` misses", blocking, [])
    traced = run(
        *(*user, *INGERO, "trace", "--json", "--no-record", "--no-incidents", "--"),
        *(str(get_program()), "train", f"steps={_STEPS}", f"wait_us={_WAIT_US}"),
    )
    is_late = "processes are searched" in traced.err
    if is_late != ("new mappings" in missing):
        raise CheckError(f"`ingero check` misses {missing}; `ingero trace` says {traced.err}")
    if not user:
        refuse_denials(traced)
    launches = sum_launches(traced)
    compare("launches counted", launches.get("seen"), _STEPS * 40)
    return f"{launches['seen']} launches counted" + (", libraries found late" if is_late else "")


def check_first_trace() -> str:
    """What a newcomer types counts every call, with the distribution's own settings, and root is refused nothing."""
    command = ("--no-record", "--json", "--", *INGERO, "sim", "run", "train", "steps=50")
    traced = run(*INGERO, "trace", *command)
    refuse_denials(traced)
    launches = sum_launches(traced)
    found = {name: launches.get(name) for name in ("entered", "lost")}
    compare("launches", found, {"entered": 2000, "lost": 0})
    level = Path(_PARANOID).read_text("ascii").strip()
    return f"2000 launches entered, none lost, with perf_event_paranoid {level}"


@contextmanager
def _write(path: str, value: str) -> Iterator[None]:
    file = Path(path)
    before = file.read_text("ascii")
    file.write_text(value, "ascii")
    try:
        yield
    finally:
        file.write_text(before, "ascii")


@contextmanager
def _write_for_good(path: str, value: str) -> Iterator[None]:
    """What the kernel lets nobody take back before it is booted again."""
    Path(path).write_text(value, "ascii")
    yield


def _mount(kind: str, where: str, options: str = "", flags: int = 0) -> None:
    Path(where).mkdir(parents=True, exist_ok=True)
    if _libc.mount(kind.encode(), where.encode(), kind.encode(), flags, options.encode() or None):
        raise CheckError(f"cannot mount {kind} on {where}: {os.strerror(ctypes.get_errno())}")


def _unmount(where: str) -> None:
    if _libc.umount2(where.encode(), 0):
        raise CheckError(f"cannot unmount {where}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def _without_tracefs() -> Iterator[None]:
    mounted = (("tracefs", "/sys/kernel/tracing"), ("debugfs", "/sys/kernel/debug"))
    for _, where in mounted:
        _unmount(where)
    try:
        yield
    finally:
        for kind, where in mounted:
            _mount(kind, where)


@contextmanager
def _remounted(
    kind: str, where: str, *, options: str, back: str, is_read_only: bool
) -> Iterator[None]:
    _mount(kind, where, options, _MS_REMOUNT | (_MS_RDONLY if is_read_only else 0))
    try:
        yield
    finally:
        _mount(kind, where, back, _MS_REMOUNT)


@contextmanager
def _hybrid_cgroups() -> Iterator[None]:
    """As systemd mounts them with ``systemd.unified_cgroup_hierarchy=0``: hierarchies of version 1 beside version 2.

    Linux 6.12 can be built without the memory controller of version 1, and Debian's is.
    """
    top = "/sys/fs/cgroup"
    with ExitStack() as stack:
        _unmount(top)
        stack.callback(_mount, "cgroup2", top)
        _mount("tmpfs", top)
        stack.callback(_unmount, top)
        for kind, name, options in (
            ("cgroup", "cpu,cpuacct", "cpu,cpuacct"),
            ("cgroup", "systemd", "none,name=systemd"),
            ("cgroup2", "unified", ""),
        ):
            _mount(kind, f"{top}/{name}", options)
            stack.callback(_unmount, f"{top}/{name}")
        yield


_PARANOID: Final = "/proc/sys/kernel/perf_event_paranoid"
_YAMA: Final = "/proc/sys/kernel/yama/ptrace_scope"
Setting = Callable[[], AbstractContextManager[None]]
# In this order: the last two cannot be taken back.
_ALL_SETTINGS: Final[Mapping[str, Setting]] = {
    **{
        f"perf_event_paranoid={level}": partial(_write, _PARANOID, str(level))
        for level in (-1, 2, 3, 4)
    },
    **{f"yama={scope}": partial(_write, _YAMA, str(scope)) for scope in (0, 2)},
    "no tracefs": _without_tracefs,
    "/sys read-only": partial(_remounted, "sysfs", "/sys", options="", back="", is_read_only=True),
    "hidepid=2": partial(
        _remounted, "proc", "/proc", options="hidepid=2", back="hidepid=0", is_read_only=False
    ),
    "hybrid cgroups": _hybrid_cgroups,
    "unprivileged_bpf_disabled=2": partial(
        _write, "/proc/sys/kernel/unprivileged_bpf_disabled", "2"
    ),
    "lockdown=integrity": partial(_write_for_good, "/sys/kernel/security/lockdown", "integrity"),
    "yama=3": partial(_write_for_good, _YAMA, "3"),
}
# What they do is in parts of the kernel that no processor changes, and each takes an emulated arm64 some minutes.
SETTINGS: Final = _ALL_SETTINGS if platform.machine() == "x86_64" else {}


def check_setting(name: str) -> str:
    """Under this setting root traces a program exactly, and `ingero check` says so beforehand."""
    with SETTINGS[name]():
        return _compare_promise()
