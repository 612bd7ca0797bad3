"""`ingero fleet-push` on a node that it probes itself: what reaches the Fleet is what the ranks did."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.unprivileged import AS_UNPRIVILEGED

from ingero.model.collectives import ClockKind, CollectiveOp
from ingero.sim.runner import SimSettings, Simulation
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import read_collectives
from ingero.wire.progress import read_progress

pytestmark = [pytest.mark.kernel, pytest.mark.slow]
PROGRAM = "from ingero.cli.main import main; main()"
STEPS, N_RANKS = 61, 3


def runs_on(collector, comms):
    """Batches of these communicators: the agent sees every job of the machine."""
    runs = [run for export in collector.logs for run in read_collectives(export).runs]
    return [run for run in runs if run.comm in comms]


def seqs_by_rank(collector, comms):
    found = {}
    for run in runs_on(collector, comms):
        found.setdefault(run.rank.rank, []).extend(run.ops["seq"].tolist())
    return found


def ranks_gone(collector, comms):
    return {
        one.rank.rank
        for export in collector.logs
        for one in read_progress(export).found
        if one.is_gone and one.comm in comms
    }


def test_every_collective_of_every_rank_of_two_jobs_arrives_once_with_its_times(
    collector, tmp_path
):
    agent = subprocess.Popen(
        [
            *(sys.executable, "-c", PROGRAM, "fleet-push", "--json"),
            *("--fleet-endpoint", f"127.0.0.1:{collector.port}", "--fleet-insecure"),
            *("--fleet-cluster-id", "c", "--fleet-node-id", "n"),
            *("--fleet-push-interval", "1s", "--fleet-timeout", "1s"),
            *("--fleet-protocol", "http/protobuf"),
            *("--fleet-persist-path", str(tmp_path / "baseline.json")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        collector.wait_for(1)  # counts are read, so the probes wait
        settings = SimSettings("ranks", {"steps": STEPS, "wait_us": 1_000_000}, N_RANKS)
        with Simulation(settings) as one, Simulation(settings) as other:
            accounts = one.wait(120), other.wait(120)
        jobs = [{f"{rank['comm_hash']:016x}" for rank in ranks} for ranks in accounts]
        everything = {rank: list(range(1, STEPS + 3)) for rank in range(N_RANKS)}
        for comms in jobs:
            wait_until(lambda comms=comms: seqs_by_rank(collector, comms) == everything)
            wait_until(lambda comms=comms: ranks_gone(collector, comms) == everything.keys())
    finally:
        agent.send_signal(signal.SIGTERM)
        out, err = agent.communicate(timeout=120)
    assert agent.returncode == 0, err
    first, second = ({run.rank.worker for run in runs_on(collector, comms)} for comms in jobs)
    assert len(first) == len(second) == N_RANKS
    assert not first & second, "two jobs whose ranks have the same numbers are one to Fleet"
    runs = runs_on(collector, set.union(*jobs))
    assert {(run.rank.node_id, run.n_ranks, run.clock) for run in runs} == {
        ("n", N_RANKS, ClockKind.SYNC)
    }
    assert all(run.comm_rank == run.rank.rank for run in runs)
    for run in runs:
        assert (run.ops["inside_ns"] > 0).all()
        assert (run.ops["own_ns"][1:] >= 0).all()
    assert {int(op) for run in runs for op in run.ops["op"]} == {
        CollectiveOp.ALL_REDUCE,
        CollectiveOp.BROADCAST,
        CollectiveOp.REDUCE_SCATTER,
    }
    assert '"state"' in out


@pytest.fixture
def kept():
    """A folder that anybody enters, with what an agent of root keeps."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "spill").mkdir(mode=0o700)
        (folder / "baseline.json").touch(mode=0o600)
        yield folder


def test_without_root_it_says_what_to_do_also_where_root_has_kept_something(kept):
    result = subprocess.run(
        [
            *AS_UNPRIVILEGED,
            *(sys.executable, "-c", PROGRAM, "fleet-push"),
            *("--fleet-endpoint", "127.0.0.1:1", "--fleet-insecure", "--fleet-cluster-id", "c"),
            *("--fleet-spill-dir", kept / "spill", "--fleet-persist-path", kept / "baseline.json"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 3, result.stderr
    assert "needs root" in result.stderr
