"""What several nodes recorded is explained as one recording, and says what each of them contributed or lost."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
from click.testing import CliRunner
from tests.recording.causal.test_exact import MINUTE, launches
from tests.recording.queries.node_servers import COUNT, PLAIN, among_servers, ask_fleet, late_rank
from tests.recording.scenarios.faults import FAULTS
from tests.support.degrade import degrade, sample

from ingero.cli.main import cli, run_program
from ingero.errors import BadDataError
from ingero.model.events import Source
from ingero.model.gpu_view import GpuView
from ingero.model.recording import ProcessRank, Unprobed, Unwritten
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.exact import compute_statistics
from ingero.recording.queries.explain import explain_nodes
from ingero.recording.queries.fanout import (
    NodeAnswer,
    ask_nodes,
    join_rows,
)
from ingero.recording.queries.transfer import decode_part, encode_part, join_parts
from ingero.recording.scenarios.builder import START_NS
from ingero.recording.scenarios.loop import LAUNCH
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.reader import load_recording
from ingero.recording.store.writer import RecordingWriter
from ingero.testing.clock import ManualClock


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
