"""No request ends ingest: after whatever somebody sends, another tenant's push is answered and stored."""

import time

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.echo.process import (
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

from ingero.echo.service.app import STATUS_DEAD

TOP, PAST = 2**64 - 1, 2**63


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with Served(tmp_path_factory.mktemp("echo"), "--set", "otlp_rate_per_second=100000") as echo:
        yield echo


def verdict(**attributes):
    name = {"eventName": "ingero.verdict", "timeUnixNano": str(time.time_ns())}
    return logs([{**name, "body": {"stringValue": "x"}, "attributes": pairs(attributes)}])


def exponential(**fields):
    return metrics(
        [{"timeUnixNano": str(time.time_ns()), "count": "1", **fields}], kind="exponentialHistogram"
    )


ONE = {"offset": 0, "bucketCounts": ["1"]}
POISON = {
    "bool world_size": ("metrics", metrics([point()], **{"ingero.world_size": True})),
    "bool node rank": ("metrics", metrics([point()], **{"ingero.node.rank": True})),
    "bool gpu_count": (
        "metrics",
        metrics([point(**{"ingero.gpu_count": True})], name="ingero.node.info"),
    ),
    "bool verdict rank": ("logs", verdict(**{"ingero.rank": True})),
    "bool verdict times and numbers": (
        "logs",
        verdict(**{"v.start_ns": True, "v.slowdown": True, "v.lost_gpu_seconds": "much"}),
    ),
    "number as state": (
        "metrics",
        metrics([point(**{"ingero.node.state": 7})], name="ingero.node.health_score"),
    ),
    "scale -2000": ("metrics", exponential(scale=-2000, positive=ONE)),
    "scale 2000": ("metrics", exponential(scale=2000, positive=ONE)),
    "offset at the end": ("metrics", exponential(scale=0, positive=ONE | {"offset": 2**31 - 1})),
    "time 2^63": ("metrics", metrics([point(at_ns=PAST)])),
    "time 2^64-1": ("metrics", metrics([point(at_ns=TOP)])),
    "log time 2^64-1": ("logs", logs([{"timeUnixNano": str(TOP), "body": {"stringValue": "x"}}])),
    "span start 2^63": (
        "traces",
        spans([{"name": "s", "traceId": "ab" * 16, "startTimeUnixNano": str(PAST)}]),
    ),
    "span end 2^64-1": (
        "traces",
        spans([{"name": "s", "startTimeUnixNano": "1", "endTimeUnixNano": str(TOP)}]),
    ),
}


def to_protobuf(signal, body):
    from msgspec import json

    from ingero.otlp.codec import decode_export
    from ingero.otlp.names import ContentType, Signal

    export = decode_export(json.encode(body), Signal(signal), ContentType.JSON)
    return export.message.SerializeToString()


def is_alive(served):
    """Another tenant's rows are stored, over both transports."""
    before = served.metric("ingero_echo_rows_total", outcome="written")
    other = metrics([point()], cluster="prod-9")
    assert served.push(other, token=TEAM_B).status_code == 200
    assert (
        served.call(to_protobuf("metrics", metrics([point(0.5)], cluster="prod-9")), token=TEAM_B)
        == b""
    )
    assert served.metric("ingero_echo_rows_total", outcome="written") == before + 2
    return True


@pytest.mark.parametrize("name", POISON)
def test_a_poisonous_request_costs_its_own_record_and_nobody_elses(served, name):
    signal, body = POISON[name]
    as_json = served.push(body, signal, TEAM_A)
    as_protobuf = served.push(to_protobuf(signal, body), signal, TEAM_A)
    assert as_json.status_code == as_protobuf.status_code in {200, 400}, (
        as_json.text,
        as_protobuf.text,
    )
    if as_json.status_code == 400:
        with pytest.raises(grpc.RpcError) as refused:
            served.call(to_protobuf(signal, body), signal, TEAM_A)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    else:
        served.call(to_protobuf(signal, body), signal, TEAM_A)
    assert is_alive(served)
    assert (served.state("/readyz"), served.state("/healthz")) == (200, 200)


def test_the_good_points_beside_a_bad_one_are_kept_and_the_bad_one_is_told_counted_and_audited(
    served,
):
    before = served.metric("ingero_echo_records_refused_total", reason="time")
    body = metrics([point(5.0), point(6.0, at_ns=PAST), point(7.0)], name="beside")
    n_refused, why = rejected(served.push(body, token=TEAM_A))
    assert n_refused == 1
    assert "2262" in why
    n_refused, why = rejected(served.push(to_protobuf("metrics", body), token=TEAM_A))
    assert (n_refused, "2262" in why) == (1, True)
    assert served.sql(
        "SELECT value_double FROM events WHERE metric_name = 'beside' ORDER BY 1"
    ) == [[5.0], [7.0]]
    assert served.metric("ingero_echo_records_refused_total", reason="time") == before + 2
    assert [line["n_refused"] for line in served.audit(bearer_key_name="team-a")[-2:]] == [1, 1]


def test_both_encodings_agree_on_what_a_time_may_be(served):
    for at_ns, status in ((2**63 - 1, 200), (PAST, 400), (TOP, 400)):
        body = metrics([point(1.0, at_ns=at_ns)], name=f"t{at_ns}")
        answers = served.push(body), served.push(to_protobuf("metrics", body))
        assert [answer.status_code for answer in answers] == [status, status]
    too_large = served.push(metrics([point(1.0, at_ns=2**64)]))
    assert too_large.status_code == 400


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"explicitBounds": [2, 1], "bucketCounts": ["1", "0", "0"]}, "ascend"),
        ({"explicitBounds": [1, 1], "bucketCounts": ["1", "0", "0"]}, "ascend"),
        ({"explicitBounds": ["NaN"], "bucketCounts": ["1", "0"]}, "finite"),
        ({"explicitBounds": [1, "Infinity"], "bucketCounts": ["1", "0", "0"]}, "finite"),
        ({"explicitBounds": [1, 2], "bucketCounts": ["1", "0"]}, "2 counts for 2 bounds"),
        ({"explicitBounds": [1], "bucketCounts": ["1", "5"]}, "add up to 6"),
        ({"explicitBounds": [1], "bucketCounts": []}, "0 counts for 1 bounds"),
    ],
)
def test_a_histogram_that_contradicts_itself_is_refused_with_the_reason(served, fields, why):
    bad = {"timeUnixNano": str(time.time_ns()), "count": "1", **fields}
    good = {"timeUnixNano": str(time.time_ns()), "count": "1", "sum": 2.0}
    body = metrics([bad, good], name="h", kind="histogram")
    for answer in (served.push(body), served.push(to_protobuf("metrics", body))):
        n_refused, said = rejected(answer)
        assert n_refused == 1
        assert why in said
    assert served.push(metrics([bad], kind="histogram")).status_code == 400


