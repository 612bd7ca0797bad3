"""Connections as bytes: what a well-behaved client never shows."""

import socket

import pytest
from tests.support import local_http

from ingero.otlp.codec import build_gauge, build_metrics, build_number, encode_json

PUSH = encode_json(
    build_metrics(
        {"ingero.node.id": "n", "ingero.cluster.id": "c"},
        [build_gauge("ingero.node.health_score", [build_number(0.9, 1)])],
        "s",
    )
)


def head(body=PUSH, *lines, version="1.1"):
    fixed = ("Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}")
    text = "\r\n".join((f"POST /v1/metrics HTTP/{version}", *fixed, *lines))
    return f"{text}\r\n\r\n".encode()


def dial(running):
    return socket.create_connection((running.http.host, running.http.port), timeout=20)


def read_answers(link, n_answers):
    """Status lines of this many answers, each ended by its JSON body."""
    got = b""
    while got.count(b"\r\n\r\n") < n_answers or not got.endswith(b"}"):
        part = link.recv(65_536)
        if not part:
            break
        got += part
    return [line for line in got.split(b"\r\n") if line.find(b"HTTP/1.1 ") >= 0], got


def read_to_end(link):
    got = b""
    while part := link.recv(65_536):
        got += part
    return got


def test_pipelined_pushes_are_answered_in_order(serve):
    running = serve()
    with dial(running) as link:
        link.sendall((head() + PUSH) * 3 + head(b"{") + b"{" + head() + PUSH)
        statuses, _ = read_answers(link, 5)
    codes = [status[status.index(b"HTTP") :].split()[1] for status in statuses]
    assert codes == [b"200", b"200", b"200", b"400", b"200"]
    assert len(running.cluster.batches) == 4


