"""CPU and memory of `ingero trace` itself, as a process of its own, while another makes ten thousand launches a second."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SAYS = "the agent's own CPU and memory at 10 000 launches a second, and how long it takes to load"
WARM_S, MEASURED_S, EVERYTHING_S = 4, 5, 10
BAR_PCT = 2.0
KNOBS = {"steps": 1_000_000, "kernels": 10, "loader_us": 300, "slow_from": 1 << 32}


def run():
    from ingero.errors import UnsupportedError

    try:
        yield from _load_times()
        yield _measure("counts only", "--no-record")
        yield from _measure_recording()
    except UnsupportedError as error:
        yield f"   not measured: {error.message}"


def _load_times():
    from ingero.agent.capture.session import TraceSession, TraceSettings
    from ingero.sim.runner import get_program

    files = tuple(sorted(get_program().parent.glob("lib*")))
    began = time.monotonic()
    with TraceSession(TraceSettings(files=files), ()) as session:
        spent_ms = 1e3 * (time.monotonic() - began)
        n_probes = sum(len(target.probes) for target in session.engine.targets)
    yield f"   load every object, attach {n_probes} functions and scan /proc: {spent_ms:.0f} ms (bar 1000)"


def _measure_recording():
    with tempfile.TemporaryDirectory() as folder:
        recording = ("--db", str(Path(folder) / "cpu.db"))
        yield _measure("recording every record of the first ten seconds", *recording)
        yield _measure("recording after that", *recording, warm_s=EVERYTHING_S)


def _measure(description, *options, warm_s=WARM_S):
    """One trace; its CPU between the warm-up and the end, from /proc."""
    from ingero.sim.runner import SimSettings, Simulation

    command = [sys.executable, "-m", "ingero", "trace", *options]
    with (
        Simulation(SimSettings("train", KNOBS)) as simulation,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as trace,
    ):
        time.sleep(warm_s)
        began, began_cpu = time.monotonic(), _cpu_s(trace.pid)
        time.sleep(MEASURED_S)
        share = (_cpu_s(trace.pid) - began_cpu) / (time.monotonic() - began)
        peak = _status_mib(trace.pid)
        trace.send_signal(signal.SIGINT)
        table = trace.communicate()[0].decode()
        del simulation
    launches = next((line.split()[1] for line in table.splitlines() if "cudaLaunch" in line), "0")
    seconds = warm_s + MEASURED_S
    return (
        f"   {description}: {100 * share:.2f} % of a core (bar {BAR_PCT}) at about"
        f" {int(launches) / seconds:.0f} launches/s; {peak}"
    )


def _cpu_s(pid):
    """User and system time of all threads of a process (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_mib(pid):
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    now, most = (int(lines[name].split()[0]) >> 10 for name in ("VmRSS", "VmHWM"))
    return f"{now} MiB resident, at most {most}"
