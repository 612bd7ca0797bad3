"""The official client lists and calls every tool of `ingero mcp`, over a real pipe."""

import http.server
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import anyio
import mcp_types as types
import pytest
from mcp import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from tests.recording.scenarios.faults import FAULTS
from tests.recording.store.test_sql import ENDLESS, find_statements

from ingero.errors import BadDataError
from ingero.model.events import Source
from ingero.model.untrusted import clean
from ingero.recording.queries import window
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.mcp import build_call
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.catalog import SCENARIOS
from ingero.recording.store.event_loader import LoadFilter
from ingero.serving.query import get_query

DOCUMENTED = {
    "get_check",
    "get_trace_stats",
    "get_causal_chains",
    "run_demo",
    "get_test_report",
    "run_sql",
    "get_stacks",
    "graph_lifecycle",
    "graph_frequency",
    "investigate",
    "query_fleet",
    "pagerduty_trigger",
}
OUTSIDE = {
    "query_fleet": {"action": "overview"},
    "pagerduty_trigger": {"summary": "GPU 3 is starved", "severity": "warning"},
}  # fmt: skip


def converse(path, talk, *options, **environment):
    """Run a conversation with a server process over its pipes."""

    async def main():
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "ingero", "mcp", "--db", str(path), *options],
            env={**os.environ, **environment},
        )
        async with stdio_client(server) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            return await talk(session)

    return anyio.run(main)


@pytest.fixture
def graphs_db(tmp_path):
    FAULTS["graph_recaptured"]().write(tmp_path / "g.db")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/test-report.json").write_text('{"passed": 7}')
    return tmp_path / "g.db"


def test_client_lists_and_calls_every_tool(graphs_db):
    arguments = {
        "run_sql": {"query": "SELECT count(*) AS n FROM events"},
        "graph_lifecycle": {"pid": 4821},
        "graph_frequency": {"pid": 4821},
    }

    async def talk(session):
        tools = (await session.list_tools()).tools
        answers = {}
        for tool in tools:
            if tool.name in OUTSIDE:
                continue
            result = await session.call_tool(tool.name, arguments.get(tool.name, {}))
            assert not result.is_error, (tool.name, result.content)
            await session.validate_tool_result(tool.name, result)
            assert json.loads(result.content[0].text) == result.structured_content
            answers[tool.name] = result.structured_content
        prompt = await session.get_prompt("investigate")
        return tools, answers, prompt.messages[0].content.text

    tools, answers, recipe = converse(graphs_db, talk)
    assert {tool.name for tool in tools} == DOCUMENTED
    assert [tool.name for tool in tools if not tool.annotations.read_only_hint] == [
        "pagerduty_trigger"
    ]
    assert {tool.name for tool in tools if tool.annotations.open_world_hint} == set(OUTSIDE)
    assert answers["get_causal_chains"]["chains"][0]["rc"][0]["c"] == "recapture instead of replay"
    assert answers["investigate"]["says"].startswith("CUDA graph captured 40 times")
    assert answers["get_test_report"]["report"] == {"passed": 7}
    assert answers["graph_lifecycle"]["totals"]["graphLaunch"] == 40
    assert answers["graph_lifecycle"]["launches_per_capture"] == 1.0
    assert {graph["launches"] for graph in answers["graph_frequency"]["graphs"]} == {1}
    assert answers["run_sql"]["data"][0][0] == 40 * (
        10 + 4 + 2
    )  # launches, graph calls, wait with its sleep
    assert "Unexplained" in recipe


def test_nothing_is_asked_or_sent_outside_unless_configured(graphs_db):
    async def talk(session):
        return [await session.call_tool(name, arguments) for name, arguments in OUTSIDE.items()]

    fleet, page = converse(graphs_db, talk)
    assert (fleet.is_error, page.is_error) == (True, True)
    assert "--nodes" in fleet.content[0].text
    assert "nothing was sent" in page.content[0].text


@pytest.fixture
def pagerduty():
    """A receiver of events on this machine; gives its address and what came."""
    came = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            came.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(202)
            self.end_headers()
            self.wfile.write(b'{"status": "success", "dedup_key": "k-7"}')

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v2/enqueue", came
        server.shutdown()
        thread.join()


