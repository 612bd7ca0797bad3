"""`ingero hang --fleet`, and what a Fleet process concludes from standings that are pushed to it."""

import json
import subprocess
import sys

import numpy as np
import pytest
from tests.e2e.agents import fleet_and_agents

from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.progress import RankProgress
from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives
from ingero.wire.progress import build_progress

pytestmark = pytest.mark.slow
PROGRAM = "from ingero.cli.main import main; main()"
PROTOBUF = {"content-type": "application/x-protobuf"}
COMM, N = "00000000000000ab", 4


def hang(*arguments):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "hang", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def push(agents, export):
    answer = agents.push_raw(encode_protobuf(export), PROTOBUF, path="/v1/logs")
    assert answer.status_code == 200
    return answer


def standing(rank, still_ns):
    """Rank 2 did not enter operation 10."""
    entered = 9 if rank.rank == 2 else 10
    return RankProgress(rank, COMM, rank.rank, N, entered, 9, CollectiveOp.ALL_REDUCE, still_ns)


def test_rank_that_never_arrived_is_named_on_the_command_line():
    with fleet_and_agents(build_fleet_config(nccl={"judge_interval": "100ms"})) as agents:
        ops = np.zeros(1, COLLECTIVE_OP)
        ops["seq"] = 9
        ranks = [Rank("job", f"node{rank}", rank) for rank in range(N)]
        push(
            agents,
            build_collectives(
                [CollectiveRun(rank, COMM, rank.rank, N, ClockKind.SYNC, ops) for rank in ranks], 1
            ),
        )
        url = agents.fleet.url("extensions.ingero_threshold admin")
        push(agents, build_progress([standing(rank, NS_PER_S) for rank in ranks], 1))
        said = hang("--fleet", url, "--cluster-id", "job").stdout
        assert said.startswith("nobody is named: 3 ranks in an operation, the longest for ")
        assert " s: 0-1, 3; " in said
        push(agents, build_progress([standing(rank, 7 * NS_PER_S) for rank in ranks], 1))
        wait_until(lambda: agents.own("ingero_fleet_nccl_missing_ranks", cluster_id="job") == 1)
        told = hang("--fleet", url, "--cluster-id", "job", "--json")
        assert told.returncode == 0, told.stderr
        answer = json.loads(told.stdout)
        assert answer["missing_ranks"] == [2]
        (root,) = answer["roots"]
        assert (root["node_id"], root["job"], root["blocks"]) == ("node2", "", [0, 1, 3])
        assert answer["standing_s"] >= 7.0
        said = hang("--fleet", url, "--cluster-id", "job").stdout
        assert "rank 2 on node2 never arrived at operation 10" in said
        unknown = hang("--fleet", url, "--cluster-id", "other")
        assert unknown.returncode == 1
        assert "knows no live job" in unknown.stderr
        assert f"{url}/api/v1/admin/clusters" in unknown.stderr


def in_a_circle(still_ns):
    """Rank 0 waits in one communicator for rank 1, which waits in another one for rank 0."""
    for comm, waits in ((COMM, 0), ("00000000000000cd", 1)):
        for number in range(2):
            rank = Rank("job", f"node{number}", number)
            entered = 10 if number == waits else 9
            yield RankProgress(rank, comm, number, 2, entered, 9, CollectiveOp.ALL_REDUCE, still_ns)


def test_ranks_that_wait_for_each_other_are_named_with_where_each_stands():
    with fleet_and_agents(build_fleet_config(nccl={"judge_interval": "100ms"})) as agents:
        push(agents, build_progress(list(in_a_circle(7 * NS_PER_S)), 1))
        url = agents.fleet.url("extensions.ingero_threshold admin")
        assert hang("--fleet", url, "--cluster-id", "job").stdout.splitlines() == [
            "deadlock: ranks 0-1 wait for each other",
            "    rank 0 waits for 1 in all_reduce 10 of 00000000000000ab",
            "    rank 1 waits for 0 in all_reduce 10 of 00000000000000cd",
        ]


def test_a_fleet_without_the_processor_is_told_from_one_without_the_job():
    with fleet_and_agents(build_fleet_config()) as agents:
        url = agents.fleet.url("extensions.ingero_threshold admin")
        told = hang("--fleet", url, "--cluster-id", "job")
        assert told.returncode == 1
        assert "has no nccl processor" in told.stderr


@pytest.mark.parametrize("arguments", [[], [".", "--fleet", "http://x"], ["--fleet", "http://x"]])
def test_contradicting_arguments_are_wrong_usage(arguments):
    assert hang(*arguments).returncode == 2