def test_one_at_the_largest_scale_and_one_at_the_least_keep_every_count(served):
    wide = exponential(
        scale=-10, count="6", zeroCount="1", positive={"offset": -1, "bucketCounts": ["2", "3"]}
    )
    wide["resourceMetrics"][0]["scopeMetrics"][0]["metrics"][0]["name"] = "wide"
    assert rejected(served.push(wide)) == (0, "")
    ((bounds, counts),) = served.sql(
        "SELECT bounds, bucket_counts FROM histograms WHERE metric_name = 'wide'"
    )
    assert bounds == [0.0, 2.0**-1024, 1.0]
    assert counts == [1, 0, 2, 3]


def test_deeply_nested_values_are_refused_as_one_request(served):
    nested = {"stringValue": "x"}
    for _ in range(300):
        nested = {"arrayValue": {"values": [nested]}}
    body = metrics([point()])
    body["resourceMetrics"][0]["resource"]["attributes"].append({"key": "deep", "value": nested})
    assert served.push(body, token=TEAM_A).status_code in {200, 400}
    assert is_alive(served)


def test_requests_that_share_a_commit_with_a_bad_one_are_stored(served):
    """Concurrent senders of both tenants, a third of their requests poisonous."""
    from concurrent.futures import ThreadPoolExecutor

    poisons = list(POISON.values())

    def send(i):
        if i % 3:
            body = metrics([point(float(i))], name="shared", cluster="prod-9")
            return served.push(body, token=TEAM_B).status_code
        signal, body = poisons[i % len(poisons)]
        return served.push(to_protobuf(signal, body), signal, TEAM_A).status_code

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(send, range(240)))
    assert {answer for i, answer in enumerate(answers) if i % 3} == {200}
    assert served.sql("SELECT count(*) FROM events WHERE metric_name = 'shared'") == [[160]]


WHAT_DIES = """
import pathlib, sys
from ingero.cli.programs import echo
from ingero.cli.main import run_program
from ingero.echo.db.write_queue import WriteQueue

flag, take = pathlib.Path(sys.argv[1]), WriteQueue.take

def dying(self, timeout_s):
    found = take(self, timeout_s)
    if flag.exists():
        raise {error}
    return found

WriteQueue.take = dying
sys.exit(run_program(echo.cli, sys.argv[2:]))
"""


@pytest.mark.parametrize("error", ["ValueError('defect')", "SystemExit(0)", "MemoryError()"])
def test_a_writer_that_dies_fails_liveness_and_ends_the_process_with_an_error(tmp_path, error):
    import sys

    flag = tmp_path / "die"
    code = WHAT_DIES.format(error=error)
    program = (sys.executable, "-c", code, str(flag))
    with Served(tmp_path, program=program) as echo:
        assert echo.push(metrics([point()])).status_code == 200
        assert (echo.state("/readyz"), echo.state("/healthz")) == (200, 200)
        flag.touch()
        assert echo.push(metrics([point()])).status_code == 503
        seen = set()
        while echo.process.poll() is None:
            try:
                seen.add((echo.state("/readyz"), echo.state("/healthz")))
            except httpx.HTTPError:
                break
        assert echo.process.wait(120) == STATUS_DEAD
        assert seen <= {(503, 503)}
        assert "the writer has ended" in echo.log.read_text()
    flag.unlink()
    with Served(tmp_path) as again:
        assert again.sql("SELECT count(*) FROM events") == [[1]]


def test_an_empty_body_and_empty_messages_are_answered(served):
    for signal, kind in (
        ("metrics", ExportMetricsServiceRequest),
        ("logs", ExportLogsServiceRequest),
        ("traces", ExportTraceServiceRequest),
    ):
        assert served.push(b"", signal).status_code == 200
        assert served.call(kind().SerializeToString(), signal) == b""
