"""`ingero explain`: text and JSON say the same, errors name the file, the file stays as it was."""

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime

import pytest
from click.testing import CliRunner
from tests.recording.scenarios.faults import FAULTS

from ingero.cli.main import cli, run_program
from ingero.model.events import Source
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.store.writer import RecordingWriter


def ask(*args):
    result = CliRunner().invoke(cli, ["explain", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def starved(data_dir):
    return data_dir / "agent_dbs/pytorch-dataloader-starvation.db"


def test_json_holds_every_documented_key(starved):
    answer = json.loads(ask("--db", starved, "--json"))
    assert set(answer) == {"incidents", "unknown", "looked", "window", "not_probed"}
    top = answer["incidents"][0]
    assert {
        "id",
        "severity",
        "title",
        "rule",
        "start",
        "end",
        "causes",
        "ruled_out",
        "fix",
        "coverage",
    } <= set(top)
    assert set(top["causes"][0]) == {"name", "share", "evidence"}
    assert answer["window"]["duration_s"] == pytest.approx(76.94, abs=0.01)


def test_text_shows_what_json_holds(starved):
    answer, text = json.loads(ask("--db", starved, "--json")), ask("--db", starved)
    for incident in answer["incidents"]:
        said = [incident["title"], incident["id"], *incident["fix"], incident["coverage"]["state"]]
        said += [
            fact for cause in incident["causes"] for fact in (cause["name"], *cause["evidence"])
        ]
        said += [ruled["why"] for ruled in incident["ruled_out"]]
        assert not [fact for fact in said if fact not in text]


def test_a_time_is_taken_to_the_nanosecond_as_trace_writes_it(tmp_path):
    path, built = tmp_path / "r.db", RecordingBuilder()
    for at_ns in (0, 430_997, 430_998, 10**9):
        built.call((Source.CUDA, 1), at_ns, 5, 7)
    built.write(path)
    begin = datetime.fromtimestamp(START_NS // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")

    def count(first, last):
        asked = ("--from", f"{begin}.{first}Z", "--to", f"{begin}.{last}+00:00")
        return json.loads(ask("--db", path, "--json", *asked))["window"]["events"]

    assert START_NS % 10**9 == 0
    assert count("000430997", "000430997") == 1
    assert count("00043099", "000430998") == 2
    assert count("000430998", "000431") == 1


def test_times_of_day_that_are_on_two_days_ask_for_the_date(tmp_path, capsys):
    path, built = tmp_path / "r.db", RecordingBuilder()
    noon_ns = (12 * 3600 - START_NS // 10**9 % 86_400) * 10**9
    for hours in (-3, 22):
        built.call((Source.CUDA, 1), noon_ns + hours * 3600 * 10**9, 5, 7)
    built.write(path)
    asked = ["explain", "--db", str(path), "--from", "09:30Z", "--to", "10:30Z"]
    assert run_program(cli, asked) == 2
    assert (
        "hint: a time of day is the last one in the recording: write the date"
        in capsys.readouterr().err
    )


def test_a_stored_chain_prints_nothing_that_a_terminal_would_obey(tmp_path):
    path = tmp_path / "r.db"
    RecordingBuilder().write(path)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute(
            "INSERT INTO causal_chains (id, detected_at, severity, summary, root_cause, explanation) "
            "VALUES ('c', 0, 'HIGH', ?, '', '')",
            ("slow\x1b]0;owned\x07",),
        )
    assert ask("--db", path, "--chains").splitlines()[1].endswith("[HIGH] slow ]0;owned ")


def test_healthy_recording_says_that_it_looked(data_dir):
    text = ask("--db", data_dir / "agent_dbs/sample-gpu-node-02.db")
    assert "rules looked and found nothing; 3 could not tell, see below" in text
    assert "nobody counted the calls that have no row" in text


def test_window_counts_from_the_data_not_from_now(starved):
    all_of_it = json.loads(ask("--db", starved, "--json"))
    part = json.loads(ask("--db", starved, "--from", "0s", "--to", "10s", "--json"))
    assert part["window"]["events"] < all_of_it["window"]["events"]
    # In its first second alone the job is bound by its pageable copies; the silence comes later. Six copies of that
    # minute have no row, and whether they lie in these ten seconds nobody knows.
    assert [i["rule"] for i in part["incidents"]] == ["lazy_load"]
    (open_,) = [one for one in part["unknown"] if one["rules"] == ["copy_bound"]]
    assert open_["title"].startswith("Copy-bound: 69% of the time of python3")
    assert part["window"]["asked_s"] == [0.0, 10.0]
    tail = json.loads(ask("--db", starved, "--since", "5s", "--json"))
    assert tail["window"]["end"] == all_of_it["window"]["end"]
    assert tail["window"]["duration_s"] <= 5.1


def test_per_process_percentiles_are_nearest_rank(tmp_path):
    built = RecordingBuilder()
    for i in range(100):
        built.call((Source.CUDA, 3), i * 10_000, (i + 1) * 10, pid=7)
    built.name(7, "train").write(tmp_path / "r.db")
    (op,) = json.loads(ask("--db", tmp_path / "r.db", "--per-process", "--json"))
    assert (op["process"], op["op"], op["count"]) == ("train", "cudaLaunchKernel", 100)
    assert (op["p50_us"], op["p95_us"], op["p99_us"], op["max_us"]) == (0.5, 0.9, 1.0, 1.0)
    assert (op["avg_ns"], op["max_ns"]) == (505, 1000)


def test_stored_chains_are_shown_as_the_other_agents_words(data_dir):
    chains = json.loads(ask("--db", data_dir / "agent_dbs/sample-cluster.db", "--chains", "--json"))
    assert len(chains) == 6
    assert "not verified" in ask("--db", data_dir / "agent_dbs/sample-cluster.db", "--chains")


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        (("--since", "20s"), [4, 5]),
        (("--from", "2026-04-03T12:18:43Z", "--to", "2026-04-03T12:20:00Z"), [2, 3]),
        (("--to", "1s"), [0, 1, 2, 3]),
        (("--from", "0s"), [2, 3, 4, 5]),
        (("--since", "9999999w"), [0, 1, 2, 3, 4, 5]),
        (("--from", "60s", "--to", "70s"), []),
    ],
)
def test_stored_chains_are_those_of_the_time_that_was_asked_for(data_dir, asked, ids):
    db = ("--db", data_dir / "agent_dbs/sample-cluster.db", "--chains")
    every, part = json.loads(ask(*db, "--json")), json.loads(ask(*db, *asked, "--json"))
    assert part == [every[at] for at in ids]
    head, *lines = ask(*db, *asked).splitlines()
    assert len(lines) == len(ids)
    assert head.startswith(f"{len(ids)} chains")
    assert ("of 6, those of the time" in head) == (len(ids) < 6)


def test_what_stored_chains_cannot_be_chosen_by_is_said(data_dir):
    db = ("--db", data_dir / "agent_dbs/sample-cluster.db", "--chains")
    assert "--pid and --last choose no stored chains" in ask(*db, "--pid", "1")
    assert "note" not in ask(*db)


def test_incidents_are_shown_as_chains_where_the_recording_agent_stored_none(tmp_path):
    path = tmp_path / "r.db"
    FAULTS["memory_leak"]().write(path)
    (incident,) = json.loads(ask("--db", path, "--json"))["incidents"]
    (chain,) = json.loads(ask("--db", path, "--chains", "--json"))
    assert (chain["id"], chain["severity"]) == (incident["id"], incident["severity"])
    assert chain["summary"] == incident["title"]
    assert chain["root_cause"] == " + ".join(cause["name"] for cause in incident["causes"])
    text = ask("--db", path, "--chains")
    assert "no chain stored by the recording agent; 1 incident" in text
    assert chain["summary"] in text


def test_missing_file_ends_with_the_store_status_and_its_name(tmp_path, capsys):
    assert run_program(cli, ["explain", "--db", str(tmp_path / "none.db")]) == 4
    assert "none.db: no such file" in capsys.readouterr().err


def test_wrong_time_says_what_one_looks_like(starved, capsys):
    assert run_program(cli, ["explain", "--db", str(starved), "--from", "2026-99-99"]) == 2
    assert "2026-04-03T12:18:35Z" in capsys.readouterr().err


@pytest.fixture
def annotated(tmp_path):
    """A leaking process that said what it did, beside words of another process, of before and of after."""
    built = FAULTS["memory_leak"]()
    path = tmp_path / "said.db"
    built.write(path)
    (incident,) = [i for i in json.loads(ask("--db", path, "--json"))["incidents"] if i["pid"]]
    first, last, pid = incident["start"], incident["end"], incident["pid"]
    rows = [
        (first - 10, '{"when":"before"}', pid, 1, 0, 0, 0, 0, 0),
        (first + 10, '{"step":"7\\u001b[31m"}', pid, 1, 0, 0, 0, 0, 0),
        (first + 20, '{"phase":"entraîné"}', 0, 0, 0, 0, 0, 0, 0),
        (last + 10, '{"span":"overlaps"}', pid, 1, first - 10, first + 10, 0, 0, 0),
        (first + 30, '{"of":"another"}', pid + 1, 1, 0, 0, 0, 0, 0),
        (first + 40, "not JSON", pid, 1, 0, 0, 0, 0, 0),
        (last + 10, '{"when":"after"}', pid, 1, 0, 0, 0, 0, 0),
    ]
    with RecordingWriter(path, "node-0") as writer:
        writer.put_annotations(rows)
    return path


def test_annotations_stand_with_the_incident_that_they_overlap(annotated):
    (plain,) = json.loads(ask("--db", annotated, "--json"))["incidents"]
    assert plain["annotations"] is None
    shown = ask("--db", annotated, "--annotations", "--json")
    assert shown.isascii()  # it stays JSON whatever the encoding of the output is
    (incident,) = json.loads(shown)["incidents"]
    keys = [next(iter(one["labels"])) for one in incident["annotations"]]
    assert sorted(keys) == ["phase", "span", "step"]
    text = ask("--db", annotated, "--annotations")
    assert "  said      phase=entraîné at " in text
    assert "\x1b[31m" not in text
    assert all(word not in text for word in ("before", "after", "another"))
    assert "  said " not in ask("--db", annotated)


def test_annotations_of_a_recording_without_any_are_none_and_nothing_is_warned_of(starved, capsys):
    assert run_program(cli, ["explain", "--db", str(starved), "--annotations"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("part", "where"),
    [
        (
            ("--from", "60s"),
            ": the recording ends at 2026-01-01T00:00:04.050Z, 4.050 s from its first event",
        ),
        (("--to", "2025-12-31T23:00:00Z"), ": the recording begins at 2026-01-01T00:00:00.000Z"),
        (("--pid", "99", "--since", "1s"), ""),
        (("--from", "60ms", "--to", "70ms"), ""),
    ],
)
def test_a_part_without_events_has_no_length_and_says_where_the_recording_is(tmp_path, part, where):
    built = RecordingBuilder()
    for at_ms in (0, 50, 4050):
        built.call((Source.CUDA, 3), at_ms * 1_000_000, 0, pid=7)
    built.write(tmp_path / "r.db")
    head, _, reason = ask("--db", tmp_path / "r.db", *part).splitlines()[:3]
    assert head == "0 events of 0 processes in 0.000 s (of 3 in the file)"
    assert reason == f"no incident: no event is in what was asked for{where}"
    window = json.loads(ask("--db", tmp_path / "r.db", *part, "--json"))["window"]
    assert (window["asked_s"], window["outside"]) == (None, where.removeprefix(": "))
