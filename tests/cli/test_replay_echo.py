"""The demo's last act: what the replay pushed is asked of a real Echo."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.echo.service.conftest import gauge, metrics, resource
from tests.support import local_http
from tests.support.packaged_trace import write_first_steps

from ingero.cli.commands.replay.echo import ask_echo
from ingero.config import parse_model
from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.costs import CostDelta, CostParties, build_costs
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.sim.local_echo import run_local_echo
from ingero.units import NS_PER_S

INGERO = str(Path(sys.executable).with_name("ingero"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_echo_names_the_replays_culprit_whom_it_blocked_and_what_fleet_charges(tmp_path):
    trace = str(write_first_steps(tmp_path / "trace.parquet", 15))
    done = subprocess.run(
        [INGERO, "replay", trace, "--echo", "--json", "--speed", "2000", "--gpu-rate", "7.2"],
        capture_output=True,
        text=True,
        check=True,
        timeout=280,
    )
    result = json.loads(done.stdout)
    (culprit,) = [one for one in result["verdicts"] if one["verdict"] == "culprit"]
    said = result["echo"]
    judged = [row["node_id"] for row in said["find_stragglers"] if row["verdict"] == "culprit"]
    worker = culprit["worker"]
    assert judged == [f"dp{worker['dp_rank']}-stage{worker['stage']}"]
    assert {row["culprit_node"] for row in said["blame_chain"]} == set(judged)
    assert len({row["victim"] for row in said["blame_chain"]}) == len(culprit["victims"])
    waited_s = sum(row["waited_gpu_s"] for row in said["blame_chain"])
    assert waited_s == pytest.approx(culprit["lost_gpu_s"], rel=0.002)
    (bill,) = said["cost_by_culprit"]
    assert bill["gpu_seconds"] == pytest.approx(culprit["lost_gpu_s"], rel=0.002)
    assert bill["amount"] == pytest.approx(bill["gpu_seconds"] / 500)
    assert bill["currency"] == "USD"
    (total,) = said["cost"]
    assert total["charged_gpu_seconds"] == pytest.approx(bill["gpu_seconds"])
    assert total["gpu_seconds"] == pytest.approx(result["cost"]["waited_gpu_s"], rel=0.002)
    assert total["amount"] == pytest.approx(total["gpu_seconds"] / 500)
    assert (said["mcp_agrees"], said["cost_agrees"]) == (True, True)


def test_echo_needs_a_fleet_of_the_replays_own():
    for options in (
        ["--echo", "--offline"],
        ["--echo", "--fleet", "http://127.0.0.1:1"],
        ["--gpu-rate", "2"],
    ):
        done = subprocess.run(
            [INGERO, "replay", "AR", *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert "--echo" in done.stderr


def test_the_cost_is_that_of_the_records_also_where_fleets_gauge_comes_first():
    now_ns = time.time_ns()
    lost = gauge("ingero_fleet_lost_gpu_seconds", 36.0, now_ns, rank="3", worker="n3/3")
    paid = Hardware("aws", "NVIDIA L4")
    charges = [
        CostDelta(CostParties("n3", 3, "n1", paid), 36 * NS_PER_S),
        CostDelta(CostParties("", -1, "", paid), 4 * NS_PER_S),
    ]
    rates = Rates(parse_model(RatesConfig, {"providers": {"aws": {"NVIDIA L4": 36.0}}}))
    with run_local_echo() as echo:

        def push(export):
            local_http.post(
                f"{echo.otlp_url}/v1/{export.signal.value}",
                content=export.message.SerializeToString(),
                headers={
                    "authorization": f"Bearer {echo.token}",
                    "content-type": "application/x-protobuf",
                },
                timeout=60,
            ).raise_for_status()

        push(metrics([(resource("c1", "n3"), [lost])]))
        later = threading.Timer(1.0, push, [build_costs("c1", charges, rates, now_ns)])
        later.start()
        said = ask_echo(echo, "c1", 36.0)
        later.join()
    (total,) = said["cost"]
    assert (total["gpu_seconds"], total["amount"]) == (40.0, pytest.approx(0.4))
    assert [row["amount"] for row in said["cost_by_culprit"]] == [pytest.approx(0.36)]