def test_page_is_sent_once_with_the_key_that_was_given(graphs_db, pagerduty):
    url, came = pagerduty

    async def talk(session):
        sent = await session.call_tool("pagerduty_trigger", OUTSIDE["pagerduty_trigger"])
        await session.validate_tool_result("pagerduty_trigger", sent)
        wrong = await session.call_tool("pagerduty_trigger", {"summary": "x", "severity": "mild"})
        return sent, wrong

    sent, wrong = converse(graphs_db, talk, "--pagerduty-url", url, INGERO_PAGERDUTY_KEY="R0UTE")
    assert sent.structured_content == {"dedup_key": "k-7", "status": "sent"}
    assert wrong.is_error
    (event,) = came
    assert (event["routing_key"], event["event_action"]) == ("R0UTE", "trigger")
    assert event["payload"]["summary"] == "GPU 3 is starved"
    assert event["payload"]["class"] == "ai_investigation"


def test_wrong_calls_are_told_and_the_server_goes_on(graphs_db):
    async def talk(session):
        write = await session.call_tool("run_sql", {"query": "DELETE FROM events"})
        typo = await session.call_tool("get_trace_stats", {"sinze": "5m"})
        fine = await session.call_tool("get_check", {})
        return write, typo, fine

    write, typo, fine = converse(graphs_db, talk)
    assert write.is_error
    assert "not authorized" in write.content[0].text
    assert typo.is_error
    assert "sinze" in typo.content[0].text
    assert not fine.is_error


