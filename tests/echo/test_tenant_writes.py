"""What one tenant sends never changes, adds to or suppresses what another one has."""

import time

import grpc
import pytest
from tests.echo.process import (
    OPERATOR,
    TEAM_A,
    TEAM_B,
    Served,
    logs,
    metrics,
    pairs,
    point,
    rejected,
    spans,
)
from tests.echo.test_poison import to_protobuf


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("echo")) as echo:
        yield echo


def now():
    return str(time.time_ns())


FOREIGN = {
    "summary without quantiles": (
        "metrics",
        metrics(
            [
                {
                    "timeUnixNano": now(),
                    "quantileValues": [],
                    "attributes": pairs({"ingero.node.state": "PWNED"}),
                }
            ],
            *("ingero.node.health_score", "prod-9", "prod-9-n0", "summary"),
            **{"host.name": "evil-host", "ingero.provider": "evilcloud", "ingero.world_size": 7},
        ),
    ),
    "point": ("metrics", metrics([point()], cluster="prod-9")),
    "point that is refused": ("metrics", metrics([point(at_ns=2**63)], cluster="prod-9")),
    "cluster in the point": ("metrics", metrics([point(cluster_id="prod-9")], cluster=None)),
    "no cluster": ("metrics", metrics([point()], cluster=None)),
    "log": ("logs", logs([{"timeUnixNano": now(), "body": {"stringValue": "x"}}], "prod-9")),
    **{
        name: ("logs", logs([{"timeUnixNano": now(), "eventName": f"ingero.{name}"}], "prod-9"))
        for name in ("verdict", "incident", "episode", "cost")
    },
    "span": ("traces", spans([{"name": "s", "startTimeUnixNano": now()}], "prod-9")),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_whatever_names_a_foreign_cluster_is_refused_whole_and_audited(served, name):
    signal, body = FOREIGN[name]
    n_before = len(served.audit(status=403))
    assert served.push(body, signal, TEAM_A).status_code == 403
    with pytest.raises(grpc.RpcError) as refused:
        served.call(to_protobuf(signal, body), signal, TEAM_A)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    lines = served.audit(status=403)[n_before:]
    assert [(line["bearer_key_name"], line["transport"]) for line in lines] == [
        ("team-a", "http"),
        ("team-a", "grpc"),
    ]
    assert {cluster for line in lines for cluster in line["clusters"]} == {
        "" if name == "no cluster" else "prod-9"
    }


def test_a_foreign_hint_is_refused_even_if_the_body_names_its_own_cluster(served):
    body = metrics([point()])
    assert served.push(body, token=TEAM_A, params={"cluster_id": "prod-9"}).status_code == 403
    assert served.push(body, token=TEAM_A, params={"cluster_id": "train-2"}).status_code == 200


def test_nothing_of_all_that_is_in_the_other_tenants_tables(tmp_path):
    with Served(tmp_path) as served:
        check_tables(served)


def check_tables(served):
    own = metrics(
        [point(0.9, **{"ingero.node.state": "active"})],
        "ingero.node.health_score",
        "prod-9",
        "prod-9-n0",
    )
    assert served.push(own, token=TEAM_B).status_code == 200
    for signal, body in FOREIGN.values():
        served.push(body, signal, TEAM_A)
    rows = served.sql("SELECT node_id, host_attr, provider, world_size, state FROM nodes", TEAM_B)
    assert rows == [["prod-9-n0", None, None, None, "active"]]
    for table in ("logs", "verdicts", "incidents", "costs", "spans"):
        assert served.sql(f"SELECT count(*) FROM {table}", TEAM_B) == [[0]]


def test_the_same_series_of_two_tenants_by_their_hints_is_kept_for_both(served):
    at_ns = time.time_ns()
    body = metrics([point(1.0, at_ns)], "hinted", None, None, **{"service.name": "nccl"})
    for token, cluster in ((TEAM_A, "train-1"), (TEAM_B, "prod-9"), (TEAM_A, "train-2")):
        for _ in range(2):  # and a retry of each
            assert served.push(body, token=token, params={"cluster_id": cluster}).status_code == 200
    rows = served.sql(
        "SELECT cluster_id, count(*) FROM events WHERE metric_name = 'hinted' GROUP BY ALL ORDER BY 1"
    )
    assert rows == [["prod-9", 1], ["train-1", 1], ["train-2", 1]]


def test_the_same_spans_of_two_tenants_are_kept_for_both(served):
    span = {"name": "s", "traceId": "ad" * 16, "spanId": "cd" * 8, "startTimeUnixNano": now()}
    for token, cluster in ((TEAM_A, "train-1"), (TEAM_B, "prod-9")):
        for _ in range(2):
            assert served.push(spans([span], cluster), "traces", token).status_code == 200
    mine = f"SELECT cluster_id, count(*) FROM spans WHERE trace_id = '{span['traceId']}' GROUP BY ALL ORDER BY 1"
    assert served.sql(mine) == [
        ["prod-9", 1],
        ["train-1", 1],
    ]


def test_the_same_time_with_another_value_is_kept_counted_and_told_and_a_retry_is_dropped(served):
    at_ns = time.time_ns()
    before = served.metric("ingero_echo_rows_total", outcome="conflicts")
    assert rejected(served.push(metrics([point(1.0, at_ns)], "twice"), token=TEAM_A)) == (0, "")
    n_refused, why = rejected(served.push(metrics([point(2.0, at_ns)], "twice"), token=TEAM_A))
    assert n_refused == 0
    assert why.startswith(
        "1 have the series and time of another one with another value, kind, unit or scope; both are kept"
    )
    told = rejected(served.push(to_protobuf("metrics", metrics([point(3.0, at_ns)], "twice"))))
    assert told == (0, why)
    for value in (1.0, 2.0, 3.0):
        assert rejected(served.push(metrics([point(value, at_ns)], "twice"))) == (0, "")
    in_one = metrics([point(4.0, at_ns), point(5.0, at_ns), point(5.0, at_ns)], "in_one")
    assert rejected(served.push(in_one))[1].startswith("1 have")
    rows = served.sql("SELECT value_double FROM events WHERE metric_name = 'twice' ORDER BY 1")
    assert rows == [[1.0], [2.0], [3.0]]
    assert served.metric("ingero_echo_rows_total", outcome="conflicts") == before + 3


def test_two_histograms_and_spans_that_differ_in_what_they_say_are_both_kept(served):
    at = now()
    for count in ("1", "2"):
        body = metrics(
            [{"timeUnixNano": at, "count": count, "bucketCounts": []}], "h2", kind="histogram"
        )
        assert served.push(body).status_code == 200
    assert served.sql("SELECT count FROM histograms WHERE metric_name = 'h2' ORDER BY 1") == [
        [1],
        [2],
    ]
    for end in ("10", "20"):
        ended = str(int(at) + int(end))
        span = {
            "name": "e",
            "traceId": "ef" * 16,
            "spanId": "01" * 8,
            "startTimeUnixNano": at,
            "endTimeUnixNano": ended,
        }
        assert served.push(spans([span]), "traces").status_code == 200
    assert served.sql("SELECT count(*) FROM spans WHERE name = 'e'") == [[2]]


def test_attributes_that_are_equal_in_python_and_not_the_same_are_told_apart(served):
    at_ns = time.time_ns()
    points = [point(1.0, at_ns, n=value) for value in (1, True, 1.0)]
    assert rejected(served.push(metrics(points, "kinds"))) == (0, "")
    rows = served.sql("SELECT attributes FROM events WHERE metric_name = 'kinds' ORDER BY 1")
    assert rows == [['{"n":1.0}'], ['{"n":1}'], ['{"n":true}']]


@pytest.mark.parametrize("cluster", ["prod east/1", "a" * 65, "train-1\n", "übung", " "])
def test_a_cluster_that_no_question_could_name_is_refused_for_operators_too(served, cluster):
    body = metrics([point()], cluster=cluster)
    answer = served.push(body, token=OPERATOR)
    assert answer.status_code == 400
    assert "cluster" in answer.json()["message"]
    for signal, other in (
        ("logs", logs([{"timeUnixNano": now(), "eventName": "ingero.verdict"}], cluster)),
        ("traces", spans([{"name": "s", "startTimeUnixNano": now()}], cluster)),
    ):
        assert served.push(other, signal).status_code == 400
    hinted = metrics([point()], cluster=None)
    assert served.push(hinted, params={"cluster_id": cluster}).status_code == 400
