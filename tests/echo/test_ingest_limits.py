"""One sender, known or not, takes a bounded part of the memory and of the time, and leaves a line for each request."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from tests.echo.process import (
    ACL,
    OPERATOR,
    SERVICES,
    TEAM_A,
    TEAM_B,
    Served,
    logs,
    metrics,
    pairs,
    point,
    rejected,
)
from tests.echo.test_poison import to_protobuf
from tests.support import local_http

MIB = 1 << 20
SLOW, READER, WRITER, PAST = (f"{name}-" + "x" * 28 for name in ("sl", "re", "wr", "pa"))


@pytest.fixture
def start(tmp_path):
    running = []

    def serve(*settings):
        flags = [part for setting in settings for part in ("--set", setting)]
        running.append(Served(tmp_path, *flags))
        return running[-1]

    yield serve
    for echo in running:
        echo.__exit__(None, None, None)


def test_a_thousand_points_with_a_megabyte_each_are_refused_and_leave_no_memory_behind(start):
    """Before: 251 MB became 4.2 GB and stayed. The bound: one request in hand, a few times."""
    echo = start()
    assert echo.push(metrics([point()])).status_code == 200
    before = echo.rss()
    for batch in range(40):
        body = to_protobuf(
            "metrics",
            metrics([point(x=f"{batch}-{i}-" + "v" * MIB) for i in range(25)], name="big"),
        )
        assert echo.push(body, token=TEAM_A).status_code == 400
    assert echo.rss() - before < 400 * MIB
    assert echo.metric("ingero_echo_records_refused_total", reason="size") == 1000
    assert echo.sql("SELECT count(*) FROM events WHERE metric_name = 'big'") == [[0]]


@pytest.mark.slow
def test_many_different_labels_that_are_allowed_are_kept_in_bounded_memory(start):
    echo = start()
    assert echo.push(metrics([point()])).status_code == 200
    before = echo.rss()
    for batch in range(100):  # 160 MiB of distinct labels, more than the cache may hold
        points = [point(x=f"{batch}-{i}-" + "v" * 16_000) for i in range(100)]
        assert echo.push(to_protobuf("metrics", metrics(points, name="large"))).status_code == 200
    assert echo.rss() - before < 600 * MIB


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (metrics([point(**{f"k{i}": "v" for i in range(129)})]), "129 attributes; 128 are taken"),
        (metrics([point(**{"k" * 257: "v"})]), "name of 257 characters"),
        (metrics([point(k="v" * 16_385)]), "attribute k has 16385 characters; 16384 are taken"),
        (metrics([point(**{f"k{i}": "v" * 16_000 for i in range(5)})]), "65536 are taken"),
        (metrics([point()], name="m" * 257), "a name of 257 characters"),
        (metrics([point()], node="n" * 257), "a node's name of 257 characters"),
        (metrics([point()], big="v" * 16_385), "a resource with attribute big"),
        (logs([{"timeUnixNano": "1", "body": {"stringValue": "x" * (MIB + 1)}}]), "a body of"),
        (
            logs([{"timeUnixNano": "1", "attributes": pairs({"a": "v" * 16_385})}]),
            "attribute a has",
        ),
    ],
)
def test_what_is_too_long_is_refused_with_its_length_and_the_limit(start, body, why):
    echo = start()
    signal = "logs" if "resourceLogs" in body else "metrics"
    for form in (body, to_protobuf(signal, body)):
        answer = echo.push(form, signal)
        assert answer.status_code == 400
        assert why.encode() in answer.content
    assert echo.metric("ingero_echo_records_refused_total", reason="size") == 2


def test_the_limits_are_settings(start):
    echo = start("max_attributes=2", "max_attribute_length=100")
    assert echo.push(metrics([point(a="x" * 100, b="y")], name="ok")).status_code == 200
    assert rejected(echo.push(metrics([point(a="x" * 101), point()])))[0] == 1
    assert rejected(echo.push(metrics([point(a="1", b="2", c="3"), point()])))[0] == 1


def test_what_fleet_and_agents_send_is_within_the_limits(start):
    """A verdict over a job of sixteen thousand ranks names each of those who waited."""
    from ingero.otlp.codec import build_attributes

    echo = start()
    victims = [f"rank {number} of node-{number // 8:05}" for number in range(16_384)]
    value = build_attributes({"ingero.verdict.victims": victims})[0].value
    from msgspec import json

    attributes = [{"key": "ingero.verdict.victims", "value": json.decode(json.encode(value))}]
    record = {
        "timeUnixNano": str(time.time_ns()),
        "eventName": "ingero.verdict",
        "attributes": attributes,
    }
    assert rejected(echo.push(logs([record]), "logs")) == (0, "")
    assert echo.sql("SELECT len(victims) FROM verdicts") == [[16_384]]


def test_unauthenticated_grpc_messages_are_not_read(start):
    """Before: 30 messages of 31 MB without a token took 950 MB."""
    echo = start()
    assert echo.push(metrics([point()])).status_code == 200
    before, most, is_over = echo.rss(), [0], threading.Event()

    def watch():
        while not is_over.is_set():
            most[0] = max(most[0], echo.rss() - before)
            is_over.wait(0.005)

    def send(_):
        with grpc.insecure_channel(f"127.0.0.1:{echo.grpc}") as channel:
            export = channel.unary_unary(f"/{SERVICES['metrics']}/Export")
            try:
                export(b"x" * (31 * 1000 * 1000), timeout=120)
            except grpc.RpcError as error:
                return error.code()

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(30) as pool:
        codes = set(pool.map(send, range(30)))
    is_over.set()
    watcher.join()
    assert codes == {grpc.StatusCode.UNAUTHENTICATED}
    assert most[0] < 64 * MIB
    assert len(echo.audit(status=401, transport="grpc")) == 30
    large = metrics([point(float(i)) for i in range(50_000)], name="large")
    assert echo.call(to_protobuf("metrics", large)) == b""


def test_a_grpc_message_over_the_limit_is_refused_and_the_listener_goes_on(start):
    echo = start("max_otlp_body=1MiB", "otlp_memory=2MiB")
    with pytest.raises(grpc.RpcError) as refused:
        echo.call(b"x" * (2 * MIB))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for _ in range(5):  # each call reserves half of what there is
        assert echo.call(to_protobuf("metrics", metrics([point()]))) == b""


def test_a_bearer_over_its_rate_waits_and_others_do_not(start):
    echo = start("otlp_rate_per_second=0.2", "otlp_rate_burst=3")
    body = to_protobuf("metrics", metrics([point()]))
    answers = [echo.push(body, token=TEAM_A) for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 5
    with pytest.raises(grpc.RpcError) as refused:
        echo.call(body, token=TEAM_A)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    trailing = dict(refused.value.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    assert 1 <= retry.retry_delay.seconds <= 5
    other = to_protobuf("metrics", metrics([point()], cluster="prod-9"))
    assert echo.push(other, token=TEAM_B).status_code == 200
    assert len(echo.audit(status=429, bearer_key_name="team-a")) == 3
    assert echo.metric("ingero_echo_ingest_requests_total", outcome="refused_pace") == 3


def test_a_bearer_that_has_written_its_quota_waits_and_one_that_may_only_read_or_write_is_told(
    tmp_path,
):
    more = f"""