def test_a_line_that_is_no_message_is_answered_under_its_id(graphs_db):
    half = {"name": "run_sql", "arguments": {"query": "SELECT '\ud83d'"}}
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": half}),
        '{"jsonrpc": "2.0", "id": "\\ud83d", "method": "ping"}',
        '{"jsonrpc": "2.0", "id": 8, "method": 3}',
        '[{"jsonrpc": "2.0", "id": 9, "method": "ping"}]',
        '{"jsonrpc": "2.0", "method": "notifications/initialized"}',
        '{"jsonrpc": "2.0", "id": null, "method": "notifications/initialized"}',
        '{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}',
        "",
        "hello",
    ]
    served = subprocess.run(
        [sys.executable, "-m", "ingero", "mcp", "--db", str(graphs_db)],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers = [json.loads(line) for line in served.stdout.splitlines()]
    assert [(one["id"], one["error"]["code"]) for one in answers] == [
        (7, types.PARSE_ERROR),
        (None, types.PARSE_ERROR),
        (8, types.INVALID_REQUEST),
        (None, types.INVALID_REQUEST),
        (None, types.INVALID_REQUEST),
        (None, types.PARSE_ERROR),
    ]
    assert answers[4]["error"]["message"] == "the id of a request is a text or a whole number"
    assert "hex escape" in answers[0]["error"]["message"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_first_interrupt_ends_it_while_nobody_writes(graphs_db, is_terminal):
    ours, its = pty.openpty() if is_terminal else reversed(os.pipe())
    serving = subprocess.Popen(
        [sys.executable, "-m", "ingero", "mcp", "--db", str(graphs_db)],
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(its)
    with serving, os.fdopen(ours, "wb", buffering=0) as lines:
        lines.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        assert json.loads(serving.stdout.readline())["id"] == 1
        serving.send_signal(signal.SIGINT)
        try:
            said = serving.communicate(timeout=60)
        finally:
            serving.kill()
    assert (serving.returncode, *said) == (130, "", "\n")


def ask(path, name, **arguments):
    return json.loads(get_query(QUERIES, name).ask(RecordingFile(path), arguments))


def test_short_form_is_much_smaller_and_full_form_has_the_evidence(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    short, full = ask(path, "get_causal_chains"), ask(path, "get_causal_chains", tsc=False)
    assert "full" not in short
    assert full["chains"] == short["chains"]
    assert full["full"][0]["causes"][0]["evidence"]
    assert len(json.dumps(short)) < len(json.dumps(full)) / 3


def test_chains_of_one_process_or_all_at_once_are_asked_as_of_the_existing_agent(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    every = ask(path, "get_causal_chains", limit=1, top_n=-1)["chains"]
    assert len(every) == len(ask(path, "get_causal_chains", limit=100)["chains"]) > 1
    pid = every[0]["p"]
    own = ask(path, "get_causal_chains", pid=pid)["chains"]
    assert own == ask(path, "get_causal_chains", pids=[pid])["chains"]
    assert {one["p"] for one in own} <= {0, pid}


def test_pages_join_to_the_whole_answer(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    whole = ask(path, "get_trace_stats", limit=100)
    ops, cursor = [], ""
    while True:
        page = ask(path, "get_trace_stats", limit=3, cursor=cursor)
        ops += page["ops"]
        cursor = page["next_cursor"]
        if not cursor:
            break
    assert ops == whole["ops"]
    assert len(ops) > 6
    for wrong in ("next", "9" * 19, "9" * 5000):
        with pytest.raises(BadDataError, match="cursor"):
            ask(path, "get_trace_stats", cursor=wrong)


def test_stats_count_calls_that_have_no_row(data_dir):
    ops = ask(
        data_dir / "agent_dbs/pytorch-dataloader-starvation.db", "get_trace_stats", limit=100
    )["ops"]
    assert next(op["n"] for op in ops if op["op"] == "cudaLaunchKernel") == 28 + 2


@pytest.mark.parametrize("pid", [2**31, 2**63, 10**30])
@pytest.mark.parametrize("name", ["get_trace_stats", "get_causal_chains", "get_stacks"])
def test_a_number_that_no_process_has_is_refused(data_dir, name, pid):
    with pytest.raises(BadDataError):
        ask(data_dir / "agent_dbs/pytorch-dataloader-starvation.db", name, pids=[pid])


@pytest.mark.parametrize("name", ["graph_lifecycle", "graph_frequency"])
def test_a_number_that_no_process_has_is_refused_for_graphs(data_dir, name):
    with pytest.raises(BadDataError):
        ask(data_dir / "agent_dbs/pytorch-dataloader-starvation.db", name, pid=2**63)


def test_stacks_of_more_time_than_there_is_are_all_of_them(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    assert ask(path, "get_stacks", since="99999999h") == ask(path, "get_stacks")


def test_stacks_are_grouped_by_code_path_with_frames(data_dir):
    answer = ask(
        data_dir / "agent_dbs/pytorch-dataloader-starvation.db", "get_stacks", op="cudaMemcpyAsync"
    )
    assert sum(stack["n"] for stack in answer["stacks"]) == 14
    assert any(
        "libtorch" in frame or "libcudart" in frame
        for s in answer["stacks"]
        for frame in s["frames"]
    )


@pytest.mark.parametrize("scenario", [s.name for s in SCENARIOS])
def test_demo_tool_plays_every_scenario(tmp_path, scenario):
    assert len(ask(tmp_path / "unused.db", "run_demo", scenario=scenario)["incidents"]) == 1


def test_text_of_traced_programs_cannot_hide_or_flood():
    assert clean("py\x1b[31mthon\u202e3\n") == "py [31mthon 3 "
    assert len(clean("x" * 10_000)) == 256


def test_hostile_process_name_reaches_no_answer_uncleaned(tmp_path):
    built = RecordingBuilder().name(7, "evil\u202e\x07")
    for i in range(20):
        built.call((Source.CUDA, 3), i * 1000, 10, pid=7)
    built.write(tmp_path / "r.db")
    for name in ("get_trace_stats", "investigate", "get_causal_chains"):
        arguments = {} if name == "investigate" else {"tsc": False}
        text = json.dumps(ask(tmp_path / "r.db", name, **arguments), ensure_ascii=False)
        assert "\u202e" not in text
        assert "\x07" not in text


def test_file_that_grows_is_loaded_again(tmp_path):
    context = RecordingFile(tmp_path / "r.db")
    query = get_query(QUERIES, "get_trace_stats")
    with pytest.raises(Exception, match="no such file"):
        query.ask(context)
    built = RecordingBuilder()
    for _ in range(2):
        built.call((Source.CUDA, 3), 0, 10, pid=7)
        (tmp_path / "r.db").unlink(missing_ok=True)
        built.write(tmp_path / "r.db")
        n_rows = json.loads(query.ask(context))["n"]
    assert n_rows == 2


@pytest.mark.parametrize("name", ["investigate", "get_causal_chains"])
def test_that_only_the_newest_events_of_a_large_recording_were_read_is_said(
    data_dir, monkeypatch, name
):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"
    assert "missing" not in ask(path, name)
    monkeypatch.setattr(window, "LoadFilter", partial(LoadFilter, max_rows=100))
    (said,) = ask(path, name)["missing"]
    assert said == "incomplete: only the newest 100 of the events asked for were read"
    read = [line["value"] for line in ask(path, "get_check")["checks"] if "read" in line["name"]]
    assert read == ["the newest 100"]


def test_a_cancelled_call_ends_its_statement_and_leaves_its_place(tmp_path):
    RecordingBuilder().write(tmp_path / "r.db")
    call = build_call(tmp_path / "r.db")

    async def main():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "run_sql", {"query": ENDLESS[0]})
            while not find_statements(tmp_path):  # noqa: ASYNC110 - a process has no event
                await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
        return await call("run_sql", {"query": "SELECT 1 AS one"})

    began = time.monotonic()
    assert json.loads(anyio.run(main))["data"] == [[1]]
    assert time.monotonic() - began < 25, "a statement may take 30 s"
