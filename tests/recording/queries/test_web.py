"""The dashboard's page, API and MCP over a real socket: what is answered, to whom, and with what headers."""

import json
import ssl
from importlib.resources import files

import anyio
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from tests.recording.scenarios.faults import FAULTS
from tests.recording.store.test_sql import ENDLESS, find_statements
from tests.serving.oauth_issuer import ISSUER, Issuer
from tests.support import local_http

from ingero.config import Endpoint
from ingero.errors import ConfigError
from ingero.model.events import Source
from ingero.recording.queries import web
from ingero.recording.queries.api import ANSWERS
from ingero.recording.queries.https_server import ListenSettings, check_settings, open_server
from ingero.recording.queries.web import _PAGE, NodeAccess, NodeApp, build_mcp
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.store.writer import RecordingWriter
from ingero.serving.oauth import OAuthSettings

LOOPBACK = Endpoint("127.0.0.1", 0)
JSON = {"content-type": "application/json"}
APIS = (*ANSWERS, "time")


@pytest.fixture
def starved(data_dir):
    return data_dir / "agent_dbs/pytorch-dataloader-starvation.db"


def visit(path, talk, **settings):
    """Serve on a free port and run a conversation with an HTTP client."""

    async def main():
        chosen = ListenSettings(LOOPBACK, **{"has_tls": False, **settings})
        async with open_server(path, chosen) as bound:
            scheme = "https" if chosen.has_tls else "http"
            async with local_http.open_async_client(
                base_url=f"{scheme}://{bound}", verify=False, timeout=120
            ) as client:
                return await talk(client)

    return anyio.run(main)


def test_page_and_its_files_come_from_the_package_alone(starved):
    async def talk(client):
        return [await client.get(path) for path in _PAGE]

    answers = visit(starved, talk)
    page = answers[0]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert {answer.url.path for answer in answers} == {
        "/",
        *(f"/{file.name}" for file in files("ingero.recording.queries").joinpath("page").iterdir()),
    } - {"/index.html"}
    for answer in answers:
        assert answer.status_code == 200
        assert "https://" not in answer.text
        assert "innerHTML" not in answer.text
    assert '<html lang="en">' in page.text


def test_every_endpoint_answers_about_the_recording(starved):
    async def talk(client):
        return {
            name: (await client.get(f"/api/v1/{name}")).raise_for_status().json() for name in APIS
        }

    said = visit(starved, talk)
    assert said["overview"]["event_count"] == 3807
    assert said["overview"]["gpu"]["model"].startswith("NVIDIA GeForce RTX 4090")
    assert said["incidents"]["incidents"][0]["rule"] == "input_starvation"
    assert said["chains"]["chains"][0]["root_cause"] == "computing on the host"
    assert {"operation", "source", "count", "p50_us", "p95_us", "p99_us"} <= set(
        said["ops"]["ops"][0]
    )
    assert said["overview"]["chain_count"] == len(said["chains"]["chains"])
    assert len(said["snapshots"]["snapshots"]) == 40
    assert said["overview"]["top_chain"]["root_cause"] == "computing on the host"
    assert (
        said["overview"]["system"]["cpu_percent"]
        == said["snapshots"]["snapshots"][-1]["cpu_percent"]
    )
    available = {one["id"]: one["available"] for one in said["capabilities"]}
    assert (available["cuda_ops"], available["block_io"], available["gpu_util"]) == (
        True,
        False,
        False,
    )
    assert len(available) >= 26
    assert said["time"]["timestamp_ns"] > 1_700_000_000 * 10**9


def test_chain_has_the_documented_figures_of_its_operation(tmp_path):
    FAULTS["sync_bound"]().write(tmp_path / "r.db")

    async def talk(client):
        return (await client.get("/api/v1/chains")).json()["chains"][0]

    chain = visit(tmp_path / "r.db", talk)
    assert chain["cuda_op"] == "cudaStreamSync"
    assert chain["tail_ratio"] == pytest.approx(
        chain["cuda_p99_us"] / chain["cuda_p50_us"], abs=0.01
    )
    assert chain["timeline"][0]["detail"].endswith(chain["root_cause"])


def test_graph_calls_are_summed_and_listed_with_their_handles(tmp_path):
    FAULTS["graph_recaptured"]().write(tmp_path / "g.db")

    async def talk(client):
        names = ("graph-metrics", "graph-events")
        return [(await client.get(f"/api/v1/{name}")).json() for name in names]

    metrics, listed = visit(tmp_path / "g.db", talk)
    assert (metrics["captures"], metrics["instantiations"], metrics["launches"]) == (40, 40, 40)
    assert metrics["avg_instantiate_dur_us"] == 2000.0
    assert 300 < metrics["avg_capture_dur_us"] < 1000  # ten launches between its two calls
    assert len(listed["events"]) == 100
    launch = next(one for one in listed["events"] if one["op"] == "graphLaunch")
    assert launch["exec_handle"].startswith("0x")


