"""Agents to Fleet to Echo: what Fleet concludes and passes on is what Echo answers with."""

import asyncio
import time
from dataclasses import replace

import httpx2
import mcp
import pytest
from mcp.client.streamable_http import streamable_http_client
from tests.e2e.agents import fleet_and_agents
from tests.e2e.test_collectives import N_RANKS, PROTOBUF, job
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config.acl import AclEntry
from ingero.otlp.codec import encode_protobuf
from ingero.testing.fleet import build_fleet_config
from ingero.testing.waiting import wait_until
from ingero.wire.collectives import build_collectives

pytestmark = pytest.mark.slow
TOKEN = "f" * 32


def forwarding(echo):
    config = build_fleet_config(nccl={"judge_interval": "100ms", "reorder_window": "100ms"})
    config["exporters"]["otlphttp"] = {
        "endpoint": f"http://127.0.0.1:{echo.at.otlp_http.port}",
        "headers": {"Authorization": f"Bearer {TOKEN}"},
    }
    for pipeline in config["service"]["pipelines"].values():
        pipeline["exporters"] = [*pipeline["exporters"], "otlphttp"]
    return config


def name_pod(rank):
    return (("k8s.namespace.name", "ml"), ("k8s.pod.name", f"p{rank}"))


def ask(echo, tool, **args):
    answer = local_http.post(
        f"{echo.url}/api/v2/tools/fleet.cluster.{tool}",
        json={"args": args},
        headers={"authorization": f"Bearer {TOKEN}"},
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def test_echo_names_the_culprit_whom_it_blocked_and_what_it_cost(tmp_path):
    settings = {"rate_per_second": 100_000, "rate_burst": 100_000}
    with RunningEcho(tmp_path / "echo.db", [AclEntry("fleet", TOKEN, None)], settings) as echo:
        with fleet_and_agents(forwarding(echo)) as agents:
            # One push: ranks whose only pushes come further apart than the reorder window did not meet.
            runs = [
                replace(run, rank=replace(run.rank, resource=name_pod(run.rank.rank)))
                for run in job(slow=5)
            ]
            body = encode_protobuf(build_collectives(runs, time.time_ns()))
            assert agents.push_raw(body, PROTOBUF, path="/v1/logs").status_code == 200

            def judged():
                rows = ask(echo, "find_stragglers", cluster_id="job")["rows"]
                return [row for row in rows if row["verdict"] == "culprit"]

            (culprit,) = wait_until(judged)
            wait_until(lambda: ask(echo, "cost_by_culprit", cluster_id="job")["rows"])
        assert (culprit["node_id"], culprit["severity"]) == ("node5", "critical")
        blamed = ask(echo, "blame_chain", cluster_id="job")["rows"]
        assert {row["culprit_node"] for row in blamed} == {"node5"}
        assert {row["source"] for row in blamed} == {"costs"}
        assert len(blamed) == N_RANKS - 1
        assert blamed[0]["slowdown"] == pytest.approx(1.4, abs=0.05)
        (bill,) = ask(echo, "cost_by_culprit", cluster_id="job")["rows"]
        assert (bill["node_id"], bill["verdict"], bill["n_victims"]) == (
            "node5",
            "culprit",
            N_RANKS - 1,
        )
        assert bill["gpu_seconds"] > 0
        skew = ask(echo, "collective_skew", cluster_id="job")["rows"]
        assert len(skew) == N_RANKS
        assert skew[0]["node_id"] == "node5"
        assert skew[0]["n_ops"] == 300
        assert over_mcp(echo)["rows"][0]["node_id"] == "node5"
        sql = (
            "SELECT DISTINCT json_extract_string(attributes, '$.\"k8s.pod.name\"')"
            " FROM verdicts WHERE verdict = 'culprit'"
        )
        assert ask(echo, "run_analysis", cluster_id="job", sql=sql)["rows"] == [["p5"]]


def over_mcp(echo):
    async def work():
        headers = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx2.AsyncClient(headers=headers) as http,
            mcp.Client(streamable_http_client(f"{echo.url}/mcp", http_client=http)) as client,
        ):
            answer = await client.call_tool("fleet.cluster.cost_by_culprit", {"cluster_id": "job"})
            return answer.structured_content

    return asyncio.run(work())
