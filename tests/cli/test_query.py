"""`ingero query`: SQL and filters, as text and JSON."""

import json
from functools import partial

import pytest
from click.testing import CliRunner

from ingero.cli.main import cli, run_program
from ingero.model.events import Source
from ingero.recording.queries import window
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.writer import RecordingWriter


@pytest.fixture
def node_01(data_dir):
    return str(data_dir / "agent_dbs/sample-gpu-node-01.db")


def ask(*args):
    result = CliRunner().invoke(cli, ["query", *args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_sql_gives_a_list_of_objects(node_01):
    answer = ask("--db", node_01, "SELECT source, count(*) FROM events GROUP BY source", "--json")
    assert json.loads(answer.stdout) == [
        {"source": 3, "count(*)": 99},
        {"source": 5, "count(*)": 101},
    ]


def test_an_infinite_number_is_null_in_json_and_written_in_text(node_01):
    statement = "SELECT 1e999 AS most, -1e999 AS least, x'00ff' AS bytes"
    (row,) = json.loads(
        ask("--db", node_01, statement, "--json").stdout, parse_constant=pytest.fail
    )
    assert row == {"most": None, "least": None, "bytes": "00ff"}
    assert ask("--db", node_01, statement).stdout.split() == [
        *("most", "least", "bytes"),
        *("inf", "-inf", "00ff"),
    ]


@pytest.mark.parametrize(
    "command", ["query --op block_read", "explain", "explain --per-process --json"]
)
def test_events_that_were_not_read_are_said_unless_the_newest_were_asked_for(
    node_01, monkeypatch, command
):
    said = "incomplete: only the newest 20 of the events asked for were read"
    monkeypatch.setattr(window, "LoadFilter", partial(LoadFilter, max_rows=20))
    line = [*command.split(), "--db", node_01]
    assert said in CliRunner().invoke(cli, line, catch_exceptions=False).output
    if command == "explain":
        newest = CliRunner().invoke(cli, [*line, "--last", "10"], catch_exceptions=False)
        assert "incomplete" not in newest.output


def test_events_beyond_the_limit_are_said_to_be_left_out(tmp_path):
    path = tmp_path / "r.db"
    built = RecordingBuilder()
    for at in range(30):
        built.call((Source.CUDA, 1 + at % 2), START_NS + at, 5, 7)
    built.write(path)
    first = ask("--db", str(path), "--limit", "1", "--json")
    op = json.loads(first.stdout)[0]["op"]
    assert first.stderr == "(the newest 1 of 30 that were asked for, of 30 events)\n"
    some = ask("--db", str(path), "--op", op, "--limit", "4")
    assert some.stderr == "(the newest 4 of 15 that were asked for, of 30 events)\n"
    every = ask("--db", str(path), "--op", op, "--limit", "15", "--json")
    assert (len(json.loads(every.stdout)), every.stderr) == (15, "(15 of 30 events)\n")


def test_sql_table_is_aligned_and_the_count_goes_to_stderr(node_01):
    answer = ask("--db", node_01, "SELECT 'a' AS name, 10 AS n UNION SELECT 'bbb', 7 ORDER BY n")
    assert answer.stdout.splitlines() == ["name   n", "bbb    7", "a     10"]
    assert "2 rows" in answer.stderr


def test_a_table_has_a_line_per_row_and_nothing_that_a_terminal_would_obey(tmp_path):
    path = tmp_path / "r.db"
    RecordingBuilder().name(7, "py\x1b]0;owned\x07\nthon").write(path)
    table = ask("--db", str(path), "SELECT pid, name FROM process_names").stdout
    assert table.splitlines() == ["pid  name", "  7  py ]0;owned  thon"]
    (row,) = json.loads(ask("--db", str(path), "SELECT name FROM process_names", "--json").stdout)
    assert row == {"name": "py\x1b]0;owned\x07\nthon"}


def test_rows_that_are_too_large_together_are_said_to_be_left_out(node_01):
    answer = ask("--db", node_01, "SELECT hex(zeroblob(2000000)) AS h FROM events", "--limit", "20")
    assert len(answer.stdout.splitlines()) == 1 + 8
    assert "(8 rows in" in answer.stderr
    assert "there are more, beyond 32 MiB" in answer.stderr


def test_filters_choose_events_by_name_and_process(node_01):
    rows = json.loads(
        ask("--db", node_01, "--op", "BLOCK_READ", "--pid", "1887", "--limit", "5", "--json").stdout
    )
    assert len(rows) == 5
    assert {(row["op"], row["pid"], row["comm"]) for row in rows} == {
        ("block_read", 1887, "python3")
    }
    assert rows == sorted(rows, key=lambda row: row["timestamp"])


@pytest.mark.parametrize("command", ["query", "explain", "export --format perfetto -o OUT"])
@pytest.mark.parametrize(
    "asked", [f"--pid {10**20}", f"--pid {'9' * 5000}", "--pid=", "--pid 1 --pid ,"]
)
def test_what_is_no_process_id_is_wrong_usage(node_01, tmp_path, capsys, command, asked):
    line = f"{command} --db {node_01} {asked}".replace("OUT", str(tmp_path / "out.json"))
    assert run_program(cli, line.split()) == 2
    assert "is not a process id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        (("--from", "99999999999999999999h"), 0),
        (("--to", "99999999999999999999h"), 0),
        (("--from", "9999-12-31T23:59:59Z"), 0),
        (("--to", "0001-01-01T00:00:00Z"), 0),
        (("--since", "99999999999999999999h"), 0),
        (("--from", "9999-12-31T23:59:59Z", "--to", "0001-01-01T00:00:00Z"), 2),
    ],
)
def test_a_window_may_be_far_from_the_recording(node_01, asked, status):
    assert run_program(cli, ["explain", "--db", node_01, *asked]) == status


