"""``ingero trace --inference`` on a simulated server that keeps its own account of its steps."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from tests.support import local_http
from tests.support.ports import free_port

from ingero.model.verdicts import VerdictKind
from ingero.sim.local_fleet import ADMIN, OTLP_HTTP, run_local_fleet
from ingero.sim.replay import ask_judgement
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.kernel

INGERO = (sys.executable, "-m", "ingero")
ENGINE = """
import sys, time
from prometheus_client import Gauge, start_http_server
Gauge("vllm:num_requests_waiting", "Waiting.", ["model_name"]).labels("m").set(4)
start_http_server(int(sys.argv[sys.argv.index("--port") + 1]), addr="127.0.0.1")
print("serving", flush=True)
time.sleep(600)
"""
"""A process with the command line and a page of vLLM; no engine."""
PLAIN = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
REQUESTS, TOKENS, SLOW_MS = 23, 17, 30


def trace(*options, knobs=(), device=()):
    """Lines of a trace of a server, and the server's own account."""
    serve = (
        "sim",
        "run",
        "serve",
        "--json",
        f"requests={REQUESTS}",
        f"tokens={TOKENS}",
        "wait_us=300000",
        *knobs,
    )
    result = subprocess.run(
        [*INGERO, "trace", "--inference", "--no-record", *options, "--", *INGERO, *serve, *device],
        capture_output=True, text=True, env=PLAIN, check=False, timeout=100,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result


def read_account(text):
    """What the server said of itself, among lines of others."""
    (line,) = [line for line in text.splitlines() if '"n_decode"' in line]
    account = json.loads(line)
    return account["ranks"][0] if "ranks" in account else account


@contextmanager
def run_engine(folder):
    """A process with the command line and a page of vLLM; its pid and port."""
    (folder / "vllm").write_text(ENGINE)
    port = free_port()
    command = [sys.executable, folder / "vllm", "serve", "m", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == "serving\n"
        try:
            yield engine.pid, port
        finally:
            engine.kill()


def test_steps_and_phases_are_those_of_the_servers_own_account_and_engines_are_read(
    collector, tmp_path
):
    with run_engine(tmp_path) as (engine_pid, port):
        done, lines, account = trace_json(collector)
    check_steps(lines, account)
    check_pushed(collector, lines, account)
    (found,) = [
        line for line in lines if line["type"] == "inference_engine" and line["port"] == port
    ]
    assert (found["engine"], found["pid"], set(found["scrapes"])) == ("vllm", engine_pid, {"taken"})
    assert found["metrics"] == [
        {"name": "gen_ai.server.queue.size", "model": "m", "unit": "1", "value": 4.0}
    ]
    assert f"note: vllm (pid {engine_pid}): its metrics are read on port {port}" in done.stderr


def trace_json(collector):
    """A trace that records one launch in sixteen: the result, its lines, and the server's account."""
    slow = (f"slow_us={SLOW_MS * 1000}", "slow_from=300", "slow_each=10")
    done = trace(
        "--json",
        "--sampling-rate",
        "16",
        "--otlp",
        f"http://127.0.0.1:{collector.port}",
        knobs=slow,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return done, lines, read_account(done.stderr)


def check_steps(lines, account):
    """Every step is counted under its phase, with its time, and the slow ones are reported."""
    phases = {line["phase"]: line for line in lines if line["type"] == "inference"}
    assert {name: line["steps"] for name, line in phases.items()} == {
        "prefill": account["n_prefill"], "decode": account["n_decode"],
    }  # fmt: skip
    # The server's clock runs from before the first call to after the wait: a little longer, never shorter.
    for name, line in phases.items():
        assert 0.5 * account[f"{name}_ns"] < line["total_ns"] < account[f"{name}_ns"]
    told = [line for line in lines if line["type"] == "inference_outlier"]
    spun = [line for line in told if line["step_duration_ns"] >= SLOW_MS * 1_000_000]
    assert account["n_slow"] == 10
    assert {line["phase"] for line in spun} >= {"decode"}
    assert len([line for line in spun if line["phase"] == "decode"]) >= account["n_slow"]
    assert all(line["stream_handle"] == account["stream"] for line in told)
    assert all(line["causes"] for line in told)
    assert all(line["kv_cache_top_alloc_ages_ms"] for line in spun)
    (lost,) = [line for line in lines if line["type"] == "inference_lost"]
    lost.pop("outliers_not_reported")  # a busy machine makes many
    assert set(lost.values()) == {"inference_lost", 0}


def check_pushed(collector, lines, account):
    """The same over OTLP."""
    pushed = ExportMetricsServiceRequest.FromString(collector.requests[-1].body)
    metrics = {
        metric.name: metric
        for resource in pushed.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    counts = {
        next(
            item.value.string_value for item in point.attributes if item.key == "ingero.infer.phase"
        ): point.count
        for point in metrics["ingero.infer.step_duration_ns"].histogram.data_points
    }
    assert counts == {"prefill": account["n_prefill"], "decode": account["n_decode"]}
    (ages,) = metrics["ingero.infer.kvcache.alloc_age_ms"].histogram.data_points
    assert ages.count == REQUESTS
    outliers = [point.as_int for point in metrics["ingero.infer.outlier_total"].sum.data_points]
    reported = [line for line in lines if line["type"] == "inference_outlier"]
    assert sum(outliers) >= len(reported) >= account["n_slow"]


@pytest.mark.slow
@pytest.mark.live
def test_fleet_names_the_slow_rank_of_a_tensor_parallel_server():
    with run_local_fleet() as fleet, local_http.open_client() as client:
        url, admin = fleet.url(OTLP_HTTP), fleet.url(ADMIN)
        serve = ("sim", "run", "serve", "--ranks", "4", "slow_rank=2", "slow_from=100", "slow_each=1",
                 "slow_us=20000", "requests=100000", "wait_us=300000")  # fmt: skip
        command = (*INGERO, "trace", "--inference", "--no-record", "--no-incidents", "--json", "--fleet", url,
                   "--fleet-cluster-id", "serving", "--fleet-push-interval", "1s", "--", *INGERO, *serve)  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as tracer:
            try:
                found = wait_until(lambda: find_culprits(client, admin, 2), 100)
            finally:
                tracer.terminate()
    # What else runs on a busy machine may make another rank slow besides, and that is so then; it is not the slowest.
    assert max(found, key=found.get) == 2


def find_culprits(client, admin, rank):
    """Excess in nanoseconds of each rank that Fleet calls a culprit now, once this one is among them."""
    judgement = ask_judgement(client, admin, "serving")
    verdicts = judgement.verdicts if judgement is not None else ()
    found = {one.rank.rank: one.excess_ns for one in verdicts if one.kind is VerdictKind.CULPRIT}
    return found if rank in found else {}
