"""`ingero up --slurm --act auto` again and again: the right node, no other, and a job that comes to its end.

Environment: ``INGERO_BENCH_RUNS`` (1; a run takes about two minutes), ``INGERO_BENCH_TWIN`` (without-fault, or
without-action: run the job once more each time, to see how far the estimate is off), ``INGERO_BENCH_STEPS`` (of the job:
two runs differ by some per cent of a step, so that a twin of fewer steps tells more), ``INGERO_BENCH_OUT`` (a file for
each run's result, one JSON object a line), ``INGERO_TORCH_PYTHON`` (an interpreter that has torch).
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from ingero.sim.cluster.slurm import why_no_slurm

SAYS = "the whole story: 20 of 20 runs drain the right node and none other, and the job finishes; estimates within 10 %"
JOB = Path(__file__).parents[1] / "examples/jobs/ddp_checkpoint.py"
SLOW, LIMIT_S = 2, 900


def tell(twin):
    """One run's result; what it wrote to standard error where it failed."""
    command = [sys.executable, "-m", "ingero", "up", "--slurm", "--ranks", "4", "--spares", "1"]
    command += ["--job", str(JOB), "--fault", f"cpu-quota:{SLOW}:50%", "--act", "auto", "--json"]
    command += ["--twin", twin] if twin else []
    python = os.environ.get("INGERO_TORCH_PYTHON")
    command += ["--python", python] if python else []
    steps = os.environ.get("INGERO_BENCH_STEPS")
    command += ["--", "--steps", steps] if steps else []
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if run.returncode:
        return {"failed": run.stderr[-2000:]}
    return json.loads(run.stdout)


def is_right(result):
    return (
        result.get("culprits") == [SLOW]
        and result["wrongly_named"] == []
        and result["drained"] == [f"host-{SLOW}"]
        and result["requeued"]
        and result["finished"]
    )


def describe(result, twin):
    if "failed" in result:
        return f"FAILED: {result['failed'].strip().splitlines()[-1]}"
    cause = (result["diagnosis"] or {}).get("cause")
    description = (
        f"culprits {result['culprits']}, {cause}; drained {', '.join(result['drained']) or 'none'}"
    )
    description += f"; {'finished' if result['finished'] else 'NOT FINISHED'}; saved {result['saved_gpu_seconds']} GPU s"
    if twin:
        description += f"; {twin}: estimate off by {result['twins'][twin]['off_by_percent']} %"
    return description


def run():
    reason = why_no_slurm()
    if reason:
        yield f"   not measured: {reason}"
        return
    twin, out = os.environ.get("INGERO_BENCH_TWIN", ""), os.environ.get("INGERO_BENCH_OUT")
    results = []
    for number in range(int(os.environ.get("INGERO_BENCH_RUNS", "1"))):
        load = os.getloadavg()[0]
        results.append(tell(twin))
        if out:
            with Path(out).open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
        yield f"   {number + 1}: load {load:.1f}: {describe(results[-1], twin)}"
    n_right = sum(map(is_right, results))
    yield f"   {n_right} of {len(results)} runs: the right node and none other, requeued, finished"
    whole = [one for one in results if "failed" not in one]
    if whole:
        saved = [one["saved_gpu_seconds"] for one in whole]
        yield f"   saved: median {statistics.median(saved):.0f} GPU seconds, {min(saved):.0f} to {max(saved):.0f}"
    for way in ("verdict_to_drained", "cause_to_drained"):
        delays = [one["delays_s"][way] for one in whole if one["delays_s"][way] is not None]
        if delays:
            yield f"   {way}: median {statistics.median(delays):.1f} s, at most {max(delays):.1f} s"
    if twin and whole:
        off = [abs(one["twins"][twin]["off_by_percent"]) for one in whole]
        yield f"   estimate against {twin}: median {statistics.median(off):.1f} % off, at most {max(off):.1f} %"
        kind = "lost" if twin == "without-fault" else "saved"
        guessed, seen = (
            statistics.mean(one["twins"][twin][key] for one in whole)
            for key in ("estimated_gpu_seconds", f"{kind}_gpu_seconds")
        )
        yield f"   in the mean of all: estimated {guessed:.1f}, measured {seen:.1f} GPU seconds {kind}"