def test_unchanged_recording_is_not_answered_twice_and_a_changed_one_is(tmp_path):
    path = tmp_path / "r.db"
    built = RecordingBuilder()
    built.call((Source.CUDA, 3), 0, 10, pid=7)
    built.write(path)

    async def talk(client):
        first = await client.get("/api/v1/ops?last=10")
        known = {"if-none-match": first.headers["etag"]}
        same = await client.get("/api/v1/ops?last=10", headers=known)
        other = await client.get("/api/v1/ops?last=11", headers=known)
        with RecordingWriter(path, "node-0") as writer:
            writer.put_events(built.events())
        grown = await client.get("/api/v1/ops?last=10", headers=known)
        return same, other, grown

    same, other, grown = visit(path, talk)
    assert (same.status_code, same.content) == (304, b"")
    assert other.status_code == 200
    assert grown.json()["ops"][0]["rows"] == 2


def test_part_is_the_newest_rows_and_wrong_parameters_are_told(starved):
    async def talk(client):
        newest = (await client.get("/api/v1/incidents?last=100")).json()["window"]
        wrong = [
            await client.get(f"/api/v1/{path}")
            for path in ("ops?last=many", "ops?pid=-1", "ops?since=soon", "timeline?bins=0",
                         "timeline?from_s=nan", "stacks?op=cudaMallocc", "timeline?bins=2.9",
                         "timeline?from_s=2&to_s=1", "timeline?from_s=1&to_s=0")
        ]  # fmt: skip
        return newest, wrong

    newest, wrong = visit(starved, talk)
    assert (newest["events"], newest["events_stored"], newest["truncated"]) == (100, 3807, True)
    assert [answer.status_code for answer in wrong] == [400] * 9
    assert "many" not in wrong[0].json()["error"]


def test_overview_counts_rows_not_row_numbers(data_dir):
    async def talk(client):
        return (await client.get("/api/v1/overview")).json()

    # An excerpt: two hundred rows whose row numbers go on to thousands.
    assert visit(data_dir / "agent_dbs/sample-gpu-node-01.db", talk)["event_count"] == 200


def test_sql_is_answered_and_writing_refused(starved):
    async def talk(client):
        read = await client.post("/api/v1/query", json={"sql": "SELECT count(*) AS n FROM events"})
        write = await client.post(
            "/api/v1/query", json={"sql": "WITH x AS (SELECT 1) DELETE\tFROM events"}
        )
        wrong = await client.post("/api/v1/query", content=b"{", headers=JSON)
        return read, write, wrong

    read, write, wrong = visit(starved, talk)
    assert read.json() == {"columns": ["n"], "rows": [[3807]], "truncated": False}
    assert (write.status_code, wrong.status_code) == (400, 400)
    assert "not authorized" in write.json()["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe{",
        b'{"sql": "SELECT \xff"}',
        b'{"sql": "SELECT \'\xed\xa0\x80\'"}',
        b'{"\xff": 1}',
        b'{"sql": "SELECT \'\\ud800\'"}',
        b'{"sql": ' + b"[" * 100_000,
        b'{"sql": "SELECT 1", "limit": NaN}',
        b'{"sql": "SELECT 1", "limit": 1e999}',
        b'{"sql": "SELECT 1", "limit": -1}',
        b'{"sql": "SELECT 1", "limit": 0}',
        b"null",
        b"",
    ],
    ids=range(12),
)
def test_a_body_that_is_no_statement_is_refused_with_what_to_send(starved, body):
    async def talk(client):
        return await client.post("/api/v1/query", content=body, headers=JSON)

    answer = visit(starved, talk)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith('send {"sql": …, "limit": …}: ')


def test_an_answer_to_sql_ends_at_a_megabyte(starved):
    async def talk(client):
        sql = "SELECT hex(zeroblob(100000)) FROM events"
        return await client.post("/api/v1/query", json={"sql": sql})

    answer = visit(starved, talk).json()
    assert (len(answer["rows"]), answer["truncated"]) == (5, True)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/api/v1/query", {"sql": "SELECT 1"}, 415),
        ("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, 400),
    ],
)
def test_a_post_that_a_foreign_page_could_send_is_refused(starved, path, body, status):
    kinds = ("application/json", "text/plain", "application/x-www-form-urlencoded", None)

    async def talk(client):
        accept = {"accept": "application/json, text/event-stream"}
        return [
            await client.post(
                path,
                content=json.dumps(body).encode(),
                headers=accept | ({"content-type": kind} if kind else {}),
            )
            for kind in kinds
        ]

    assert [answer.status_code for answer in visit(starved, talk)] == [200, *[status] * 3]