def test_a_sender_that_asks_to_close_reads_all_its_answers_first(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(head() + PUSH + head(PUSH, "Connection: close") + PUSH)
        got = read_to_end(link)
    assert got.count(b"HTTP/1.1 200 OK") == 2


def test_interim_answers_keep_their_place(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(head() + PUSH + head(PUSH, "Expect: 100-continue"))
        link.sendall(PUSH)
        statuses, _ = read_answers(link, 3)
    codes = [status[status.index(b"HTTP") :].split()[1] for status in statuses]
    assert codes == [b"200", b"100", b"200"]


def test_a_push_in_single_bytes_is_taken(serve):
    running = serve()
    with dial(running) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in head() + PUSH:
            link.send(bytes([byte]))
        statuses, _ = read_answers(link, 1)
    assert statuses == [b"HTTP/1.1 200 OK"]


def test_a_sender_that_asks_first_is_told_to_continue(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(head(PUSH, "Expect: 100-continue"))
        assert link.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        link.sendall(PUSH)
        statuses, _ = read_answers(link, 1)
    assert statuses == [b"HTTP/1.1 200 OK"]


def test_a_sender_that_asks_first_need_not_send_what_would_be_refused(serve):
    running = serve({"max_request_body_size": 10})
    with dial(running) as link:
        link.sendall(head(PUSH, "Expect: 100-continue"))
        got = read_to_end(link)
    assert got.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in got


def test_an_offer_to_upgrade_is_ignored(serve):
    running = serve()
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABk")
    with dial(running) as link:
        for _ in range(2):
            link.sendall(head(PUSH, *offer) + PUSH)
            statuses, _ = read_answers(link, 1)
            assert statuses == [b"HTTP/1.1 200 OK"]
    assert len(running.cluster.batches) == 2


def test_a_tunnel_is_refused(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(b"CONNECT example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_to_end(link).startswith(b"HTTP/1.1 405 ")


def test_http_1_0_gets_its_answer_and_the_end(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(head(version="1.0") + PUSH)
        got = read_to_end(link)
    assert b" 200 " in got
    assert b"connection: close" in got


@pytest.mark.parametrize(
    "noise",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"hello\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"\0" * 9],
)
def test_what_is_not_http_is_a_400_and_the_end(serve, noise):
    running = serve()
    with dial(running) as link:
        link.sendall(noise)
        assert read_to_end(link).startswith(b"HTTP/1.1 400 ")
    assert running.refused("bad_request") == 1


def test_a_contradicting_length_is_not_smuggled(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(head(PUSH, "Transfer-Encoding: chunked") + b"0\r\n\r\n")
        assert read_to_end(link).startswith(b"HTTP/1.1 400 ")
    assert running.cluster.batches == []


def test_an_endless_head_is_a_431_and_bounded(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(b"POST /v1/metrics HTTP/1.1\r\nX: " + b"x" * 100_000)
        assert b" 431 " in link.recv(4096)
    assert running.refused("too_large") == 1


def test_a_head_that_stops_is_ended_in_time(serve):
    running = serve({"read_timeout": "50ms"})
    with dial(running) as link:
        link.sendall(b"POST /v1/metrics HTTP/1.1\r\n")
        assert b" 408 " in read_to_end(link)


def test_a_head_that_trickles_is_ended_in_time_too(serve):
    running = serve({"read_timeout": "100ms"})
    got = b""
    with dial(running) as link:
        link.settimeout(0.01)
        link.sendall(b"POST /v1/metrics HTTP/1.1\r\nX: ")
        while not got:
            link.send(b"x")
            try:
                got = link.recv(4096)
            except TimeoutError:
                continue
    assert b" 408 " in got


def test_an_idle_connection_is_closed_without_an_answer(serve):
    running = serve({"idle_timeout": "50ms"})
    with dial(running) as link:
        assert read_to_end(link) == b""
    with dial(running) as link:
        link.sendall(head() + PUSH)
        got = read_to_end(link)
    assert got.count(b"HTTP/1.1") == 1


def test_after_a_close_nothing_more_is_taken_from_the_connection(serve):
    running = serve({"keep_alives_enabled": False})
    with dial(running) as link:
        link.sendall((head() + PUSH) * 3)
        assert read_to_end(link).count(b"HTTP/1.1 200") == 1
    assert len(running.cluster.batches) == 1


def test_a_fault_in_a_processor_is_a_500_and_the_receiver_lives(serve, caplog):
    running = serve()
    running.cluster.raises = ZeroDivisionError("a bug")
    answer = local_http.post(
        running.url(), content=PUSH, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (500, 13)
    assert "a bug" in caplog.text
    assert running.refused("internal") == 1
    running.cluster.raises = None
    answer = local_http.post(
        running.url(), content=PUSH, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 200


def test_a_head_request_gets_no_body(serve):
    running = serve()
    with dial(running) as link:
        link.sendall(b"HEAD /v1/metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        got = read_to_end(link)
    assert got.startswith(b"HTTP/1.1 405 ")
    assert got.endswith(b"\r\n\r\n")


def test_the_absolute_form_is_understood(serve):
    running = serve()
    request = head().replace(b" /v1/metrics ", b" http://fleet:4318/v1/metrics?cluster_id=a%20b ")
    with dial(running) as link:
        link.sendall(request + PUSH)
        statuses, _ = read_answers(link, 1)
    assert statuses == [b"HTTP/1.1 200 OK"]
    assert running.cluster.batches[0].push.cluster_hint == "a b"


def test_a_request_in_flight_finishes_while_the_receiver_stops(serve):
    running = serve()
    with dial(running) as idle, dial(running) as busy:
        busy.sendall(head() + PUSH + head())
        read_answers(busy, 1)
        stopping = running.start_stopping()
        assert read_to_end(idle) == b""
        busy.sendall(PUSH)
        got = read_to_end(busy)
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in got
    stopping.result(20)
    assert len(running.cluster.batches) == 2


def test_answers_that_nobody_reads_stop_the_reading(serve):
    running = serve()
    body = b"{}"
    with dial(running) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        link.settimeout(1)
        sent = 0
        try:
            while sent < 256 << 20:
                sent += link.send((head(body) + body) * 500)
        except TimeoutError:
            pass
    assert sent < 256 << 20
