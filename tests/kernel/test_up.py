"""`ingero up` as a user runs it: real namespaces, probes, pushes, Fleet. The GPUs are simulated."""

import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ingero.job_traces.readers import read_trace
from ingero.model.collectives import FULL_LIMIT
from ingero.units import NS_PER_S

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
PROGRAM = "from ingero.cli.main import main; main()"


def up(*arguments):
    """Run it and return its last JSON object."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, "up", "--json", "--push-interval", "1s", *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def leftovers(pid):
    """What a run of that process left behind."""
    found = [path.name for path in Path("/run/netns").glob(f"ingero-{pid}-*")]
    found += [path.name for path in Path("/sys/class/net").glob(f"ig*{pid}*")]
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                line = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if f'"up-{pid}"'.encode() in line:
                found.append(folder.name)
    return found


def find_children(pid):
    """A descriptor of each child process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return [os.pidfd_open(child) for child in found]


@contextmanager
def start_both(**runs):
    """Two runs at once: simulated ranks sleep most of the time, and the faults are far from what one costs the other."""
    with ThreadPoolExecutor(len(runs)) as pool:
        yield {
            name: pool.submit(up, *arguments, "--duration", "40s")
            for name, arguments in runs.items()
        }


@pytest.fixture(scope="module")
def slow():
    with start_both(
        rank=("--ranks", "4", "--fault", "slow-rank:1:1.5x"),
        link=("--ranks", "6", "--fault", "slow-link:3"),
    ) as runs:
        yield runs


@pytest.fixture(scope="module")
def hanging():
    with start_both(
        pause=("--ranks", "4", "--fault", "pause:2"), kill=("--ranks", "4", "--fault", "kill:2")
    ) as runs:
        yield runs


@pytest.mark.live
def test_slow_rank_is_named_and_the_others_are_its_victims(slow):
    result = slow["rank"].result()
    assert result["isolation"] == "network namespaces"
    assert result["culprits"] == [1]
    assert result["victims"] == [0, 2, 3]
    assert result["wrongly_named"] == []
    assert result["detection_s"] > 0


@pytest.mark.live
def test_slow_link_is_the_network_and_nobodys_own_work(slow):
    result = slow["link"].result()
    assert result["network"] == [2, 3]
    assert result["culprits"] == []
    assert result["wrongly_named"] == []
    assert result["diagnoses"].keys() == {"2", "3"}
    assert (result["diagnosis"]["rank"], result["diagnosis"]["cause"]) == (3, "network-delay")


@pytest.mark.live
@pytest.mark.parametrize(("kind", "cause"), [("pause", "stopped"), ("kill", "ended")])
def test_rank_that_stops_is_a_hang_of_that_rank_alone(kind, cause, hanging):
    result = hanging[kind].result()
    assert result["missing_ranks"] == [2]
    assert result["culprits"] == []
    (root,) = result["hang"]["roots"]
    assert root["cause"] == cause
    assert root["blocks"] == [0, 1, 3]
    if kind == "pause":  # of a process that ended there is nothing to look at
        assert (root["diagnosis"]["cause"], result["diagnosis"]["cause"]) == ("stopped", "stopped")
    else:
        assert root["diagnosis"] is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_no_process_namespace_or_link(number, status):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "up", "--ranks", "2", "--duration", "10m"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "warming up" in line:
            break
    assert leftovers(process.pid), "the test looks for what is there while it runs"
    os.killpg(process.pid, number)
    process.stderr.read()
    process.stderr.close()
    assert process.wait(120) == status
    assert leftovers(process.pid) == []


def test_killed_run_leaves_no_process_namespace_or_link():
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "up", "--ranks", "2", "--duration", "10m"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "warming up" in line:
            break
    children = find_children(process.pid)
    assert len(children) == 8, "Fleet, cleanup, store, two ranks, two agents, sink"
    assert leftovers(process.pid)
    process.kill()
    process.wait()
    process.stderr.close()
    for pidfd in children:
        ended, _, _ = select.select([pidfd], [], [], 30)
        os.close(pidfd)
        assert ended
    assert leftovers(process.pid) == []


JOBS = Path(__file__).resolve().parents[2] / "examples/jobs"


