"""`ingero explain` on a recording of a million events, against Python's fetching their integers from SQLite row by row.

Bars: 3 s and 500 MB, whole process.
"""

import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import Loop
from ingero.recording.store.settings import WriterSettings
from ingero.recording.store.writer import RecordingWriter

SAYS = "explain a recording of a million events"
N_STEPS = 400
# VmHWM starts anew at exec; ru_maxrss would still hold the parent's peak.
CHILD = """
import sys
from ingero.cli.main import cli, run_program
status = run_program(cli)
lines = open("/proc/self/status").read().splitlines()
print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), file=sys.stderr)
sys.exit(status)
"""


def write_recording(path: Path, n_events: int) -> None:
    """Repeat a healthy loop with disk reads and waits until there are enough rows."""
    built = RecordingBuilder()
    Loop(built).steps(N_STEPS)
    events = built.events()
    period_ns = int((events["start_ns"] + events["duration_ns"]).max()) - START_NS
    n_repeats = -(-n_events // len(events))
    with RecordingWriter(path, "node-0", WriterSettings(queue_rows=10 * n_events)) as writer:
        for i in range(n_repeats):
            batch = events.copy()
            batch["start_ns"] += i * period_ns
            writer.put_events(batch[: n_events - i * len(events)])
        writer.put_process_names({4821: "train"}, START_NS)


def fetch_seconds(path: Path) -> float:
    """What Python needs for the same integers, row by row, into one array."""
    began = time.perf_counter()
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    columns = "timestamp, duration, pid, tid, source, op, arg0, arg1"
    rows = connection.execute(f"SELECT {columns} FROM events").fetchall()
    np.array(rows, np.int64)
    connection.close()
    return time.perf_counter() - began


def run():
    n_events = 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "r.db"
        began = time.perf_counter()
        write_recording(path, n_events)
        written = time.perf_counter() - began
        yield f"write      {written:.2f} s for {n_events} events ({n_events / written:,.0f} rows/s)"
        fetched = fetch_seconds(path)
        yield f"fetch      {fetched:.2f} s (the same integers into one array, row by row)"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        ran = subprocess.run(
            [sys.executable, "-c", CHILD, "explain", "--db", str(path), "--json"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        explained = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield f"explain    {explained:.2f} s wall, {cpu:.2f} s CPU (bar 3 s); {explained / fetched:.2f} x fetching"
    yield f"memory     {int(ran.stderr) / 1024:.0f} MB at its peak (bar 500 MB)"
