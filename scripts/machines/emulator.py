"""QEMU: taken from Debian's packages into the cache, and run without KVM, installation or root."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scripts.machines.catalog import Machine
from scripts.machines.fetch import Apt, run_tool
from scripts.machines.image import Image

# Its QEMU is 10: the release's own, 7.2, breaks kernels that use cmpxchg16b, and is slower.
SUITE: Final = "bookworm-backports"
_PACKAGES: Final = ("qemu-system-x86", "qemu-system-arm", "seabios")
_LOADERS: Final = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
_MEMORY: Final = "4G"
_CPUS: Final = "2"
_TAIL_LINES: Final = 40
_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Faults of processors are no matter here, and their mitigations are slow to emulate, as is clearing each page a second
# time; `quiet` keeps the kernel's lines out of those of the checks.
_COMMAND_LINE: Final = "rdinit=/init panic=-1 mitigations=off init_on_alloc=0 quiet loglevel=3"
_BOARDS: Final = {
    # Five levels of page tables, vectors of variable length: slow to emulate, and nothing here asks for them.
    "x86_64": ("-M", "pc", "-cpu", "max,la57=off"),
    # Pointer authentication with QEMU's quick cipher instead of the architecture's.
    "aarch64": ("-M", "virt,gic-version=3", "-cpu", "max,pauth-impdef=on,sve=off"),
}
_CONSOLES: Final = {"x86_64": "ttyS0", "aarch64": "ttyAMA0"}


def fetch_emulator(cache: Path, apt: Apt) -> Path:
    """A folder with QEMU and the libraries that it needs, unpacked.

    Raises:
        FetchError: A package could not be fetched.
    """
    packages = apt.resolve(*_PACKAGES, suite=SUITE)
    version = next(one.version for one in packages if one.name == _PACKAGES[0])
    folder = cache / "emulator" / re.sub(r"[^\w.+-]", "_", version)
    if folder.exists():
        return folder
    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    for file in apt.download(packages):
        run_tool(["dpkg-deb", "-x", str(file), str(made)], file.name)
    made.rename(folder)
    return folder


def build_command(
    emulator: Path, machine: Machine, image: Image, checks: Sequence[str] = ()
) -> list[str]:
    """How to run a machine: the emulator under its own loader and C library, whatever this host has.

    Args:
        emulator: Where it was unpacked.
        machine: What to run.
        image: Its kernel and its files.
        checks: Patterns of the checks to run; all without any.
    """
    host = platform.machine()
    words = " ".join((machine.checks, *checks))
    triplet = f"{host}-linux-gnu"
    libraries = [emulator / "lib" / triplet, emulator / "usr/lib" / triplet]
    return [
        next(str(path) for path in emulator.glob(f"lib*/{_LOADERS[host]}")),
        *("--library-path", ":".join(map(str, libraries))),
        str(emulator / "usr/bin" / f"qemu-system-{machine.arch}"),
        *("-L", str(emulator / "usr/share/seabios"), "-L", str(emulator / "usr/share/qemu")),
        *_BOARDS[machine.arch],
        *("-accel", "tcg,thread=multi,tb-size=512", "-smp", _CPUS, "-m", _MEMORY),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", f"console={_CONSOLES[machine.arch]} {_COMMAND_LINE} -- {words}"),
    ]


class Guest:
    """A machine that runs; its console is read line by line.

    Args:
        command: How to run it.
        modules: Where QEMU's own modules are.
        limit_s: It is stopped after so many seconds.
    """

    def __init__(self, command: list[str], modules: Path, limit_s: float) -> None:
        self._command = command
        self._modules = modules
        self._limit_s = limit_s
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.was_stopped = False

    @property
    def tail(self) -> list[str]:
        """The last lines of its console."""
        return list(self._tail)

    def iter_lines(self) -> Iterator[str]:
        """Run it; yields the lines of its console until it is off or was stopped."""
        # A guest that nobody reads any more would keep a processor for good.
        with subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *self._command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"QEMU_MODULE_DIR": str(self._modules), "PATH": "/usr/bin:/bin"},
        ) as process:

            def stop() -> None:
                self.was_stopped = True
                process.kill()

            timer = threading.Timer(self._limit_s, stop)
            timer.start()
            try:
                assert process.stdout is not None
                for raw in process.stdout:
                    line = _ESCAPES.sub("", raw.decode(errors="replace")).rstrip()
                    self._tail.append(line)
                    yield line
            finally:
                timer.cancel()
                process.kill()


def find_modules(emulator: Path) -> Path:
    """Where QEMU's own modules lie."""
    return emulator / "usr/lib" / f"{platform.machine()}-linux-gnu/qemu"
