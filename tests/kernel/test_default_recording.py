"""What a recording with default options says is what happened: the rank that hangs, the counts, a leak."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel

INGERO = (sys.executable, "-m", "ingero")
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
OF_OTHERS = {"runnable_wait", "preemption", "noisy_neighbour"}
"""What other tasks of a busy machine do to any program."""
QUANTILES = ("p50", "p95", "p99")
ONE_BUCKET = 1.25
"""Four buckets an octave: an edge is at most a quarter above the one before."""


def run(*arguments):
    result = subprocess.run(
        [*INGERO, *map(str, arguments)], capture_output=True, text=True, env=PLAIN, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def explain(database):
    return json.loads(run("explain", "--db", database, "--json"))["incidents"]


def find_rank(pids, rank):
    """The process whose environment says that it is this rank."""
    wanted = f"RANK={rank}".encode()
    found = [
        pid for pid in pids if wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    assert len(found) == 1
    return found[0]


def find_ranks(database, n_collectives):
    """Processes with so many collectives in a recording that is being written; none before that."""
    if not database.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        try:
            found = connection.execute(
                "SELECT pid, count(*) FROM events WHERE source = 9 GROUP BY pid"
            ).fetchall()
        except sqlite3.OperationalError:  # its tables are not there yet
            return []
    return [pid for pid, n_rows in found if n_rows >= n_collectives]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stopped_rank_is_named_and_nobody_else(tmp_path, rank):
    database = tmp_path / "d.db"
    command = ("trace", "--db", database, "-d", "11s", "--", *INGERO, "sim", "run", "ranks", "--ranks", "3",
               "steps=100000")  # fmt: skip
    with subprocess.Popen(
        [*INGERO, *map(str, command)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=PLAIN,
    ) as tracer:
        pause = threading.Event()
        while len(pids := find_ranks(database, 300)) < 3:
            assert tracer.poll() is None
            pause.wait(0.1)
        stopped = find_rank(pids, rank)
        os.kill(stopped, signal.SIGSTOP)
        assert tracer.wait() == 0
    incidents = explain(database)
    (hang,) = (one for one in incidents if one["rule"] == "collective_hang")
    assert {one["rule"] for one in incidents if one is not hang} <= OF_OTHERS
    assert (hang["rule"], hang["severity"], hang["pid"]) == ("collective_hang", "HIGH", stopped)
    assert re.match(
        rf"Hang: rank {rank} (did not enter|was stopped inside) ncclAllReduce number", hang["title"]
    )
    assert hang["coverage"]["state"] == "exact"


def test_statistics_of_a_recording_are_those_of_its_trace(tmp_path):
    database = tmp_path / "d.db"
    out = run(
        "trace", "--db", database, "--json", "--", *INGERO, "sim", "run", "train", "steps=700"
    )
    counted = {
        (line["pid"], line["source"], line["op"]): line
        for line in map(json.loads, out.splitlines())
        if line["type"] == "counts"
    }
    told = {
        (line["pid"], line["source"], line["op"]): line
        for line in json.loads(run("explain", "--db", database, "--per-process", "--json"))
        if not line["op"].startswith("process_")  # facts, which no probe counts
    }
    assert {key for key in counted if key[1] in {"cuda", "driver"}} <= told.keys()
    for key, line in told.items():
        exact = counted[key]
        assert line["count"] == exact["seen"], key
        assert line["total_ms"] * 1e6 == pytest.approx(exact["total_ns"], rel=0.02, abs=1000)
        for name in QUANTILES if exact["seen"] > 20 else ():
            theirs, ours = exact[f"{name}_ns"], line[f"{name}_us"] * 1e3
            assert theirs / ONE_BUCKET - 128 <= ours <= theirs * ONE_BUCKET + 128, (key, name)


def test_a_leak_is_proved_by_every_allocation_and_free(tmp_path):
    database = tmp_path / "d.db"
    # Over a second: growth is judged by quarters of the time, and a busy machine stops anybody for tens of milliseconds. Not
    # much longer: a busy machine has more rows beside these, and some 110 000 at once are kept whole.
    leak = (*INGERO, "sim", "run", "leak", "steps=6000", f"bytes={200 << 10}")
    run("trace", "--db", database, "--", *leak)
    incidents = explain(database)
    (leak,) = (one for one in incidents if one["rule"] == "memory_leak")
    assert leak["severity"] == "HIGH"
    assert "293 MiB in 1500 allocations" in leak["title"]
    assert leak["coverage"]["state"] == "exact"
