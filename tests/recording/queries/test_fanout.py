"""Several nodes are asked at once; one that fails is told apart from one that has nothing."""

import json
import socket
import sqlite3
import time
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Event, Thread

import anyio
import pytest
from click.testing import CliRunner
from tests.recording.causal.test_exact import MINUTE, launches
from tests.recording.scenarios.faults import FAULTS
from tests.support.degrade import degrade, sample

from ingero.cli.main import cli, run_program
from ingero.cli.serving import split_nodes
from ingero.config import Endpoint
from ingero.config.tls import TlsClientConfig
from ingero.errors import BadDataError, ConfigError, RetryableError
from ingero.model.events import Source
from ingero.model.gpu_view import GpuView
from ingero.model.recording import ProcessRank, Unprobed, Unwritten
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.exact import compute_statistics
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.explain import explain_nodes
from ingero.recording.queries.fanout import (
    FanoutSettings,
    NodeAnswer,
    ask_nodes,
    clock_warnings,
    join_rows,
)
from ingero.recording.queries.https_server import ListenSettings, open_server
from ingero.recording.queries.recording_file import ExternalAccess, RecordingFile
from ingero.recording.queries.transfer import decode_part, encode_part, join_parts
from ingero.recording.scenarios.builder import START_NS
from ingero.recording.scenarios.loop import LAUNCH
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.recording.store.writer import RecordingWriter
from ingero.serving.query import get_query
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

COUNT = {"sql": "SELECT count(*) AS n FROM events", "limit": 10}
PLAIN = FanoutSettings(tls=TlsClientConfig(insecure=True))
NODES = ("sample-gpu-node-01.db", "sample-gpu-node-02.db")


def late_rank():
    return FAULTS["late_rank"]().build()


def among_servers(paths, talk, clock=None, **settings):
    """Serve each recording and run a blocking conversation on a thread."""

    async def main():
        async with AsyncExitStack() as stack:
            chosen = ListenSettings(
                Endpoint("127.0.0.1", 0), has_tls=False, has_mcp=False, **settings
            )
            bound = [
                str(await stack.enter_async_context(open_server(p, chosen, clock))) for p in paths
            ]
            return await anyio.to_thread.run_sync(talk, bound)

    return anyio.run(main)


@pytest.fixture
def paths(data_dir):
    return [data_dir / "agent_dbs" / name for name in NODES]


