"""The look at one process that a diagnosis takes: probes of its own, and the time of every stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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


def check_look() -> str:
    """A process that is stopped half of the time is seen to be, and no switch is lost.

    Raises:
        CheckError: It is not.
    """
    command = [sys.executable, "-c", _SPIN]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as process,
        ThreadPoolExecutor(1) as beside,
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
            while not looking.done():
                process.send_signal(signal.SIGSTOP)
                start_ns = time.monotonic_ns()
                pause.wait(_PULSE_S)
                process.send_signal(signal.SIGCONT)
                stops.append((start_ns, time.monotonic_ns()))
                pause.wait(_PULSE_S)
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
    found, was = look.times.stopped_ns / window_ns, was_ns / window_ns
    if abs(found - was) > _TOLERANCE:
        raise CheckError(f"stopped for {found:.0%} of the time, and it was for {was:.0%}")
    if look.times.n_lost:
        raise CheckError(f"{look.times.n_lost} switches were lost")
    return f"stopped for {found:.0%} of the time, and it was for {was:.0%}"