ODD_ID = "the id of a request is a text or a whole number"
NO_MESSAGE = "this is no JSON-RPC message"
ODD_IDS = ("1.5", "1.0", "true", "[1]", '{"a": 1}')
REFUSED = [
    *((f'{{"jsonrpc": "2.0", "id": {one}, "method": "ping"}}', None, ODD_ID) for one in ODD_IDS),
    ('{"id": 2, "method": "ping"}', 2, NO_MESSAGE),
    ('{"jsonrpc": "2.0", "id": "a", "method": "tools/call", "params": [1]}', "a", NO_MESSAGE),
]


@pytest.mark.parametrize(("body", "request_id", "message"), REFUSED)
def test_what_is_no_request_of_mcp_is_refused_under_its_id(starved, body, request_id, message):
    async def talk(client):
        accept = {"accept": "application/json, text/event-stream"}
        return await client.post("/mcp", content=body, headers=JSON | accept)

    answer = visit(starved, talk)
    assert answer.status_code == 400
    refused = {"code": -32600, "message": message}
    assert answer.json() == {"jsonrpc": "2.0", "id": request_id, "error": refused}


def post_in_parts(path, target, n_parts, pause_s=0.0):
    """POST to the application itself; its status, and how many parts of 64 KiB it took."""
    app = NodeApp(path, NodeAccess("", frozenset({"localhost"})), build_mcp(path))
    taken, sent = 0, []

    async def receive():
        nonlocal taken
        taken += 1
        await anyio.sleep(pause_s)
        return {"type": "http.request", "body": b"x" * 65536, "more_body": taken < n_parts}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": target, "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    anyio.run(app, scope, receive, send)
    return sent[0]["status"], taken, dict(sent[0]["headers"])


async def leave(app, method, target, body, when):
    """Ask the application itself and go away once ``when`` is true; what it sent."""
    gone, sent = anyio.Event(), []
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive():
        part = next(parts, None)
        if part is None:
            await gone.wait()
            return {"type": "http.disconnect"}
        return part

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": target, "query_string": b"", "root_path": "",
        "headers": [
            (b"host", b"localhost"), (b"content-type", b"application/json"),
            (b"accept", b"application/json, text/event-stream"),
        ],
    }  # fmt: skip
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app, scope, receive, send)
        while not when():  # noqa: ASYNC110 - what is waited for has no event
            await anyio.sleep(0.05)
        gone.set()
    return sent


CALL = {"name": "run_sql", "arguments": {"query": ENDLESS[0]}}


