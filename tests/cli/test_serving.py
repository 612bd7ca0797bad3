"""`ingero dashboard`, `mcp`, `export` and `merge` tell a wrong path at once and overwrite nothing unasked."""

import json
import shutil

import pytest
from click.testing import CliRunner

from ingero.cli.main import cli, run_program


@pytest.fixture
def node_01(data_dir):
    return data_dir / "agent_dbs/sample-gpu-node-01.db"


@pytest.mark.parametrize("command", ["dashboard", "mcp"])
def test_path_that_is_not_there_is_wrong_usage(command, tmp_path, capsys):
    assert run_program(cli, [command, "--db", str(tmp_path / "typo.db")]) == 2
    said = capsys.readouterr().err
    assert "typo.db: no such file" in said
    assert "--wait" in said


@pytest.mark.parametrize("command", ["dashboard", "mcp"])
def test_file_that_is_no_recording_is_refused(command, tmp_path, capsys):
    (tmp_path / "notes.db").write_text("these are my notes, not a recording" * 10)
    assert run_program(cli, [command, "--db", str(tmp_path / "notes.db")]) == 4
    assert "not an SQLite database" in capsys.readouterr().err


def test_missing_default_says_what_makes_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("INGERO_DB", str(tmp_path / "none.db"))
    assert run_program(cli, ["dashboard"]) == 2
    assert "ingero trace" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["export", "merge"])
def test_existing_output_needs_force(command, node_01, tmp_path):
    source, output = tmp_path / "a.db", tmp_path / "out"
    shutil.copyfile(node_01, source)
    output.write_text("mine")
    line = {
        "export": ["export", "--format", "perfetto", "--db", str(source), "-o", str(output)],
        "merge": ["merge", str(source), "-o", str(output)],
    }[command]
    refused = CliRunner().invoke(cli, line)
    assert (refused.exit_code, output.read_text()) == (2, "mine")
    assert "--force" in refused.output
    done = CliRunner().invoke(cli, [*line, "--force"])
    assert done.exit_code == 0, done.output
    assert output.read_bytes() != b"mine"
    if command == "export":
        assert json.loads(output.read_bytes())["traceEvents"]


def test_merge_never_replaces_its_own_source(node_01, tmp_path):
    source = tmp_path / "a.db"
    shutil.copyfile(node_01, source)
    before = source.read_bytes()
    assert run_program(cli, ["merge", str(source), "-o", str(source), "--force"]) == 1
    assert source.read_bytes() == before
