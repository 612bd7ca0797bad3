"""The look at one process that a diagnosis takes: probes of its own, and the time of every stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from scripts.machines.guest.running import CheckError

from ingero.agent.diagnosis.switches import watch_switches
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

_SPIN: Final = "print(flush=True)\nwhile True: pass"
_WATCH_NS: Final = 4 * NS_PER_S
_PULSE_S: Final = 0.1
_MIN_SHARE: Final = 0.2
_MAX_SHARE: Final = 0.8


def check_look() -> str:
    """A process that is stopped half of the time is seen to be, and nothing of it is lost.

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
            pause = threading.Event()
            while not looking.done():
                process.send_signal(signal.SIGSTOP)
                pause.wait(_PULSE_S)
                process.send_signal(signal.SIGCONT)
                pause.wait(_PULSE_S)
            look = looking.result()
        finally:
            process.kill()
    if look is None:
        raise CheckError("no switch can be seen here")
    share = look.times.stopped_ns / (look.end_ns - look.start_ns)
    if not _MIN_SHARE < share < _MAX_SHARE:
        raise CheckError(f"stopped for {share:.0%} of the time, of about half")
    if look.times.n_lost:
        raise CheckError(f"{look.times.n_lost} switches were lost")
    return f"stopped for {share:.0%} of the time, as it was"