def test_labels_hold_from_when_they_were_said_or_within_their_span(tmp_path):
    built = RecordingBuilder()
    for i in range(6):
        built.call((Source.CUDA, 3), i * 100, 10, pid=7 + (i == 5))
    path = tmp_path / "r.db"
    built.write(path)
    first = START_NS
    with RecordingWriter(path, "node-0") as writer:
        writer.put_annotations([
            (first + 50, '{"step":"1","of":"all"}', 0, 0, 0, 0, 0, 0, 0),
            (first + 250, '{"step":"2"}', 7, 1, 0, 0, 0, 0, 0),
            (first + 999, '{"phase":"save"}', 7, 1, first + 300, first + 399, 0, 0, 0),
        ])
    rows = json.loads(ask("--db", str(path), "--annotations", "--json").stdout)
    one, two = {"step": "1", "of": "all"}, {"step": "2", "of": "all"}
    assert [row.get("labels", {}) for row in rows] == [
        {}, one, one, two | {"phase": "save"}, two, one,
    ]  # fmt: skip
    assert "labels" not in ask("--db", str(path), "--json").stdout
    table = ask("--db", str(path), "--annotations").stdout.splitlines()
    assert table[0].split() == ["TIME", "PID", "OPERATION", "LABELS"]
    assert table[4].endswith("cudaLaunchKernel  of=all phase=save step=2")


def test_writing_sql_is_refused_with_a_hint(node_01, capsys):
    assert run_program(cli, ["query", "--db", node_01, "DELETE FROM events"]) == 1
    assert "only one SELECT" in capsys.readouterr().err


def test_unknown_operation_lists_the_known_ones(node_01, capsys):
    assert run_program(cli, ["query", "--db", node_01, "--op", "cudaMallocc"]) == 2
    assert "cudaMallocAsync" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["query", "--since", "soon"],
        ["explain", "--from", "yesterday"],
        ["explain", "--from", "9s", "--to", "1s"],
        ["export", "--format", "perfetto", "-o", "unused.json", "--since", "5 parsecs"],
    ],
)
def test_wrong_value_of_an_option_is_wrong_usage(node_01, capsys, wrong):
    assert run_program(cli, [*wrong, "--db", node_01]) == 2
    assert "--" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        ["--since", "10s"],
        ["--pid", "7"],
        ["--op", "cudaMemcpyAsync"],
        ["--annotations"],
        ["--include-rolled"],
    ],
)
def test_an_option_about_one_recording_is_refused_with_nodes(capsys, wrong):
    args = ["query", "--nodes", "127.0.0.1:1", "SELECT 1", *wrong]
    assert run_program(cli, args) == 2
    assert wrong[0] in capsys.readouterr().err
