"""How small a recording may be held: a number whose unit was forgotten must not delete what was recorded."""

import pytest

from ingero.cli.main import cli, run_program


@pytest.fixture
def traced(monkeypatch):
    """Configurations with which a trace began."""
    taken = []
    monkeypatch.setattr(
        "ingero.cli.commands.trace.run.run_trace", lambda one: taken.append(one) or 0
    )
    return taken


@pytest.mark.parametrize("option", ["--max-db", "--db-rollover-size"])
@pytest.mark.parametrize("size", ["1", "10", "1023k"])
def test_a_size_that_holds_no_recording_is_refused(traced, capsys, option, size):
    assert run_program(cli, ["trace", option, size]) == 2
    said = capsys.readouterr().err
    assert option in said
    assert f"'{size}' would delete what was just recorded; use at least 1m" in said
    assert traced == []


def test_a_size_without_a_unit_is_refused_in_the_file_too(tmp_path, capsys):
    file = tmp_path / "ingero.yaml"
    file.write_text("trace:\n  db_rollover_size: 1\n")
    assert run_program(cli, ["config", "validate", str(file)]) == 2
    assert "line 2: trace.db_rollover_size: '1' would delete" in capsys.readouterr().err


def test_no_limit_and_small_ones_are_taken(traced):
    assert run_program(cli, ["trace", "--max-db", "0"]) == 0
    assert run_program(cli, ["trace", "--max-db", "1m"]) == 0
    assert run_program(cli, ["trace", "--db-rollover-size", "1048576"]) == 0
    sizes = [(one.max_db, one.rollover_bytes) for one in traced]
    assert sizes == [(0, 0), (1 << 20, 0), (0, 1 << 20)]
