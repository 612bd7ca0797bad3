"""The demo's last act: what the replay pushed is asked of a real Echo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.packaged_trace import write_first_steps

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
    assert len(said["blame_chain"]) == len(culprit["victims"])
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
