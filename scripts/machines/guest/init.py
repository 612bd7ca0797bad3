#!/usr/bin/python3
"""The first process of a guest: mounts what Linux programs expect, runs the checks, and turns the machine off."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Final

_MOUNTS: Final = (
    ("proc", "/proc"),
    ("sysfs", "/sys"),
    ("devtmpfs", "/dev"),
    ("tmpfs", "/tmp"),  # noqa: S108 - the guest's own, made here
    ("tmpfs", "/run"),
    ("tmpfs", "/dev/shm"),  # noqa: S108
    ("devpts", "/dev/pts"),
    ("tracefs", "/sys/kernel/tracing"),
    ("debugfs", "/sys/kernel/debug"),
    ("bpf", "/sys/fs/bpf"),
    ("securityfs", "/sys/kernel/security"),
    ("cgroup2", "/sys/fs/cgroup"),
)
# Sources: linux/sockios.h, linux/if.h, linux/reboot.h, asm/unistd.h.
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP_RUNNING: Final = 0x41
_POWER_OFF: Final = 0x4321FEDC
_FINIT_MODULE: Final = {"x86_64": 313, "aarch64": 273}
_libc = ctypes.CDLL(None, use_errno=True)


def mount_all() -> None:
    """Mount every file system; one that the kernel does not have is left out."""
    for kind, where in _MOUNTS:
        Path(where).mkdir(parents=True, exist_ok=True)
        if _libc.mount(kind.encode(), where.encode(), kind.encode(), 0, None):
            print(f"init: {where}: {os.strerror(ctypes.get_errno())}", flush=True)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1")):
        if not Path("/dev", name).exists():
            Path("/dev", name).symlink_to(target)


def bring_up_loopback() -> None:
    """Bring ``lo`` up: ranks meet there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        fcntl.ioctl(one, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP_RUNNING))


def load_modules() -> None:
    """Load the modules that were put in, in their order."""
    number = _FINIT_MODULE[platform.machine()]
    for path in sorted(Path("/modules").glob("*.ko")):
        with path.open("rb") as module:
            if _libc.syscall(number, module.fileno(), b"", 0):
                print(f"init: {path}: {os.strerror(ctypes.get_errno())}", flush=True)


def run_checks() -> None:
    """The child: a session of its own, and the checks in place of itself."""
    os.setsid()
    os.chdir("/checks")
    environment = {"PATH": "/usr/bin:/usr/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
    command = ["python3", "-m", "scripts.machines.guest.checks", *sys.argv[1:]]
    os.execve("/usr/bin/python3", command, environment)  # noqa: S606


def main() -> None:
    """Prepare, run, wait for every process that is left without a parent, and end the machine."""
    mount_all()
    bring_up_loopback()
    load_modules()
    child = os.fork()
    if not child:
        run_checks()
    while os.wait()[0] != child:
        pass


try:
    main()
except BaseException:  # noqa: BLE001 - the kernel panics without a word when its first process ends
    traceback.print_exc()
finally:
    os.sync()
    _libc.reboot(ctypes.c_int(_POWER_OFF))
