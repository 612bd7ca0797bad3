"""The API and MCP listener of the real program: slow clients, hostile bodies, drain, audit, who sees which numbers."""

import asyncio
import json
import signal
import socket
from contextlib import AsyncExitStack
from hashlib import sha256

import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from tests.echo.service.conftest import ALL, ONE, TWO
from tests.echo.serving import ACL, THREE, Served
from tests.support import local_http

DEEP = b"[" * 100_000
SUMMARY = "/api/v2/tools/fleet.cluster.summary"


@pytest.fixture(scope="module")
def echo(tmp_path_factory):
    settings = {
        "head_timeout": "300ms",
        "body_timeout": "300ms",
        "max_connections_per_peer": 24,
        "max_in_flight": 100,
    }
    with Served(tmp_path_factory.mktemp("echo"), **settings) as served:
        yield served


def read_all(port, sent):
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.sendall(sent)
        link.settimeout(30)
        parts = []
        while part := link.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.mark.parametrize("listener", ["api", "otlp", "health"])
def test_a_slow_head_is_answered_408_and_a_silent_connection_is_closed(echo, listener):
    port = getattr(echo, listener)
    assert read_all(port, b"GET / HTTP/1.1\r\nhost:").startswith(b"HTTP/1.1 408 ")
    assert read_all(port, b"") == b""


@pytest.mark.parametrize("path", ["/mcp", "/", "/api/v2/sql", SUMMARY])
def test_a_slow_body_is_answered_408_and_closed(echo, path):
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {ONE}\r\n"
        "accept: application/json, text/event-stream\r\n"
        "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    answer = read_all(echo.api, head.encode())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert b"x-request-id" in answer


@pytest.mark.parametrize("listener", ["api", "otlp", "health"])
def test_connections_of_one_peer_are_capped(echo, listener):
    port = getattr(echo, listener)
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]
    refused = read_all(port, b"")
    for link in held:
        link.close()
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after" in refused


HOSTILE = [
    ("/api/v2/sql", DEEP),
    ("/api/v2/sql", b'{"sql":' + DEEP),
    (SUMMARY, DEEP),
    (SUMMARY, b'{"args":' + DEEP),
    (SUMMARY, b'{"args":{"cluster_id":' + b'{"a":' * 900 + b"1" + b"}" * 901 + b"}"),
    (SUMMARY, b'{"args":{"cluster_id":"\xff"}}'),
    (SUMMARY, b'{"args":{"cluster_id":"\\ud800"}}'),
    (SUMMARY, b'{"args":{"limit":1e400}}'),
    (SUMMARY, b'{"args":{"limit":' + b"9" * 5000 + b"}}"),
    ("/api/v2/sql", b'{"sql":"SELECT 1","limit":' + b"9" * 5000 + b"}"),
    (SUMMARY, b'{"args":{"cluster_id":"c1\\n"}}'),
    (SUMMARY, b'{"args":{"time_window":"1h\\n"}}'),
    ("/mcp", DEEP),
    ("/mcp", b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":' + DEEP),
    ("/mcp", b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"a":"\xff"}}'),
    ("/mcp", b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}'),
]


@pytest.mark.parametrize("at", range(len(HOSTILE)))
def test_a_hostile_body_is_a_400_that_is_seen(echo, at):
    path, body = HOSTILE[at]
    accept = "application/json, text/event-stream" if path == "/mcp" else "application/json"
    answer = echo.post(path, body, ONE, accept=accept, **{"x-request-id": f"hostile-{at}"})
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-request-id"] == f"hostile-{at}"
    while not (found := [one for one in echo.audit() if one["request_id"] == f"hostile-{at}"]):
        pass  # it is written after the answer
    assert [(line["status"], line["path"]) for line in found] == [(400, path)]
    assert "Traceback" not in echo.log.read_text()


NO_MESSAGES = [
    ('{"id": 2, "method": "ping"}', 2, -32600),
    ('[{"jsonrpc": "2.0", "id": 1, "method": "ping"}]', None, -32600),
    ('{"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": [1]}', 7, -32600),
    ('{"jsonrpc": "2.0", "id": "ä", "method": "ping", "params": "\\ud800"}', "ä", -32700),
    ("hello", None, -32700),
    ("", None, -32700),
]


