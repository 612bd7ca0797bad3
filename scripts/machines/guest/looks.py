"""The look at one process that a diagnosis takes: probes of its own, and the time of every stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.machines.guest.running import CheckError

from ingero.agent.diagnosis.switches import watch_switches
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

_SPIN: Final = "print(flush=True)\nwhile True: pass"
_WATCH_NS: Final = 4 * NS_PER_S
_PULSE_S: Final = 0.1
_TOLERANCE: Final = 0.25
"""Of the time: a signal takes effect a while after it was sent, in an emulated machine more so."""


_ATTEMPTS: Final = 8
_LONGEST_PULSE_S: Final = 0.2
"""On average: where they last longer, the whole machine stood still, and what was seen says nothing about the look."""
_GROUP: Final = Path("/sys/fs/cgroup/frozen")
_Holder = tuple[Callable[[], object], Callable[[], object]]


@contextmanager
def _hold_by_signal(process: subprocess.Popen[bytes]) -> Iterator[_Holder]:
    """What stops a process, and what lets it go on."""
    yield (
        lambda: process.send_signal(signal.SIGSTOP),
        lambda: process.send_signal(signal.SIGCONT),
    )


@contextmanager
def _hold_by_freezer(process: subprocess.Popen[bytes]) -> Iterator[_Holder]:
    """The same by the freezer of a cgroup of version 2, as `docker pause` does it."""
    _GROUP.mkdir()
    (_GROUP / "cgroup.procs").write_text(str(process.pid), encoding="ascii")
    control = _GROUP / "cgroup.freeze"
    try:
        yield (
            lambda: control.write_text("1", encoding="ascii"),
            lambda: control.write_text("0", encoding="ascii"),
        )
    finally:
        process.kill()
        process.wait()
        _GROUP.rmdir()


_HOLDERS: Final = {"stopped": _hold_by_signal, "frozen": _hold_by_freezer}


@dataclass(frozen=True, slots=True)
class _Looked:
    """One look at a process that is stopped half of the time.

    Attributes:
        found: Share of the time for which the look says that it was stopped.
        was: Share for which it was.
        n_lost: Switches that the look has lost.
        pulse_s: How long a pulse lasted, of `_PULSE_S`; mean.
    """

    found: float
    was: float
    n_lost: int
    pulse_s: float


def check_look() -> str:
    """A process that is stopped half of the time is seen to be, by a signal and by a freezer, and no switch is lost.

    Raises:
        CheckError: It is not.
    """
    return "; ".join(_check(how) for how in _HOLDERS)


def _check(how: str) -> str:
    looks = (_look(how) for _ in range(_ATTEMPTS))
    looked = next((one for one in looks if one.pulse_s <= _LONGEST_PULSE_S), None)
    if looked is None:
        raise CheckError(
            f"in each of {_ATTEMPTS} looks pulses of {_PULSE_S} s lasted twice as long: "
            "give the machine more of a processor"
        )
    if looked.n_lost:
        raise CheckError(f"{looked.n_lost} switches were lost")
    said = f"{how} for {looked.found:.0%} of the time, and it was for {looked.was:.0%}"
    if abs(looked.found - looked.was) > _TOLERANCE:
        raise CheckError(said)
    return said


def _look(how: str) -> _Looked:
    command = [sys.executable, "-c", _SPIN]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        ThreadPoolExecutor(1) as beside,
        _HOLDERS[how](process) as (hold, release),
    ):
        try:
            assert process.stdout is not None
            process.stdout.readline()
            looking = beside.submit(
                watch_switches,
                SystemClock(),
                process.pid,
                process.pid,
                threading.Event(),
                lambda start_ns, now_ns: now_ns - start_ns >= _WATCH_NS,
            )
            pause, stops = threading.Event(), []
            began_s, n_pulses = time.monotonic(), 0
            while not looking.done():
                hold()
                start_ns = time.monotonic_ns()
                pause.wait(_PULSE_S)
                release()
                stops.append((start_ns, time.monotonic_ns()))
                pause.wait(_PULSE_S)
                n_pulses += 2
            pulse_s = (time.monotonic() - began_s) / max(n_pulses, 1)
            look = looking.result()
        finally:
            process.kill()
    if look is None:
        raise CheckError("no switch can be seen here")
    window_ns = look.end_ns - look.start_ns
    was_ns = sum(
        max(min(end_ns, look.end_ns) - max(start_ns, look.start_ns), 0)
        for start_ns, end_ns in stops
    )
    return _Looked(
        look.times.stopped_ns / window_ns, was_ns / window_ns, look.times.n_lost, pulse_s
    )