@pytest.fixture
def dead():
    """An address on which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


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


def explain_among(nodes, *options, text=False):
    arguments = ["explain", "--no-tls", "--nodes", ",".join(nodes), *options]
    result = CliRunner().invoke(
        cli, [*arguments, *([] if text else ["--json"])], catch_exceptions=False
    )
    assert result.exit_code == 0, result.output
    return result if text else json.loads(result.stdout)


@pytest.fixture
def one_rank_each(tmp_path):
    """The nodes of a job on which rank 2 is late, one recording per node, and one without events."""
    ranks = late_rank()
    paths = []
    for rank in range(4):
        path = tmp_path / f"node-{rank}.db"
        pid = 6000 + rank
        with RecordingWriter(path, f"node-{rank}") as writer:
            writer.put_ranks({pid: ProcessRank(rank, 0, 4)})
            writer.put_process_names({pid: ranks.process_names[0, pid]}, START_NS)
            writer.put_events(ranks.events[ranks.events["pid"] == pid])
        paths.append(path)
    empty = tmp_path / "empty.db"
    with RecordingWriter(empty, "idle"):
        pass
    return [*paths, empty]


def test_late_rank_is_found_among_nodes_that_each_know_one_rank(one_rank_each, dead):
    def talk(nodes):
        return nodes, explain_among([*nodes, dead]), explain_among([nodes[0]])

    nodes, told, alone = among_servers(one_rank_each, talk)
    assert [(i["rule"], i["rank"], i["node"]) for i in told["incidents"]] == [
        ("late_rank", 2, "node-2")
    ]
    assert alone["incidents"] == []
    # A node without events, one without an answer and one with both are three different things.
    *full, empty, silent = told["nodes"]
    assert [(one["address"], one["names"]) for one in full] == [
        (node, [f"node-{i}"]) for i, node in enumerate(nodes[:4])
    ]
    assert all(one["events"] == one["events_stored"] > 100 for one in full)
    assert (empty["events"], empty["error"]) == (0, "")
    assert (silent["address"], silent["events"], silent["clock_offset_ms"]) == (dead, None, None)
    assert silent["error"]
    assert all(abs(one["clock_offset_ms"]) < 1000 for one in [*full, empty])


def test_explanation_of_nodes_says_what_each_contributed(one_rank_each, dead):
    def talk(nodes):
        return nodes, explain_among([*nodes, dead], text=True)

    nodes, told = among_servers(one_rank_each, talk)
    lines = told.stdout.splitlines()
    assert any(
        line.startswith(f"{nodes[2]} (node-2): ")
        and "clock +" in line.replace("clock -", "clock +")
        for line in lines
    )
    assert any(line.startswith(f"{nodes[4]}") and ": no event; clock" in line for line in lines)
    assert any(line.startswith(f"{dead}: no answer, so nothing is known of it") for line in lines)
    assert f"warning: {dead}" in told.stderr


def test_clock_of_an_explained_node_is_warned_of(one_rank_each, monkeypatch):
    theirs = ManualClock()
    told = among_servers(
        one_rank_each[:1], lambda nodes: explain_among(nodes, text=True), clock=theirs
    )
    assert "its clock is -" in told.stderr  # that clock stands long ago


def test_operations_of_nodes_say_which_node(one_rank_each):
    said = among_servers(
        one_rank_each, lambda nodes: explain_among(nodes, "--per-process", "--since", "1h")
    )
    assert {op["node"] for op in said} == {f"node-{i}" for i in range(4)}


@pytest.mark.parametrize(
    "more",
    [["--db", "x.db"], ["--from", "1s"], ["--chains"], ["-p1", "-p2"], ["--include-rolled"]],
)
def test_what_nodes_cannot_be_asked_is_refused(more):
    assert run_program(cli, ["explain", "--nodes", "127.0.0.1:1", "--no-tls", *more]) == 2


def test_no_node_to_explain_is_an_error(dead, capsys):
    assert run_program(cli, ["explain", "--no-tls", "--nodes", dead]) == 1
    assert dead in capsys.readouterr().err


def test_part_of_a_recording_arrives_as_it_was_sent(paths):
    whole = load_recording(paths[0], LoadFilter(has_extras=True))

    def talk(nodes):
        ask = [("part", None), ("part?last=50", None)]
        return [ask_nodes(nodes[:1], *one, PLAIN, decode=decode_part)[0].body for one in ask]

    came, newest = among_servers(paths[:1], talk)
    assert came.events.tolist() == whole.events.tolist()
    assert came.process_names == whole.process_names
    assert (came.nodes, came.n_events_stored, came.is_truncated) == (whole.nodes, 200, False)
    assert (len(newest.events), newest.is_truncated) == (50, True)


def test_sessions_and_what_the_recorder_knew_travel_along():
    built = late_rank()
    old = replace(
        built, sessions=(replace(built.sessions[0], stopped_wall_ns=7),), has_gpu_ids=False
    )
    sent = decode_part(encode_part(old))
    assert (sent.sessions, sent.has_gpu_ids) == (old.sessions, False)
    joined = join_parts([("a:1", built), ("b:2", sent)])
    assert [(s.node, s.stopped_wall_ns) for s in joined.sessions] == [
        ("node-0", 0),
        ("node-0@b:2", 7),
    ]
    assert not joined.has_gpu_ids


def test_what_a_node_lost_and_its_stacks_travel_along_and_say_whose_they_are():
    built = late_rank()
    built.events["stack_hash"][:2] = (5, 6)
    built.events["duration_ns"][1] += 1
    holed = replace(
        built,
        unwritten=(Unwritten("", int(Source.CUDA), "disk full", 12),),
        unprobed=(Unprobed(7, "/lib/libnccl.so.2", "gone"),),
        n_damaged=3,
        stacks={5: "[]", 6: '["x"]'},
        gpu_views={(0, 7): GpuView(("nvidia0",), "0")},
    )
    sent = decode_part(encode_part(holed))
    assert (sent.unwritten, sent.unprobed, sent.n_damaged) == (holed.unwritten, holed.unprobed, 3)
    assert sent.stacks == holed.stacks
    assert sent.gpu_views == holed.gpu_views
    joined = join_parts([("a:1", built), ("b:2", sent)])
    assert joined.gpu_views == {(1, 7): GpuView(("nvidia0",), "0")}
    other = replace(built, nodes=("other",))
    joined = join_parts([("a:1", other), ("b:2", sent)])
    assert joined.describe_missing() == (
        "incomplete: 12 rows were not stored on node-0: disk full, 3 rows could not be read"
    )
    assert [one.node for one in joined.unprobed] == ["node-0"]
    assert joined.stacks == holed.stacks
    answers = [NodeAnswer("a:1", "", other), NodeAnswer("b:2", "", sent)]
    told = explain_nodes(answers)
    assert told.window.missing == joined.describe_missing()
    assert [bool(one.missing) for one in told.nodes] == [False, True]
    assert "on node-0" in told.not_probed[0]


def move(part, by_ns):
    """The same of another node, so much later."""
    tables = {name: getattr(part, name).copy() for name in ("events", "aggregates", "histograms")}
    tables["events"]["start_ns"] += by_ns
    for name in ("aggregates", "histograms"):
        tables[name]["bucket_ns"] += by_ns
    return replace(part, nodes=("later",), asked_ns=(part.asked_ns[0] + by_ns, 0), **tables)


def test_a_node_that_ended_earlier_has_its_own_counts_where_the_end_of_each_was_asked_for():
    whole = degrade(
        launches([1000] * 600, every_ns=MINUTE // 200), lambda events: sample(events, 10)
    )
    first = START_NS + MINUTE // 2
    events = whole.events[whole.events["start_ns"] >= first]
    part = replace(whole, events=events, asked_ns=(first, 0))
    joined = join_parts([("a:1", part), ("b:2", move(part, 60 * MINUTE))])
    (alone,) = compute_statistics(part)
    assert [(one.basis, one.count, one.exact) for one in compute_statistics(joined)] == [
        (alone.basis, alone.count, alone.exact)
    ] * 2
    codes = [int(LAUNCH[0]) << 8 | int(LAUNCH[1])]
    gaps = [Evidence(joined).counts.gap(node, 7, codes) for node in (0, 1)]
    assert gaps == [Evidence(part).counts.gap(0, 7, codes)] * 2


def test_rows_and_exports_of_nodes_say_what_a_node_lost(tmp_path):
    path = tmp_path / "lost.db"
    FAULTS["late_rank"]().write(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO unwritten (bucket, node, source, op, cause, count) VALUES (0, 'node-0', 1, 3, 'disk full', 12)"
        )
    out = tmp_path / "out.json"

    def talk(nodes):
        (answer,) = ask_nodes(nodes, "query", COUNT, PLAIN)
        among = ["--nodes", nodes[0], "--no-tls", "--format", "perfetto", "-o", str(out)]
        exported = CliRunner().invoke(cli, ["export", *among], catch_exceptions=False)
        return join_rows([answer], 1e9), exported

    joined, exported = among_servers([path], talk)
    assert [line.partition(": ")[2] for line in joined.warnings] == [
        "incomplete: 12 rows were not stored: disk full"
    ]
    assert exported.exit_code == 0
    assert "incomplete: 12 rows were not stored: disk full" in exported.stderr
    assert len(joined.rows) == 1


def test_an_empty_list_of_incidents_of_a_node_says_what_it_does_not_mean(tmp_path):
    path = tmp_path / "lost.db"
    FAULTS["late_rank"]().write(path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO unwritten (bucket, node, source, op, cause, count) VALUES (0, 'node-0', 8, 3, 'disk full', 12)"
        )
        connection.execute("UPDATE event_aggregates SET count = stored")
        connection.execute("DELETE FROM events WHERE source = ? AND arg2 % 2", (Source.NCCL,))
        connection.execute(
            "INSERT INTO unprobed (pid, path, reason, since, node) VALUES (7, '/lib/libnccl.so.2', 'gone', 1, '')"
        )

    def talk(nodes):
        return [
            ask_fleet(nodes, action=action, since="") for action in ("chains", "ops", "overview")
        ]

    chains, ops, overview = among_servers([path], talk)
    for answer in (chains, ops, overview):
        assert any("12 rows were not stored: disk full" in line for line in answer["warnings"])
        assert any("/lib/libnccl.so.2 of pid 7" in line for line in answer["warnings"])
    for answer in (chains, overview):
        (line,) = [line for line in answer["warnings"] if "could not decide" in line]
        assert "late_rank" in line
    assert "basis" in ops["columns"]


def test_stacks_that_do_not_fit_are_those_of_the_shortest_calls():
    built = late_rank()
    built.events["stack_hash"][:3] = (1, 2, 3)
    built.events["duration_ns"][:3] = (10**12, 1, 2 * 10**12)
    sent = decode_part(
        encode_part(replace(built, stacks=dict.fromkeys((1, 2, 3), "x" * 1_000_000)))
    )
    assert set(sent.stacks) == {1, 3}


def test_part_that_is_not_one_is_refused():
    fine = encode_part(late_rank())
    for body in (b"", b"{}", fine[:-5], fine.replace(b"duration_ns", b"duration_us", 1)):
        with pytest.raises(BadDataError):
            decode_part(body)


def test_nodes_of_one_name_are_told_apart_by_their_address():
    joined = join_parts([("a:1", late_rank()), ("b:2", late_rank())])
    assert joined.nodes == ("node-0", "node-0@b:2")
    assert len(joined.events) == 2 * len(late_rank().events)
    assert joined.process_name(1, 6002) == "rank2"


def ask_fleet(nodes, **arguments):
    outside = ExternalAccess(lambda path, body: ask_nodes(nodes, path, body, PLAIN))
    context = RecordingFile(Path("unused.db"), outside)
    return json.loads(get_query(QUERIES, "query_fleet").ask(context, arguments))


def test_assistant_asks_all_nodes_and_reads_who_failed(paths, dead):
    def talk(nodes):
        nodes = [*nodes, dead]
        chains = ask_fleet(nodes, action="chains", since="")
        ops = ask_fleet(nodes, action="ops", limit=2)
        more = ask_fleet(nodes, action="ops", limit=100, cursor=ops["next_cursor"])
        return nodes, chains, ops, more, ask_fleet(nodes, action="sql", query=COUNT["sql"])

    nodes, chains, ops, more, counted = among_servers(paths, talk)
    assert [(row[0], row[1]) for row in chains["rows"]] == [(nodes[0], "MEDIUM")]
    assert [bool(one.get("error")) for one in chains["nodes"]] == [False, False, True]
    assert chains["warnings"][0].startswith(dead)
    assert len(ops["rows"]) == 2
    assert ops["rows"][0] not in more["rows"]
    assert counted["rows"] == [[nodes[0], 200], [nodes[1], 200]]


def test_every_column_of_an_overview_is_of_the_time_that_was_asked_for(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"

    def talk(nodes):
        counted = "SELECT count(*), (max(timestamp) - min(timestamp)) / 1e9 FROM events"
        within = "WHERE timestamp >= (SELECT max(timestamp) FROM events) - 5000000000"
        return (
            [
                ask_fleet(nodes, action="overview", since=since)["rows"][0][1:4]
                for since in ("5s", "", "1w")
            ],
            [
                ask_fleet(nodes, action="sql", query=sql, since="")["rows"][0][1:]
                for sql in (f"{counted} {within}", counted)
            ],
            ask_fleet(nodes, action="chains", since="5s")["rows"],
        )

    (part, whole, week), (part_counted, counted), chains = among_servers([path], talk)
    assert part[:2] == part_counted != counted
    assert part[2] == len(chains)
    assert whole[:2] == week[:2] == counted


def test_overview_of_a_process_or_of_nothing_counts_what_is_there(data_dir):
    path = data_dir / "agent_dbs/pytorch-dataloader-starvation.db"

    def talk(nodes):
        return [
            ask_fleet(nodes, action="overview", since="", pid=pid)["rows"][0][1:]
            for pid in (2260, 999_999)
        ], ask_fleet(nodes, action="sql", query="SELECT count(*) FROM events WHERE pid = 2260")

    (one, nobody), counted = among_servers([path], talk)
    assert one[0] == counted["rows"][0][1]
    assert nobody == [0, 0.0, 0, ""]


@pytest.mark.parametrize("given", [{"since": "1h"}, {"pid": 7}])
def test_sql_of_an_assistant_with_a_window_that_it_does_not_have_is_refused(given):
    with pytest.raises(BadDataError, match="since and pid choose no rows of sql"):
        ask_fleet(["127.0.0.1:1"], action="sql", query="SELECT 1", **given)


def test_assistant_that_mixes_up_actions_is_told(paths):
    with pytest.raises(BadDataError, match="sql"):
        ask_fleet(["127.0.0.1:1"], action="ops", query="SELECT 1")


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
