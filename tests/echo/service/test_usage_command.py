"""`ingero-echo usage`, `verify` and `restore --until` as a person types them."""

import datetime as dt
import json
import re
import shutil

import pytest
from tests.echo.db.stores import make_store, rows_of
from tests.echo.service.conftest import ALL, bearers
from tests.support.echo import RunningEcho

from ingero.cli.main import run_program
from ingero.cli.programs.echo import cli
from ingero.echo.db.backup_names import name_backup
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S


@pytest.fixture
def run(capsys):
    def run(*arguments):
        status = run_program(cli, list(arguments))
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def stored(tmp_path):
    """A database in which two bearers had rows kept, long enough ago that it is counted."""
    rows = rows_of(20)
    rows.bearer = "0123456789ab"
    other = rows_of(5, start=100, cluster="c2")
    store = make_store(tmp_path / "echo.db")
    store.open()
    store.write(rows)
    store.write(other)
    store.close()
    return tmp_path / "echo.db"


def test_a_person_reads_who_stored_what(run, stored, tmp_path):
    (tmp_path / "token").write_text(ALL)
    with RunningEcho(stored, bearers()) as echo:
        asked = (
            "usage",
            "--url",
            echo.url,
            "--token-file",
            str(tmp_path / "token"),
            "--window",
            "1d",
        )
        status, out, _ = run(*asked)
        assert status == 0
        now = r"\d{4}-\d\d-\d\dT\d\d:\d\dZ"
        first, second = out.splitlines()
        assert re.fullmatch(rf"c1  0123456789ab  20 rows, \d+ B, 1 series, last {now}", first)
        assert re.fullmatch(
            rf"c2  \(counted at a start\)  5 rows, \d+ B, 1 series, last {now}", second
        )
        status, out, _ = run(*asked, "--step", "hour")
        assert re.match(rf"{now}  c1  0123456789ab  20 rows", out)
        status, out, _ = run(*asked, "--cluster-id", "c1", "--json")
        assert [row["n_rows"] for row in json.loads(out)["rows"]] == [20]
        status, out, _ = run(*asked, "--cluster-id", "c9")
        assert "nothing was kept" in out


def test_verify_and_restore_say_what_they_found(run, tmp_path):
    clock = ManualClock()
    store = make_store(tmp_path / "echo.db", clock)
    store.open()
    store.write(rows_of(10))
    at = dt.datetime.fromtimestamp(clock.wall_ns() / 1e9, dt.UTC)
    clock.advance(3600 * NS_PER_S)
    store.write(rows_of(10, start=50))
    store.close()
    file = str(tmp_path / "echo.db")
    status, out, _ = run("verify", file)
    assert (status, "rows, all of them readable" in out) == (0, True)
    new = str(tmp_path / "new.db")
    until = at.strftime("%Y-%m-%dT%H:%M:%SZ")
    status, out, _ = run("restore", "--db", new, "--until", until, file)
    assert status == 0
    assert out.startswith(f"{new}: restored 10 rows from {file}, ")
    assert f"that arrived later left out; the newest arrived {until}" in out
    for wrong in ("yesterday", "2026-01-01T00:00:00"):
        status, _, said = run("restore", "--db", new, "--until", wrong, file)
        assert (status, "--until" in said) == (2, True)
    backups = tmp_path / "backups"
    backups.mkdir()
    shutil.copy(file, name_backup(backups, at + dt.timedelta(hours=2)))
    for hours, is_lost in ((1, False), (2, True), (3, True)):
        until = (at + dt.timedelta(hours=hours)).isoformat()
        status, out, said = run("restore", "--db", new, "--until", until, str(backups))
        assert (status, out.startswith(f"{new}: restored")) == (0, True)
        made = f"{at + dt.timedelta(hours=2):%Y-%m-%dT%H:%M:%SZ}"
        assert (f"what arrived after {made} is lost" in said) is is_lost
    (tmp_path / "echo.db").write_bytes(b"x" * 4096)
    status, _, said = run("verify", file)
    assert (status, "no" in said) == (4, True)
