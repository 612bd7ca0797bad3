"""Several nodes are asked at once; one that fails is told apart from one that has nothing."""

import json
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Event, Thread

import pytest
from click.testing import CliRunner
from tests.recording.queries.node_servers import COUNT, PLAIN, among_servers

from ingero.cli.main import cli, run_program
from ingero.cli.serving import split_nodes
from ingero.config.tls import TlsClientConfig
from ingero.errors import ConfigError, RetryableError
from ingero.recording.queries.fanout import (
    FanoutSettings,
    NodeAnswer,
    ask_nodes,
    clock_warnings,
    join_rows,
)
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


def test_rows_of_every_node_carry_its_address(paths):
    def talk(nodes):
        return nodes, join_rows(ask_nodes(nodes, "query", COUNT, PLAIN), 10)

    nodes, joined = among_servers(paths, talk)
    assert joined.columns == ["node", "n"]
    assert joined.rows == [[nodes[0], 200], [nodes[1], 200]]
    assert joined.warnings == []


def test_silent_node_is_named_and_the_others_still_answer(paths, dead):
    joined = among_servers(
        paths, lambda nodes: join_rows(ask_nodes([dead, *nodes], "query", COUNT, PLAIN), 10)
    )
    assert len(joined.rows) == 2
    assert [warning.split(": ")[0] for warning in joined.warnings] == [dead]


class _Node(BaseHTTPRequestHandler):
    """A node whose clock is right and whose answers are a test's."""

    chunks = staticmethod(lambda: iter(()))

    def do_GET(self):
        if self.path == "/api/v1/time":
            self._send([json.dumps({"timestamp_ns": time.time_ns()}).encode()])
        else:
            self._send(self.chunks())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self._send(self.chunks())

    def _send(self, chunks):
        self.send_response(200)
        self.end_headers()
        with suppress(OSError):  # the client may be gone
            for chunk in chunks:
                self.wfile.write(chunk)

    def log_message(self, *_):
        pass


@contextmanager
def odd_node(chunks):
    """The address of a node that answers with these pieces."""
    kind = type("_Odd", (_Node,), {"chunks": staticmethod(chunks)})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_node_that_drips_its_answer_is_named_with_the_time_it_had(paths):
    over = Event()

    def drip():
        yield b"{"
        while not over.wait(0.05):
            yield b" "

    quick = replace(PLAIN, timeout_ns=NS_PER_S)
    with odd_node(drip) as slow:
        joined = among_servers(
            paths, lambda nodes: join_rows(ask_nodes([slow, *nodes], "query", COUNT, quick), 1e9)
        )
        over.set()
    assert joined.warnings == [f"{slow}: no whole answer within 1 s"]
    assert len(joined.rows) == 2


def test_answer_that_is_too_large_is_not_read_to_its_end_and_named_with_the_limit(paths):
    sent = count()

    def flood():
        for _ in range(2000):
            next(sent)
            yield b" " * 1024 * 1024

    with odd_node(flood) as large:
        joined = among_servers(
            paths, lambda nodes: join_rows(ask_nodes([large, *nodes], "query", COUNT, PLAIN), 1e9)
        )
    assert joined.warnings == [
        f"{large}: its answer is over 32 MiB: ask for less time or fewer rows"
    ]
    assert len(joined.rows) == 2
    assert next(sent) < 100


@pytest.mark.parametrize(
    "body",
    [
        b"<html>", b'{"columns": ["\xff"], "rows": []}', b"[" * 100_000, b"[]", b'{"columns": ["n"]}',
        b'{"columns": ["n"], "rows": [[1, 2]]}', b'{"columns": "n", "rows": []}', b"",
    ],
    ids=range(8),
)  # fmt: skip
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_node_that_answers_something_else_is_named_and_the_others_are_shown(paths, body, form):
    with odd_node(lambda: iter((body,))) as odd:

        def talk(nodes):
            among = ["--no-tls", "--nodes", ",".join([*nodes, odd])]
            return CliRunner().invoke(
                cli, ["query", *among, COUNT["sql"], *form], catch_exceptions=False
            )

        result = among_servers(paths, talk)
    assert result.exit_code == 0, result.output
    assert f"warning: {odd}: " in result.stderr
    assert "(2 rows from " in result.stderr


def test_a_name_that_no_host_can_have_is_refused_by_itself():
    with pytest.raises(ConfigError, match="'xn--:80' is no name of a host"):
        ask_nodes(["127.0.0.1:1", "xn--:80"], "query", COUNT, FanoutSettings())


@pytest.mark.parametrize(
    ("nodes", "said"),
    [(" , ", "names no node"), ("127.0.0.1:1,127.0.0.1:2,127.0.0.1:1", "names 127.0.0.1:1 twice")],
)
def test_a_list_of_no_node_or_of_one_twice_is_refused(capsys, nodes, said):
    assert run_program(cli, ["query", "--no-tls", "--nodes", nodes, "SELECT 1"]) == 2
    assert f"error: --nodes {said}" in capsys.readouterr().err


def test_no_answer_at_all_is_an_error(dead):
    with pytest.raises(RetryableError, match=dead):
        ask_nodes([dead], "query", COUNT, PLAIN)


