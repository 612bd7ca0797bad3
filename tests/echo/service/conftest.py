import time

import numpy as np
import pytest
from tests.support import local_http
from tests.support.echo import RunningEcho

from ingero.config.acl import AclEntry
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.otlp.codec import Export, build_attributes, structs
from ingero.otlp.names import Signal
from ingero.wire.collectives import build_collectives

ALL, ONE, TWO = "all-" + "a" * 28, "one-" + "b" * 28, "two-" + "c" * 28
CLUSTERS = ("c1", "c2")


def bearers():
    return [
        AclEntry("operator", ALL, None),
        AclEntry("team-one", ONE, frozenset({"c1"})),
        AclEntry("team-two", TWO, frozenset({"c2"})),
    ]


def resource(cluster, node, **more):
    return structs.Resource(
        build_attributes({"ingero.cluster.id": cluster, "ingero.node.id": node, **more})
    )


def gauge(name, value, at_ns, **attributes):
    point = structs.NumberDataPoint(build_attributes(attributes), 0, at_ns, as_double=value)
    return structs.Metric(name, gauge=structs.Gauge([point]))


def metrics(entries):
    return Export.from_tree(
        Signal.METRICS,
        structs.MetricsRequest([
            structs.ResourceMetrics(who, [structs.ScopeMetrics(None, points)])
            for who, points in entries
        ]),
    )


def health(cluster, now_ns, *, slow="n3", n_nodes=6):
    """A minute of scores: everybody at 0.95 but one, which falls to 0.3 half-way and says so."""
    entries = []
    for node in range(n_nodes):
        name = f"{cluster}-n{node}"
        points = []
        for second in range(0, 60, 10):
            at_ns = now_ns - (60 - second) * 10**9
            is_slow = name == f"{cluster}-{slow}" and second >= 30
            score = 0.30 if is_slow else 0.95 - node * 0.001
            points.append(
                gauge("ingero.node.health_score", score, at_ns, **{"ingero.node.state": "active"})
            )
            if is_slow:
                points.append(
                    gauge(
                        "ingero.node.straggler_event",
                        1,
                        at_ns,
                        threshold=0.87,
                        score=score,
                        dominant_signal="throughput",
                        **{"ingero.event.id": f"e{second}"},
                    )
                )
        points.append(
            gauge(
                "ingero.node.info", 1, now_ns, **{"ingero.gpu_model": "H100", "ingero.gpu_count": 8}
            )
        )
        entries.append((resource(cluster, name, **{"ingero.provider": "aws"}), points))
    return metrics(entries)


def collectives(cluster, now_ns, *, n_ops=40, late=3, n_ranks=4, stuck=None):
    """All-reduces in which one rank computes longer, so the others wait inside for it."""
    runs = []
    for rank in range(n_ranks):
        n = n_ops - 5 if rank == stuck else n_ops
        ops = np.zeros(n, COLLECTIVE_OP)
        ops["seq"] = np.arange(n)
        ops["own_ns"] = 60_000_000 if rank == late else 10_000_000
        ops["inside_ns"] = 2_000_000 if rank == late else 52_000_000
        ops["entry_ns"] = np.arange(n) * 62_000_000
        ops["n_bytes"] = 100_000_000
        ops["op"] = CollectiveOp.ALL_REDUCE
        who = Rank(cluster, f"{cluster}-n{rank}", rank)
        runs.append(CollectiveRun(who, "00000000000000ab", rank, n_ranks, ClockKind.DEVICE, ops))
    return build_collectives(runs, now_ns)


def push(echo, export, token=ALL, signal=Signal.METRICS, **headers):
    path = {Signal.METRICS: "/v1/metrics", Signal.LOGS: "/v1/logs", Signal.TRACES: "/v1/traces"}[
        signal
    ]
    return local_http.post(
        f"http://127.0.0.1:{echo.at.otlp_http.port}{path}",
        content=export.message.SerializeToString(),
        headers={
            "authorization": f"Bearer {token}",
            "content-type": "application/x-protobuf",
            **headers,
        },
        timeout=120,
    )


def ask(echo, tool, args=None, token=ALL, **headers):
    return local_http.post(
        f"{echo.url}/api/v2/tools/{tool}",
        json={"args": args or {}},
        headers={"authorization": f"Bearer {token}", **headers},
        timeout=120,
    )


def result(echo, tool, args=None, token=ALL):
    answer = ask(echo, tool, args, token)
    assert answer.status_code == 200, answer.text
    return answer.json()["result"]


def sql(echo, text, token=ALL, **more):
    return local_http.post(
        f"{echo.url}/api/v2/sql",
        json={"sql": text, **more},
        headers={"authorization": f"Bearer {token}"},
        timeout=120,
    )


@pytest.fixture
def open_echo(tmp_path):
    running = []

    def start(**settings):
        echo = RunningEcho(tmp_path / "echo.db", bearers(), settings)
        running.append(echo.__enter__())
        return echo

    yield start
    for echo in running:
        echo.__exit__(None, None, None)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """An Echo with two clusters: a slow node and a late rank in each."""
    settings = {"rate_per_second": 100_000, "rate_burst": 100_000, "max_in_flight": 1000}
    with RunningEcho(tmp_path_factory.mktemp("echo") / "echo.db", bearers(), settings) as echo:
        now_ns = time.time_ns()
        for cluster in CLUSTERS:
            assert push(echo, health(cluster, now_ns)).status_code == 200
            late = 3 if cluster == "c1" else 1
            exported = collectives(cluster, now_ns, late=late)
            assert push(echo, exported, signal=Signal.LOGS).status_code == 200
        yield echo