- {{key_name: slow, token: {SLOW}, allowed_clusters: [train-1], rows_per_second: 2}}
- {{key_name: reader, token: {READER}, allowed_clusters: [train-1], scopes: [read]}}
- {{key_name: writer, token: {WRITER}, allowed_clusters: [train-1], scopes: [write]}}
- {{key_name: past, token: {PAST}, allowed_clusters: [train-1], expires: 2026-01-01}}
"""
    with Served(tmp_path, acl=ACL + more) as echo:
        body = to_protobuf("metrics", metrics([point(float(i)) for i in range(26)]))
        first, second = echo.push(body, token=SLOW), echo.push(body, token=SLOW)
        assert (first.status_code, second.status_code) == (200, 429)
        assert (
            2 <= int(second.headers["retry-after"]) <= 3
        )  # 26 rows are 13 s, of which 10 are free
        assert "written its quota" in second.text
        with pytest.raises(grpc.RpcError) as waits:
            echo.call(body, token=SLOW)
        assert waits.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert echo.metric("ingero_echo_ingest_requests_total", outcome="refused_quota") == 2
        assert echo.push(body, token=READER).status_code == 403
        with pytest.raises(grpc.RpcError) as refused:
            echo.call(body, token=READER)
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert echo.push(body, token=WRITER).status_code == 200
        assert echo.push(body, token=PAST).status_code == 401
        url = f"http://127.0.0.1:{echo.api}/api/v2/whoami"
        answers = {
            token: local_http.get(url, headers={"authorization": f"Bearer {token}"})
            for token in (READER, WRITER, PAST)
        }
        assert [one.status_code for one in answers.values()] == [200, 403, 401]
        assert answers[WRITER].json()["code"] == "insufficient_scope"
        assert len(echo.audit(status=403, bearer_key_name="reader")) == 2


def test_a_bearer_with_too_many_requests_at_once_is_refused_and_others_are_not(start):
    """Its requests are held open by bodies that do not arrive."""
    echo = start("otlp_max_in_flight=2")
    head = f"POST /v1/metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TEAM_A}\r\n"
    head += "content-type: application/x-protobuf\r\ncontent-length: 10\r\n\r\n"
    held = [socket.create_connection(("127.0.0.1", echo.otlp)) for _ in range(2)]
    for connection in held:
        connection.sendall(head.encode())
    deadline = time.monotonic() + 10
    status = 200
    while status != 429 and time.monotonic() < deadline:
        status = echo.push(metrics([point()]), token=TEAM_A).status_code
    assert status == 429
    assert echo.push(metrics([point()]), token=OPERATOR).status_code == 200
    for connection in held:
        connection.close()


def test_one_bearer_holds_half_of_the_bytes_at_most(start):
    echo = start("max_otlp_body=1MiB", "otlp_memory=2MiB")
    head = f"POST /v1/metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TEAM_A}\r\n"
    head += f"content-type: application/x-protobuf\r\ncontent-length: {MIB}\r\n\r\n"
    held = [socket.create_connection(("127.0.0.1", echo.otlp)) for _ in range(4)]
    for connection in held:
        connection.sendall(head.encode())
    for _ in range(3):
        other = metrics([point(x="v" * 1000)], cluster="prod-9")
        assert echo.push(other, token=TEAM_B).status_code == 200
        assert echo.call(to_protobuf("metrics", other), token=TEAM_B) == b""
    for connection in held:
        connection.close()


def test_wrong_tokens_are_slowed_and_right_ones_beside_them_are_not(start):
    echo = start()
    body = to_protobuf("metrics", metrics([point()]))

    def guess(number):
        return echo.push(body, token=f"guess-{number}").status_code

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(guess, range(24))) == {401}
        took = time.monotonic() - began
        assert took >= 1.0  # the last four waited for a second's ration
    assert echo.push(body).status_code == 200
    assert len(echo.audit(status=401)) == 24
    assert "guess-" not in echo.log.read_text()


def test_every_request_and_refusal_of_both_transports_is_a_line_with_the_digest_alone(start):
    from hashlib import sha256

    echo = start()
    good = metrics([point(), point(at_ns=2**63)])
    assert echo.push(good, token=TEAM_A).status_code == 200
    echo.call(to_protobuf("metrics", good), token=TEAM_A)
    assert echo.push(b"\xff", token=TEAM_A).status_code == 400
    assert echo.push(b"", "nowhere", TEAM_A).status_code == 404
    assert echo.push(b"", token=TEAM_A, kind="text/plain").status_code == 415
    digest = sha256(TEAM_A.encode()).hexdigest()
    lines = echo.audit()
    assert [(line["transport"], line["status"], line["path"]) for line in lines] == [
        ("http", 200, "/v1/metrics"),
        ("grpc", 200, "/v1/metrics"),
        ("http", 400, "/v1/metrics"),
        ("http", 404, "/v1/nowhere"),
        ("http", 415, "/v1/metrics"),
    ]
    assert {line["bearer_hash"] for line in lines} == {
        digest,
        "",
    }  # nobody is asked for a path that is not there
    for line in lines[:2]:
        assert (line["clusters"], line["n_rows"], line["n_refused"]) == (["train-1"], 1, 1)
        assert line["source_ip"] == "127.0.0.1"
        assert line["latency_ms"] > 0
    assert TEAM_A not in echo.log.read_text()


def test_a_small_body_that_unpacks_to_a_large_one_is_decoded_beside_the_others(start):
    import gzip

    echo = start()
    points = to_protobuf("metrics", metrics([point(float(i)) for i in range(20_000)]))
    answer = echo.push(gzip.compress(points), headers={"content-encoding": "gzip"})
    assert answer.status_code == 200
    bomb = gzip.compress(bytes(64 * MIB))
    assert echo.push(bomb, headers={"content-encoding": "gzip"}).status_code == 413
    assert local_http.get(f"http://127.0.0.1:{echo.health}/readyz").status_code == 200
