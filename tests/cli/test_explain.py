"""`ingero explain`: text and JSON say the same, errors name the file, the file stays as it was."""

import json

import pytest
from click.testing import CliRunner

from ingero.agent.scenarios.builder import RecordingBuilder
from ingero.cli.main import cli, run_program
from ingero.model.events import Source


def ask(*args):
    result = CliRunner().invoke(cli, ["explain", *map(str, args)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def starved(data_dir):
    return data_dir / "agent_dbs/pytorch-dataloader-starvation.db"


def test_json_holds_every_documented_key(starved):
    answer = json.loads(ask("--db", starved, "--json"))
    assert set(answer) == {"incidents", "window"}
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


def test_healthy_recording_says_that_it_looked(data_dir):
    text = ask("--db", data_dir / "agent_dbs/sample-gpu-node-02.db")
    assert "no incident: every rule looked" in text


def test_window_counts_from_the_data_not_from_now(starved):
    all_of_it = json.loads(ask("--db", starved, "--json"))
    part = json.loads(ask("--db", starved, "--from", "0s", "--to", "10s", "--json"))
    assert part["window"]["events"] < all_of_it["window"]["events"]
    # In its first second alone the job is bound by its pageable copies; the silence comes later.
    assert [i["rule"] for i in part["incidents"]] == ["copy_bound", "lazy_load"]
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


def test_stored_chains_are_shown_as_the_other_agents_words(data_dir):
    chains = json.loads(ask("--db", data_dir / "agent_dbs/sample-cluster.db", "--chains", "--json"))
    assert len(chains) == 6
    assert "not verified" in ask("--db", data_dir / "agent_dbs/sample-cluster.db", "--chains")


def test_missing_file_ends_with_the_store_status_and_its_name(tmp_path, capsys):
    assert run_program(cli, ["explain", "--db", str(tmp_path / "none.db")]) == 4
    assert "none.db: no such file" in capsys.readouterr().err


def test_wrong_time_says_what_one_looks_like(starved, capsys):
    assert run_program(cli, ["explain", "--db", str(starved), "--from", "2026-99-99"]) == 2
    assert "2026-04-03T12:18:35Z" in capsys.readouterr().err
