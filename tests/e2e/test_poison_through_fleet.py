"""What would end a store's ingest comes through Fleet, which knows no better, and again from its retry queue."""

import time

import msgspec
import pytest
from tests.e2e.agents import JSON, fleet_and_agents
from tests.echo.process import OPERATOR, Served, metrics, point
from tests.echo.test_poison import POISON, to_protobuf

from ingero.testing.fleet import build_fleet_config
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.slow
PROTOBUF = {"content-type": "application/x-protobuf"}


def forwarding(port):
    config = build_fleet_config()
    config["exporters"]["otlphttp"] = {
        "endpoint": f"http://127.0.0.1:{port}",
        "headers": {"Authorization": f"Bearer {OPERATOR}"},
        "retry_on_failure": {"initial_interval": "100ms", "max_interval": "500ms"},
    }
    for pipeline in config["service"]["pipelines"].values():
        pipeline["exporters"] = [*pipeline["exporters"], "otlphttp"]
    return config


def push_all(agents):
    """Each poison as it is, then a good point."""
    for signal, body in POISON.values():
        if signal != "traces":
            path = f"/v1/{signal}"
            agents.push_raw(msgspec.json.encode(body), JSON, path=path)
            agents.push_raw(to_protobuf(signal, body), PROTOBUF, path=path)
    good = metrics([point(1.0, time.time_ns())], "after")
    answer = agents.push_raw(msgspec.json.encode(good), JSON, path="/v1/metrics")
    assert answer.status_code == 200


def n_good(echo):
    return echo.sql("SELECT count(*) FROM events WHERE metric_name = 'after'")[0][0]


def test_poison_through_fleet_and_from_its_retry_queue_leaves_echo_taking(tmp_path):
    with Served(tmp_path) as echo, fleet_and_agents(forwarding(echo.otlp)) as agents:
        push_all(agents)
        wait_until(lambda: n_good(echo) == 1)
        echo.process.kill()
        echo.process.wait()
        push_all(agents)  # into the queue: nobody listens
        with Served(tmp_path, "--otlp-http-addr", f"127.0.0.1:{echo.otlp}") as again:
            wait_until(lambda: n_good(again) == 2)
            assert (again.state("/readyz"), again.state("/healthz")) == (200, 200)
            push_all(agents)
            wait_until(lambda: n_good(again) == 3)