def test_bearer_is_sent_and_a_wrong_one_is_told(paths):
    def talk(nodes):
        right = ask_nodes(
            nodes, "overview", None, FanoutSettings("s3cret", tls=TlsClientConfig(insecure=True))
        )
        with pytest.raises(RetryableError, match="401"):
            ask_nodes(nodes, "overview", None, PLAIN)
        return right

    assert among_servers(paths, talk, token="s3cret")[0].body["event_count"] == 200


def test_a_bearer_with_a_line_end_is_that_of_the_node_and_one_that_no_header_carries_is_refused(
    paths, monkeypatch, capsys
):
    def ask_with(token, nodes):
        monkeypatch.setenv("INGERO_MCP_BEARER_TOKEN", token)
        return run_program(cli, ["query", "--no-tls", "--nodes", nodes[0], "SELECT 1 AS n"])

    def talk(nodes):
        return ask_with("s3cret\n", nodes), ask_with("s3crét", nodes)

    assert among_servers(paths[:1], talk, token="s3cret") == (0, 2)
    assert "error: INGERO_MCP_BEARER_TOKEN is not printable ASCII" in capsys.readouterr().err


def test_clock_that_is_ahead_is_measured_and_warned_of(paths):
    ours, theirs = ManualClock(), ManualClock()
    theirs.step_wall(250_000_000)
    answers = among_servers(
        paths, lambda nodes: ask_nodes(nodes, "overview", None, PLAIN, ours), clock=theirs
    )
    assert [answer.clock_offset_ms for answer in answers] == [250.0, 250.0]
    assert len(clock_warnings(answers, 10)) == 2
    assert clock_warnings(answers, 300) == []


def test_node_with_other_columns_is_left_out_and_named():
    answers = [
        NodeAnswer("a", body={"columns": ["n"], "rows": [[1]]}),
        NodeAnswer("b", body={"columns": ["m"], "rows": [[2]]}),
    ]
    joined = join_rows(answers, 10)
    assert joined.rows == [["a", 1]]
    assert joined.warnings == ["b: left out, its columns differ"]


def test_plain_http_to_another_machine_is_refused():
    with pytest.raises(ConfigError, match="plain HTTP"):
        ask_nodes(["192.0.2.1:80"], "query", COUNT, PLAIN)


def test_command_prints_rows_of_all_nodes_and_counts_who_answered(paths, dead):
    def talk(nodes):
        arguments = [
            "query",
            "--no-tls",
            "--nodes",
            ",".join([*nodes, dead]),
            COUNT["sql"],
            "--json",
        ]
        return nodes, CliRunner().invoke(cli, arguments, catch_exceptions=False)

    nodes, result = among_servers(paths, talk)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == [{"node": node, "n": 200} for node in nodes]
    assert "from 2 of 3 nodes" in result.stderr
    assert dead in result.stderr


def test_a_column_that_is_called_node_is_kept_beside_the_address(paths):
    sql = "SELECT node, 1 AS a, 2 AS a, 3 AS a_2 FROM events GROUP BY node"

    def talk(nodes):
        arguments = ["query", "--no-tls", "--nodes", ",".join(nodes), sql, "--json"]
        return nodes, CliRunner().invoke(cli, arguments, catch_exceptions=False)

    nodes, result = among_servers(paths, talk)
    values = {"a": 1, "a_3": 2, "a_2": 3}
    names = ("gpu-node-01", "gpu-node-02")
    assert json.loads(result.stdout) == [
        {"node": node, "node_2": name} | values for node, name in zip(nodes, names, strict=True)
    ]


def test_export_of_several_nodes_keeps_each_node_and_says_who_failed(paths, dead, tmp_path):
    out = tmp_path / "both.json"

    def talk(nodes):
        arguments = ["export", "--format", "perfetto", "--no-tls", "-o", str(out)]
        named = ["--nodes", ",".join([*nodes, dead])]
        return CliRunner().invoke(cli, [*arguments, *named], catch_exceptions=False)

    result = among_servers(paths, talk)
    assert result.exit_code == 0, result.output
    assert "400 events" in result.stderr
    assert f"warning: {dead}" in result.stderr
    assert result.stderr.count(" ms,") + 1 == 2  # a clock offset for each node that answered
    elements = json.loads(out.read_bytes())["traceEvents"]
    names = {e["args"]["name"] for e in elements if e["name"] == "process_name"}
    assert {"node gpu-node-01", "node gpu-node-02"} <= names
    incidents = [e for e in elements if e.get("cat") == "incident" and e["ph"] == "b"]
    assert ["disk reads" in e["name"] for e in incidents] == [True]


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("[::1]:8443", ["[::1]:8443"]),
        ("[a:1,b:2]", ["a:1", "b:2"]),
        ("a:1, b:2,", ["a:1", "b:2"]),
        ("[::1]:1,[::2]:2", ["[::1]:1", "[::2]:2"]),
        ("[[::1]:1]", ["[::1]:1"]),
        ("[[::1]:1,[::2]:2]", ["[::1]:1", "[::2]:2"]),
        ("[]", []),
    ],
)
def test_nodes_may_stand_in_brackets_and_have_ipv6_addresses(text, nodes):
    assert split_nodes(text) == nodes


def test_a_node_of_an_ipv6_address_is_asked(capsys):
    assert run_program(cli, ["explain", "--no-tls", "--nodes", "[::1]:1"]) == 1
    assert "no node answered: [::1]:1: " in capsys.readouterr().err
