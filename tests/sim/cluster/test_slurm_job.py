"""What is given to Slurm, and what is read of it and of the job's log."""

import subprocess
from pathlib import Path

import pytest

from ingero.errors import BadDataError
from ingero.sim.cluster.slurm_job import find_failure, find_steps, parse_job, write_script
from ingero.sim.cluster.torch_job import JobFile

RUNNING = (
    "JobId=1 JobName=job.sh UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=1"
    " BatchFlag=2 ReqNodeList=(null) ExcNodeList=(null) NodeList=host-[0-1,3-4] BatchHost=host-0 NumNodes=4"
)


def test_a_job_is_read_from_scontrol():
    job = parse_job(RUNNING)
    assert (job.name, job.n_restarts, job.nodes) == ("RUNNING", 1, "host-[0-1,3-4]")
    assert not job.is_over
    assert parse_job(RUNNING.replace("RUNNING", "COMPLETED")).is_over
    waiting = "JobId=1 JobState=PENDING Reason=BeginTime Restarts=1 NodeList=(null)"
    assert parse_job(waiting).nodes == ""
    with pytest.raises(BadDataError):
        parse_job("slurm_load_jobs error: Invalid job id specified")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("step 120 loss 0.31", [120]),
        ("[rank0] epoch 1 step=7, loss=0.3", [7]),
        ("Step: 12/100", [12]),
        ("slurmstepd-host-0: error: *** STEP 1.0 ON host-0 CANCELLED ***", []),
        ("srun: launch/slurm: _step_signal: Terminating StepId=1.0", []),
        ("no steps 5", []),
    ],
)
def test_steps_are_found_in_lines_of_a_training_log(line, expected):
    assert find_steps(f"{line}\n") == expected


def test_a_script_gives_torchrun_the_file_and_its_arguments_as_they_are(tmp_path):
    """The script runs; srun, scontrol and torchrun's interpreter are programs that say what they were given."""
    tools = {
        "scontrol": 'case "$2" in hostnames) echo h7; echo h8;; *) echo "NodeName=$3 NodeAddr=10.0.0.7 Port=1";; esac',
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
        "python": 'echo "$MASTER_ADDR"; printf "%s\\n" "$@"',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    file = JobFile(tmp_path / "python", Path("/a b/train.py"), ("--name", "it's $HOME"))
    script = tmp_path / "job.sh"
    script.write_text(write_script(file, 2, tmp_path))
    told = subprocess.run(
        ["sh", str(script)],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "SLURM_JOB_NODELIST": "h[7-8]",
            "SLURM_NNODES": "2",
            "SLURM_NODEID": "1",
            "SLURM_JOB_ID": "5",
        },
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert told[0] == "10.0.0.7"
    assert told[1:3] == ["-m", "torch.distributed.run"]
    given = dict(zip(told[3:13:2], told[4:14:2], strict=True))
    assert given["--nnodes"] == "2"
    assert given["--node-rank"] == "1"
    assert given["--rdzv-id"] == "5"
    assert told[-3:] == ["/a b/train.py", "--name", "it's $HOME"]


FAILED = [
    "step 1590 loss 2.100",
    "[rank1]: Traceback (most recent call last):",
    "[rank1]: RuntimeError: it broke",
    "[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:45769.",
    "E1124 20:09:05.254000 23788 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1",
    *["File api.py, line 1018, in run"] * 20,
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 9 got signal: 15",
]


def test_a_failed_job_is_told_by_the_error_that_came_first_and_not_by_ranks_that_srun_ended():
    said = find_failure(FAILED)
    assert said[0] == "[rank1]: RuntimeError: it broke"
    assert said[1:] == FAILED[3:5]
    assert find_failure(FAILED[:1] + FAILED[-8:]) == FAILED[-8:], "nothing else was said"
    crashed = [FAILED[4].replace("exitcode: 1", "exitcode: -6"), *FAILED[5:]]
    assert find_failure(crashed) == crashed[:1]
