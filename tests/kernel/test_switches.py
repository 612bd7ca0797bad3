"""Every switch of one thread for a while: what stopped it, and nothing of other processes."""

import signal
import subprocess
import sys
import threading

import pytest

from ingero.agent.diagnosis.switches import watch_switches
from ingero.telemetry.clock import SystemClock

pytestmark = pytest.mark.kernel
SPIN = "print('spins', flush=True)\nwhile True: pass"


class Started(SystemClock):
    """Says when the probes are loaded: the second time that somebody asks for the time."""

    def __init__(self):
        self.n_asked = 0

    def mono_ns(self):
        self.n_asked += 1
        return super().mono_ns()


def test_time_that_a_process_was_stopped_is_told():
    clock, stop, found = Started(), threading.Event(), []
    with subprocess.Popen([sys.executable, "-c", SPIN], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            thread = threading.Thread(
                target=lambda: found.append(watch_switches(clock, process.pid, process.pid, stop))
            )
            thread.start()
            n_stops = 0
            while thread.is_alive():
                process.send_signal(signal.SIGSTOP)
                thread.join(0.05)
                process.send_signal(signal.SIGCONT)
                thread.join(0.05)
                n_stops += clock.n_asked >= 2
                if n_stops > 8:
                    stop.set()
        finally:
            process.kill()
    (look,) = found
    assert 0.2 < look.times.stopped_ns / (look.end_ns - look.start_ns) < 0.8
    assert look.times.n_lost == 0
    assert look.times.faults_ns == 0
