"""Six real agents whose scores halve together: nobody is a straggler, the cluster has one event."""

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from tests.e2e.agents import fleet_and_agents, health
from tests.e2e.test_fleet_metrics import readme_config

from ingero.otlp.codec import decode_export
from ingero.otlp.names import Signal
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
SCRIPT = """\
steps:
  - {{for: {healthy}s}}
  - {{for: 100h, throughput: 50, compute: 0.45, memory: 0.45, cpu: 0.45}}
"""


@contextmanager
def run_agent(fleet, node, folder, script, protocol="http/json"):
    """A ``fleet-push`` process; yields the file that its lines go to."""
    file = folder / f"{node}.yaml"
    file.write_text(script)
    door = "grpc" if protocol == "grpc" else "http"
    out = folder / f"{node}.out"
    with out.open("wb") as log:
        process = subprocess.Popen(
            [
                BIN / "ingero",
                "fleet-push",
                f"--fleet-endpoint={fleet.addresses[f'receivers.otlp {door}']}",
                "--fleet-insecure",
                "--fleet-cluster-id=c",
                f"--fleet-node-id={node}",
                f"--fleet-protocol={protocol}",
                "--fleet-push-interval=2s",
                "--fleet-timeout=2s",
                "--warmup-samples=2",
                f"--script={file}",
                f"--fleet-persist-path={folder / node}.json",
                "--remediate",
                f"--remediate-socket={folder / node}.sock",
                "--json",
            ],
            stdout=log,
            stderr=log,
        )
        try:
            yield out
        finally:
            process.terminate()
            process.wait(120)


def looks(out):
    whole, _, _ = out.read_text().rpartition("\n")  # the last one may not be written to its end
    return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]


def test_six_agents_whose_scores_halve_together_alarm_nobody_and_are_one_event(tmp_path):
    config = readme_config(push_interval="2s")
    with ExitStack() as stack:
        agents = stack.enter_context(fleet_and_agents(config))
        outs = [
            stack.enter_context(
                run_agent(
                    agents.fleet,
                    f"n{index}",
                    tmp_path,
                    SCRIPT.format(healthy=25),
                    ("http/json", "http/protobuf", "grpc")[index % 3],
                )
            )
            for index in range(6)
        ]
        wait_until(lambda: agents.own("ingero_fleet_panic_mode", cluster_id="c") == 1, 120)

        def all_withheld():
            last = [looks(out)[-1] for out in outs]
            return all(one["fleet"]["panic"] and one["threshold"] is None for one in last)

        wait_until(all_withheld)
        for _ in range(3):
            n_before = [len(looks(out)) for out in outs]
            wait_until(
                lambda n=n_before: all(len(looks(o)) > k + 3 for o, k in zip(outs, n, strict=True)),
                60,
            )
        assert agents.admin("episodes")["episodes"] == []
        events = agents.admin("events", cluster_id="c")["events"]
        log = agents.fleet.log
    seen = [one for out in outs for one in looks(out)]
    assert {one["mode"] for one in seen} >= {"fleet", "none"}
    assert min(one["score"] for one in seen if one["state"] == "active") < 0.6
    assert not [one for one in seen if one["straggler"]]
    assert [(one["kind"], one["state"]) for one in events][:1] == [("panic", "began")]
    assert len([one for one in events if one["kind"] == "panic"]) == 1
    lines = [line for line in log.splitlines() if "panic began" in line]
    assert len(lines) == 1
    assert "cluster=c" in lines[0]
    assert "straggler episode" not in log


def test_in_panic_no_door_tells_a_threshold():
    with fleet_and_agents(readme_config()) as agents:
        for score in (0.9, 0.9, 0.45):
            for index in range(6):
                answer = agents.push(health(f"n{index}", score, cluster="c"), "c")
        assert "x-ingero-threshold" not in answer.headers
        assert "x-ingero-quorum-met" not in answer.headers
        assert answer.headers["x-ingero-panic"] == "true"
        page = agents.threshold(cluster_id="c").json()
        assert page == {"threshold": 0.0, "quorum_met": False, "panic": True}
        body = json.dumps(health("n0", 0.45, cluster="c")).encode()
        export = decode_export(body, Signal.METRICS, "application/json")
        with grpc.insecure_channel(agents.fleet.addresses["receivers.otlp grpc"]) as channel:
            _, call = MetricsServiceStub(channel).Export.with_call(export.message, timeout=120)
            told = dict(call.initial_metadata()) | dict(call.trailing_metadata())
        assert told["ingero-panic"] == "true"
        assert "ingero-threshold" not in told
        assert agents.own("ingero_fleet_straggler_count", cluster_id="c") == 0
