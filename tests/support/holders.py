"""What stops a process and lets it go on: signals, and the freezer of a cgroup of either version."""

import signal
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from ingero.testing.waiting import wait_until


class Freezer:
    """A cgroup of one version.

    Args:
        folder: Its folder.
        version: Which.
    """

    def __init__(self, folder, version):
        self.folder = folder
        file, self._held, self._free = {
            "1": ("freezer.state", "FROZEN", "THAWED"),
            "2": ("cgroup.freeze", "1", "0"),
        }[version]
        self._control = folder / file
        self._shown = folder / {"1": "freezer.state", "2": "cgroup.events"}[version]
        self._line = {"1": "FROZEN", "2": "frozen 1"}[version]

    def take(self, pid):
        """Put a process into it."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def hold(self):
        """Freeze what is in it, and wait until that is so."""
        self._control.write_text(self._held)
        wait_until(lambda: self._line in self._shown.read_text().splitlines())

    def release(self):
        """Let it go on."""
        self._control.write_text(self._free)


@contextmanager
def open_freezer(version, name):
    """A cgroup of its own, which is empty again at the end of the context."""
    kind, option = {"1": ("cgroup", "freezer"), "2": ("cgroup2", "")}[version]
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [one[1] for one in mounts if one[2] == kind and option in ("", *one[3].split(","))]
    if not found:
        pytest.skip(f"no hierarchy of cgroup version {version} with a freezer is mounted")
    freezer = Freezer(Path(found[0]) / name, version)
    freezer.folder.mkdir()
    try:
        yield freezer
    finally:
        with suppress(OSError):
            freezer.release()
        wait_until(lambda: not (freezer.folder / "cgroup.procs").read_text())
        freezer.folder.rmdir()


@contextmanager
def by_signal(process):
    """What stops a process, and what lets it go on; it is killed at the end of the context."""
    try:
        yield (
            lambda: process.send_signal(signal.SIGSTOP),
            lambda: process.send_signal(signal.SIGCONT),
        )
    finally:
        process.kill()
        process.wait()


@contextmanager
def by_freezer(process, version):
    """The same by a freezer."""
    with open_freezer(version, f"ingero-test-{process.pid}") as freezer:
        freezer.take(process.pid)
        try:
            yield freezer.hold, freezer.release
        finally:
            freezer.release()
            process.kill()
            process.wait()


HOLDERS = [
    pytest.param(by_signal, id="signal"),
    *(
        pytest.param(
            partial(by_freezer, version=one),
            id=f"freezer of version {one}",
            marks=pytest.mark.kernel,
        )
        for one in ("1", "2")
    ),
]
