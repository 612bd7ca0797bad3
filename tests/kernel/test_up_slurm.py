"""`ingero up --slurm` as a user runs it: a real Slurm, a real torchrun job, real probes, a real remediator."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.slurm, pytest.mark.torch, pytest.mark.slow]
PROGRAM = "from ingero.cli.main import main; main()"
JOB = Path(__file__).resolve().parents[2] / "examples/jobs/ddp_checkpoint.py"
UP = [sys.executable, "-c", PROGRAM, "up", "--slurm", "--ranks", "4", "--job", str(JOB)]
LIMIT_S = 600


@pytest.mark.live
@pytest.mark.timeout(LIMIT_S)
def test_the_slow_ranks_node_is_drained_and_the_job_ends_on_the_spare_from_its_checkpoint():
    fault = ("--spares", "1", "--fault", "cpu-quota:2:50%", "--act", "auto")
    told = ("--echo", "--gpu-rate", "36")
    command = [*UP, "--json", *fault, *told, "--", "--steps", "450"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["culprits"] == [2]
    assert result["wrongly_named"] == []
    assert result["diagnosis"]["cause"] == "cpu-quota"
    assert result["drained"] == ["host-2"]
    (action,) = result["actions"]
    assert (action["target"], action["state"], action["jobs"]) == ("host-2", "done", {"1": 0})
    assert all(clause["met"] for clause in result["policy_clauses"])
    assert "findings.causes" in {clause["clause"] for clause in result["policy_clauses"]}
    assert result["requeued"]
    assert result["finished"]
    assert result["job"]["nodes"] == "host-[0-1,3-4]"
    assert result["last_step"] == 440
    savings, steps = result["savings"], result["step_ms"]
    assert savings["resumed_at_step"] > 100
    assert steps["during"] > steps["before"]
    assert steps["during"] > steps["after"]
    saved = 4 * (savings["would_have_taken_s"] - savings["took_s"])
    assert result["saved_gpu_seconds"] == pytest.approx(saved, abs=0.5)
    assert result["saved_amount"] == pytest.approx(result["saved_gpu_seconds"] / 100)
    told = result["echo"]  # it sees pushes, of which there is one in five seconds, and no steps
    assert (told["rank"], told["n_gpus"], told["currency"], told["unknown"]) == (2, 4, "USD", None)
    assert told["lost_gpu_seconds"] > 0
    # The fault, the drain and the first step again are each known to one push of five seconds, for four GPUs. The pace before
    # is that of the few seconds from the onset to the action, and Echo says how far it can be off.
    error = told["saved_standard_error_gpu_seconds"]
    assert 0 < error < 4 * savings["would_have_taken_s"] / 4
    assert told["saved_gpu_seconds"] == pytest.approx(saved, abs=4 * 3 * 5 + 3 * error)
    for line in ("Fleet names rank 2: culprit", "Slurm shows host-2 as drained", "job RUNNING on"):
        assert line in run.stderr


def find_leftovers(pid, folder):
    """What a run of that process left behind."""
    found = [path.name for path in Path("/run/netns").glob(f"ingero-{pid}-*")]
    found += [path.name for path in Path("/sys/class/net").glob(f"ig*{pid}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"**/ingero-{pid}-*")]
    found += [str(path) for path in folder.iterdir()]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                data = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder).encode() in data and process.name != str(os.getpid()):
                found.append(process.name)
    return found


@pytest.mark.timeout(LIMIT_S)
def test_ctrl_c_while_the_job_runs_leaves_nothing_of_slurm_or_the_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("u")
    process = subprocess.Popen(
        UP,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "job RUNNING on" in line:
            break
    assert len(find_leftovers(process.pid, folder)) > 20, "it looks for what is there"
    os.killpg(process.pid, signal.SIGINT)
    process.stderr.read()
    process.stderr.close()
    assert process.wait() == 130
    assert find_leftovers(process.pid, folder) == []