@pytest.mark.parametrize("version", ["2025-06-18", "2026-07-28"])
@pytest.mark.parametrize(("body", "request_id", "code"), NO_MESSAGES)
def test_what_is_no_message_of_mcp_is_answered_under_its_id_and_in_plain_words(
    echo, body, request_id, code, version
):
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": version}
    answer = echo.post("/mcp", body.encode(), ONE, **headers)
    assert answer.status_code == 400
    said = answer.json()
    assert (said["id"], said["error"]["code"], set(said["error"])) == (
        *(request_id, code),
        {"code", "message"},
    )
    assert "pydantic" not in answer.text


def test_the_audit_line_has_each_value_under_a_key_of_its_own(echo):
    assert echo.get("/api/v2/whoami", ONE, **{"x-request-id": "plain"}).status_code == 200
    while not (found := [one for one in echo.audit() if one["request_id"] == "plain"]):
        pass
    (line,) = found
    assert line.keys() == {
        *("level", "ts", "logger", "msg", "event", "request_id", "bearer_hash", "bearer_key_name"),
        *("source_ip", "method", "path", "status", "latency_ms"),
    }
    assert line["bearer_hash"] == sha256(ONE.encode()).hexdigest()
    assert (line["event"], line["status"]) == ("request", 200)


def test_a_scoped_token_is_shown_its_own_numbers_and_an_operator_everybodys(echo):
    for token in (ALL, ONE, TWO):
        assert echo.get("/api/v2/whoami", token).status_code == 200
    names = {token: sha256(token.encode()).hexdigest()[:12] for token in (ALL, ONE, TWO)}
    mine = echo.get("/metrics", ONE).text
    samples = [line for line in mine.splitlines() if not line.startswith("#")]
    assert samples
    assert all(f'bearer="{names[ONE]}"' in line for line in samples)
    everything = echo.get("/metrics", ALL).text
    for name in names.values():
        assert f'ingero_echo_bearer_requests_total{{bearer="{name}",handler="api"' in everything
    assert "ingero_echo_rows_total" in everything
    assert "ingero_echo_requests_total" in everything


def test_wrong_tokens_are_counted_and_slowed_and_a_right_one_is_not(tmp_path):
    with Served(tmp_path) as fresh:
        answers = [fresh.get("/api/v2/whoami", f"wrong-{i}") for i in range(41)]
        assert [one.status_code for one in answers[:20]] == [401] * 20
        slowed = [one for one in answers if one.status_code != 401]  # one a second may pass
        assert slowed
        for one in slowed:
            assert (one.status_code, one.json()["code"]) == (429, "too_many_bad_bearers")
            assert "retry-after" in one.headers
        assert fresh.get("/api/v2/whoami", ONE).status_code == 200
        text = fresh.get("/metrics", ALL).text
        assert 'ingero_echo_bad_bearers_total{outcome="refused"}' in text
        assert 'ingero_echo_bad_bearers_total{outcome="slowed"}' in text
        while len(fresh.audit()) < 43:
            pass


def ask_mcp(echo, **headers):
    body = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    accept = "application/json, text/event-stream"
    return echo.post("/mcp", json.dumps(body), ONE, accept=accept, **headers).status_code


def test_mcp_answers_loopbacks_names_and_pages_and_no_others(echo):
    port = echo.api
    assert ask_mcp(echo) == 200
    assert ask_mcp(echo, host="localhost") == 200
    assert ask_mcp(echo, host=f"[::1]:{port}", origin=f"http://localhost:{port}") == 200
    assert ask_mcp(echo, host="evil.example") == 421
    assert ask_mcp(echo, host=f"127.0.0.1.evil.example:{port}") == 421
    assert ask_mcp(echo, origin="http://evil.example") == 403
    assert ask_mcp(echo, origin="null") == 403