@pytest.mark.parametrize(
    ("target", "body"),
    [
        ("/api/v1/query", {"sql": ENDLESS[0]}),
        ("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL}),
    ],
)
def test_a_statement_ends_when_its_client_goes_away(tmp_path, target, body):
    path = tmp_path / "r.db"
    RecordingBuilder().write(path)
    mcp = build_mcp(path)
    app = NodeApp(path, NodeAccess("", frozenset({"localhost"})), mcp)

    async def main():
        async with mcp.run():
            return await leave(
                app, "POST", target, json.dumps(body).encode(), lambda: find_statements(path)
            )

    assert anyio.run(main) == []
    assert find_statements(path) == []


def test_a_question_that_waits_for_another_leaves_with_its_client(starved):
    app = NodeApp(starved, NodeAccess("", frozenset({"localhost"})))

    async def main():
        await app._one_at_a_time.acquire_on_behalf_of("another question")
        with anyio.fail_after(20):
            return await leave(
                app, "GET", "/api/v1/ops", b"",
                lambda: app._one_at_a_time.statistics().tasks_waiting,
            )  # fmt: skip

    assert anyio.run(main) == []


@pytest.mark.parametrize(("target", "most"), [("/api/v1/query", 5), ("/mcp", 65)])
def test_a_body_is_not_read_beyond_its_limit(starved, target, most):
    status, taken, headers = post_in_parts(starved, target, 1000)
    assert (status, taken, headers[b"connection"]) == (413, most, b"close")


@pytest.mark.parametrize("target", ["/api/v1/query", "/mcp"])
def test_a_body_that_does_not_arrive_is_not_waited_for(starved, target, monkeypatch):
    monkeypatch.setattr(web, "_BODY_S", 0.1)
    status, taken, headers = post_in_parts(starved, target, 2, pause_s=60)
    assert (status, taken, headers[b"connection"]) == (408, 1, b"close")


def test_bearer_guards_every_answer_but_not_the_empty_page(starved):
    async def talk(client):
        without = [await client.get(f"/api/v1/{name}") for name in APIS]
        wrong = await client.get("/api/v1/overview", headers={"authorization": "Bearer nonsense"})
        right = await client.get("/api/v1/overview", headers={"authorization": "Bearer s3cret"})
        mcp = await client.post("/mcp", json={})
        return without, wrong, right, mcp, await client.get("/")

    without, wrong, right, mcp, page = visit(starved, talk, token="s3cret")
    assert {answer.status_code for answer in (*without, wrong, mcp)} == {401}
    assert (right.status_code, page.status_code) == (200, 200)


def test_request_for_another_host_is_refused(starved):
    async def talk(client):
        return [
            (await client.get("/api/v1/overview", headers={"host": host})).status_code
            for host in ("evil.example", "localhost:1", "gpu-7.example")
        ]

    assert visit(starved, talk, hosts=("gpu-7.example",)) == [421, 200, 200]


def test_tls_is_on_with_a_certificate_of_its_own_by_default(starved):
    assert ListenSettings(LOOPBACK).has_tls

    async def talk(client):
        answer = await client.get("/api/v1/overview")
        return answer, answer.extensions["network_stream"].get_extra_info("ssl_object").version()

    answer, version = visit(starved, talk, has_tls=True)
    assert (answer.status_code, version) == (200, "TLSv1.3")
    assert ssl.HAS_TLSv1_3


@pytest.mark.parametrize(
    "settings",
    [
        {"endpoint": Endpoint("", 8080), "has_tls": False, "token": "x"},
        {"endpoint": Endpoint("0.0.0.0", 8080)},
        {"endpoint": LOOPBACK, "cert_file": "c.pem"},
    ],
)
def test_unsafe_listening_is_refused(settings):
    with pytest.raises(ConfigError):
        check_settings(ListenSettings(**settings))


def test_a_key_that_others_may_read_is_refused_unless_that_is_allowed(tmp_path, monkeypatch):
    key = tmp_path / "key.pem"
    key.touch(mode=0o644)
    settings = ListenSettings(LOOPBACK, cert_file="c.pem", key_file=str(key))
    with pytest.raises(ConfigError, match="644"):
        check_settings(settings)
    monkeypatch.setenv("INGERO_TLS_ALLOW_LOOSE_KEY_PERMS", "1")
    check_settings(settings)


def test_missing_recording_is_said_and_the_server_stays(tmp_path):
    async def talk(client):
        return [await client.get("/api/v1/overview") for _ in range(2)]

    for answer in visit(tmp_path / "later.db", talk):
        assert answer.status_code == 503
        assert "no such file" in answer.json()["error"]


def test_official_client_asks_over_http(starved):
    async def main():
        async with (
            open_server(starved, ListenSettings(LOOPBACK, has_tls=False)) as bound,
            streamable_http_client(f"http://{bound}/mcp") as streams,
            ClientSession(*streams[:2]) as session,
        ):
            await session.initialize()
            tools = await session.list_tools()
            answer = await session.call_tool("investigate", {})
            return tools, answer.structured_content

    tools, answer = anyio.run(main)
    assert len(tools.tools) == 12
    assert answer["says"].startswith("Input starvation")
    assert json.dumps(answer)


def test_an_access_token_is_taken_next_to_the_bearer(starved, tmp_path):
    issuer = Issuer(tmp_path / "jwks.json")
    resource = "https://gpu-7.example/mcp"
    oauth = OAuthSettings(ISSUER, resource, str(issuer.file), name="Ingero")

    def of(token):
        return {"authorization": f"Bearer {token}"} if token else {}

    async def talk(client):
        bearers = ("", "secret", "wrong", issuer.sign(aud=resource), issuer.sign(aud="https://x"))
        statuses = [
            (await client.get("/api/v1/overview", headers=of(token))).status_code
            for token in bearers
        ]
        refused = await client.post("/mcp", json={})
        return statuses, refused, await client.get("/.well-known/oauth-protected-resource/mcp")

    statuses, refused, document = visit(starved, talk, token="secret", oauth=oauth)
    assert statuses == [401, 200, 401, 200, 401]
    assert refused.headers["www-authenticate"] == (
        'Bearer resource_metadata="https://gpu-7.example/.well-known/oauth-protected-resource/mcp"'
    )
    assert document.json() == {
        "resource": resource,
        "authorization_servers": [ISSUER],
        "bearer_methods_supported": ["header"],
        "resource_name": "Ingero",
    }
    only_oauth, _, _ = visit(starved, talk, oauth=oauth)
    assert only_oauth == [401, 401, 401, 200, 401]
