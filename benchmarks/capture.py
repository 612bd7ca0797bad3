"""What `ingero trace` with its default options costs a job, and what it writes: the same job alone and traced, in turns."""

import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

SAYS = "a job under `ingero trace` with default options, over the same job alone; the tracer's CPU and memory; what is recorded"
ROUNDS = 3
BAR = 1.01
JOBS = (
    ("2 ranks, 200 collectives a second each", "ranks", 2, {"steps": 2600, "kernels": 20, "count": 1024}, 240_000),
    ("1 process, 20 000 launches a second", "train", 0, {"steps": 1300, "kernels": 200, "loader_us": 0, "batch_bytes": 4096}, 24_000),
    ("1 process, a step of 6 ms with 40 launches", "train", 0, {"steps": 2200, "loader_us": 500, "kernels": 40, "batch_bytes": 4096}, 65_000),
)  # fmt: skip
"""What it is called, the workload, its ranks and knobs, and how long a kernel takes in ns. Longer than the ten seconds in which every record is stored."""
_SAMPLE_S = 0.1
_JOB = """
import json, sys
from ingero.sim.runner import SimSettings, Simulation
name, n_ranks, knobs, kernel_ns = json.loads(sys.argv[1])
with Simulation(SimSettings(name, knobs, n_ranks, {"KERNEL_NS": kernel_ns})) as simulation:
    for account in simulation.wait():
        print(json.dumps(account))
"""


def run():
    if os.geteuid():
        yield "   not measured: probes need root"
        return
    for description, *job in JOBS:
        yield from _compare(description, job)


def _compare(description, job):
    job = [sys.executable, "-c", _JOB, json.dumps(job)]
    bare, traced, seen = [], [], []
    for _ in range(ROUNDS):
        bare.append(_elapsed_ns(_run(job)[0]))
        with tempfile.TemporaryDirectory() as folder:
            database = Path(folder) / "r.db"
            command = [sys.executable, "-m", "ingero", "trace", "--db", str(database), "--", *job]
            out, usage = _run(command)
            traced.append(_elapsed_ns(out))
            seen.append((*usage, *_read_recording(database), _size(folder)))
    seconds = statistics.median(traced) / 1e9
    ratios = [with_it / without for with_it, without in zip(traced, bare, strict=True)]
    cpu_s, peak_mib, n_calls, n_rows, n_bytes = (
        statistics.median(values) for values in zip(*seen, strict=True)
    )
    yield f"   {description}: {statistics.median(bare) / 1e9:.2f} s alone"
    yield (
        f"     × {statistics.median(ratios):.4f} traced ({min(ratios):.4f} to {max(ratios):.4f} over {ROUNDS} pairs; bar {BAR})"
    )
    yield (
        f"     tracer: {cpu_s:.2f} s CPU with start and end, {100 * cpu_s / seconds:.1f} % of a core, at most {peak_mib} MiB;"
        f" {n_calls / seconds:.0f} calls/s of the job counted, {n_rows / seconds:.0f} rows/s and {n_bytes / seconds / 1000:.0f} kB/s stored"
    )


def _run(command):
    """Standard output, and CPU seconds and peak MiB of the process itself without its children."""
    last = [0.0, 0]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        is_over = threading.Event()
        watcher = threading.Thread(target=_watch, args=(process.pid, is_over, last))
        watcher.start()
        out = process.stdout.read()
        is_over.set()
        watcher.join()
    return out, tuple(last)


def _watch(pid, is_over, last):
    """Look until the process ends: what it has used is gone then."""
    while not is_over.wait(_SAMPLE_S):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        peaks = [line for line in status.splitlines() if line.startswith("VmHWM")]
        if peaks:
            last[:] = [cpu_s, int(peaks[0].split()[1]) >> 10]


def _elapsed_ns(out):
    """How long the slowest process of the job ran, as it says itself."""
    lines = [line for line in out.splitlines() if line.startswith('{"workload"')]
    return max(json.loads(line)["elapsed_ns"] for line in lines)


def _read_recording(path):
    """Calls counted and rows stored, of processes that made GPU calls."""
    with sqlite3.connect(path) as connection:
        mine = "(SELECT pid FROM event_aggregates WHERE source IN (1, 4, 9))"
        (n_calls,) = connection.execute(
            f"SELECT sum(count) FROM event_aggregates WHERE pid IN {mine} AND op <> 3 OR source <> 3"
        ).fetchone()
        (n_rows,) = connection.execute("SELECT count(*) FROM events").fetchone()
    return n_calls, n_rows


def _size(folder):
    return sum(file.stat().st_size for file in Path(folder).iterdir())