def test_mcp_answers_what_it_is_told_to(tmp_path):
    allowed = {"allowed_hosts": "[echo.example:*]", "allowed_origins": "['https://tools.example']"}
    with Served(tmp_path, **allowed) as told:
        assert ask_mcp(told, host="echo.example:443", origin="https://tools.example") == 200
        assert ask_mcp(told, host="echo.example", origin="https://other.example") == 403
        assert ask_mcp(told, host="other.example") == 421


def test_a_revoked_token_and_one_without_grace_end_at_sighup(tmp_path):
    with Served(tmp_path) as echo:

        def hang_up(text, n_rotations):
            echo.acl.write_text(text)
            echo.process.send_signal(signal.SIGHUP)
            while sum(line.get("event") == "bearer_rotation_applied" for line in echo.audit()) < (
                n_rotations
            ):
                pass

        statuses = lambda: [  # noqa: E731 - asked twice
            echo.get("/api/v2/whoami", token).status_code for token in (ALL, ONE, TWO, THREE)
        ]
        assert statuses() == [200] * 4
        kept = "\n".join(line for line in ACL.splitlines() if "operator" in line)
        hang_up(kept + f"\n- {{key_name: team-one, token: {ONE}, revoked: true}}\n", 1)
        assert statuses() == [200, 401, 200, 401]  # team-two has the server's grace


def test_a_drain_does_not_wait_for_an_mcp_stream_and_leaves_no_traceback(tmp_path):
    echo = Served(tmp_path, drain="20s")

    async def scenario():
        async with local_http.open_async_client(timeout=120) as client:
            headers = {"authorization": f"Bearer {ONE}", "accept": "text/event-stream"}
            async with client.stream("GET", f"{echo.url}/mcp", headers=headers) as stream:
                assert stream.status_code == 200
                echo.process.send_signal(signal.SIGTERM)
                async for _ in stream.aiter_bytes():
                    pass  # ended by the server, in order

    asyncio.run(scenario())
    assert echo.end() == 0
    lines = echo.lines()
    assert "Traceback" not in echo.log.read_text()
    assert not [line for line in lines if line["level"] == "error"]
    (line,) = (line for line in echo.audit() if line["path"] == "/mcp")
    assert line["status"] == 200


def test_standing_streams_of_a_bearer_take_no_place_of_its_requests(tmp_path):
    headers = {"authorization": f"Bearer {ONE}", "accept": "text/event-stream"}

    async def scenario(echo):
        async with (
            local_http.open_async_client(timeout=120) as client,
            AsyncExitStack() as open_ones,
        ):
            streams = [
                await open_ones.enter_async_context(
                    client.stream("GET", f"{echo.url}/mcp", headers=headers)
                )
                for _ in range(3)
            ]
            await streams[2].aread()
            last = streams[2]
            answer = await client.get(f"{echo.url}/api/v2/whoami", headers=headers)
            return [one.status_code for one in streams], last.headers["allow"], answer.status_code

    with Served(tmp_path, max_in_flight=2) as echo:
        assert asyncio.run(scenario(echo)) == ([200, 200, 405], "POST", 200)


def test_a_drain_ends_what_does_not_end_by_itself_when_its_time_is_over(tmp_path):
    echo = Served(tmp_path, drain="300ms", sql_timeout="120s")
    body = json.dumps({
        "sql": "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT 1 FROM r) SELECT count(*) FROM r"
    })
    head = (
        f"POST /api/v2/sql HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ONE}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection(("127.0.0.1", echo.api)) as link:
        link.sendall(head.encode())
        assert echo.get("/api/v2/whoami", ONE).status_code == 200
        assert echo.end() == 0  # in two minutes it would have answered by itself
    assert "Traceback" not in echo.log.read_text()


def test_the_official_client_works_through_all_of_this(echo):
    async def scenario():
        headers = {"authorization": f"Bearer {ONE}"}
        async with local_http.open_async_client(headers=headers, timeout=120) as http:
            transport = streamable_http_client(f"{echo.url}/mcp", http_client=http)
            async with Client(transport) as client:
                tools = await client.list_tools()
                answer = await client.call_tool("fleet.cluster.summary", {})
                return len(tools.tools), answer.is_error

    assert asyncio.run(scenario()) == (20, False)
