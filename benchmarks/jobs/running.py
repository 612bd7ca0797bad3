"""Runs one job through `ingero up` and keeps its recording and what came of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
START_LIMIT_S = 270
"""Beyond this and its watch a run is ended and counted as failed: start 180 s at most, and the end."""
KEPT = (
    "culprits",
    "missing_ranks",
    "wrongly_named",
    "detection_s",
    "watched_s",
    "kept_waiting",
    "diagnosis",
)


def run_one(run, folder, settings, python):
    """What came of a run, as kept in ``NAME.json`` beside its recording ``NAME.parquet``."""
    limit_s = START_LIMIT_S + run.watch_s
    command = [sys.executable, "-m", "ingero", "up", "--json", "--ranks", str(settings["ranks"])]
    command += ["--job", str(run.script), "--fault", run.fault, "--seconds", str(run.watch_s)]
    command += ["--record", str(folder / f"{run.name}.parquet"), "--force"]
    command += ["--python", python] if python else []
    command += ["--", *run.arguments] if run.arguments else []
    load, began = os.getloadavg()[0], time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        said, log = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        said, log = end(process), f"not over after {limit_s} s"
    except BaseException:
        end(process)
        raise
    outcome = {
        "job": run.job,
        "fault": run.fault,
        "arguments": list(run.arguments),
        "seed": run.seed,
        "took_s": round(time.monotonic() - began, 1),
        "revision": read_revision(),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }
    if process.returncode:
        outcome["failed"] = log.strip().splitlines()[-3:]
    else:
        result = json.loads(said)
        outcome |= {key: result[key] for key in KEPT}
        outcome["verdicts"] = {str(v["rank"]): v["verdict"] for v in result["verdicts"]}
    path = folder / f"{run.name}.json"
    path.with_suffix(".part").write_text(json.dumps(outcome, indent=1) + "\n")
    path.with_suffix(".part").rename(path)
    return outcome


def read_revision():
    """Which version of this repository ran, as git names it; runs that go on later may be of another."""
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        asked, capture_output=True, text=True, check=False, cwd=HERE
    ).stdout.strip()


def end(process):
    """End `ingero up` in a way in which it removes everything that it made; returns nothing said."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    return ""