@pytest.mark.live
@pytest.mark.torch
def test_real_job_whose_disk_is_slow_is_told_by_its_rank_and_why():
    """A host that lacks processor time is in `test_up_slurm`."""
    path = JOBS / "ddp_files.py"
    result = up(
        "--ranks", "4", "--job", str(path), "--fault", "disk:1:1MB/s", "--duration", "60s"
    )  # fmt: skip
    assert result["job"] == str(path)
    assert result["probes"]
    assert {verdict["rank"] for verdict in result["verdicts"]} == {0, 1, 2, 3}
    assert result["culprits"] == [1]
    assert result["diagnosis"]["cause"] == "blocked-io", result["diagnosis"]
    assert result["diagnosis"]["causes"][0]["share"] > 0.5
    assert result["diagnosis"]["after_verdict_s"] < 15
    assert not list(Path("/sys/fs/cgroup").glob("**/ingero-*-2"))


@pytest.mark.live
@pytest.mark.torch
def test_real_job_that_is_slow_in_python_is_told_by_its_line_and_not_by_its_quota(tmp_path):
    recorded = tmp_path / "run.parquet"
    fault = ("--fault", "slow-python:2:40ms", "--duration", "60s", "--record", str(recorded))
    result = up("--ranks", "4", "--job", str(JOBS / "ddp.py"), *fault)
    assert result["culprits"] == [2]
    assert result["diagnosis"]["cause"] == "more-computing", result["diagnosis"]
    computing = result["diagnosis"]["causes"][0]
    assert computing["share"] > 0.5
    (lines,) = [fact for fact in computing["evidence"] if fact.startswith("running, of ")]
    assert lines.partition(": ")[2].startswith("inside.py:"), "the line at which it is most often"
    assert "compute_in_python" in lines
    used = [read_limit_use(recorded, rank) for rank in range(4)]
    assert used[2] > 0.8, used
    assert 0.1 < max(used[:2] + used[3:]) < 0.8, "the others have room: their hosts wait for it"


def read_limit_use(recorded, rank):
    """How much of its CPU limit a rank's host used in the last ten seconds of a recording."""
    runs = read_trace(recorded).runs[rank]
    entered = np.concatenate([run.ops["entry_ns"] for run in runs])
    used = np.concatenate([run.ops["limit_use"] for run in runs])
    return float(used[entered > entered.max() - 10 * NS_PER_S].mean()) / FULL_LIMIT


@pytest.mark.live
@pytest.mark.torch
def test_real_job_with_uneven_batches_names_nobody_and_says_that_they_compute_more():
    fault = ("--fault", "imbalance:2x", "--duration", "30s")
    result = up("--ranks", "4", "--job", str(JOBS / "ddp.py"), *fault)
    assert (result["culprits"], result["wrongly_named"]) == ([], [])
    assert {verdict["verdict"] for verdict in result["verdicts"]} == {"imbalance:data"}
    (explained,) = result["diagnoses"].values()
    assert explained["cause"] == "more-computing", explained
    assert not explained["is_named"]
    assert result["diagnosis"] == explained
    assert explained["causes"][0]["share"] > 0.4
    assert explained["n_ops"] > 20


SLOW_FROM_THE_START = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def count_more():
    return sum(n * n for n in range(120_000))

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]))
for step in range(100_000):
    if dist.get_rank() == 2:
        count_more()
    model(torch.randn(128, 256)).square().mean().backward()
"""


@pytest.mark.live
@pytest.mark.torch
def test_real_job_with_a_rank_that_was_slow_from_the_start_is_explained_by_its_peers(tmp_path):
    job = tmp_path / "job.py"
    job.write_text(SLOW_FROM_THE_START)
    result = up("--ranks", "4", "--job", str(job), "--fault", "none", "--duration", "15s")
    assert result["culprits"] == [2]
    assert result["diagnosis"]["cause"] == "more-computing", result["diagnosis"]
    computing = result["diagnosis"]["causes"][0]
    assert computing["share"] > 0.5
    assert ", its peers " in computing["evidence"][0]
    assert any("job.py:7" in fact for fact in computing["evidence"])
