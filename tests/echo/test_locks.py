"""One process has a database file, also after backups and crashes, and a backup is whole."""

import re
import signal
import subprocess
import threading
from pathlib import Path

import duckdb
import pytest
from tests.echo.one_token import ADDRESSES, numbered, run
from tests.echo.process import ACL, Served


def locks(path):
    """Locks that the kernel knows on a file: (kind, mode, pid)."""
    inode = path.stat().st_ino
    found = re.findall(
        rf"^\d+: (\w+)\s+ADVISORY\s+(\w+) (\d+) \w+:\w+:{inode} ",
        Path("/proc/locks").read_text(),
        re.MULTILINE,
    )
    return {(kind, mode, int(pid)) for kind, mode, pid in found}


def serve_again(folder, db):
    acl = folder / "acl2.yaml"
    acl.write_text(ACL)
    acl.chmod(0o600)
    return run("serve", "--insecure-no-tls", "--db", db, *ADDRESSES, "--bearer-acl-file", acl)


def push(echo, start, n=200):
    return echo.push(numbered(start, n).message.SerializeToString()).status_code


def test_seven_backups_under_load_leave_both_locks_and_nobody_else_gets_in(tmp_path):
    with Served(tmp_path) as echo:
        pid, is_over, acknowledged = echo.process.pid, threading.Event(), [0]

        def send():
            while not is_over.is_set():
                assert push(echo, acknowledged[0]) == 200
                acknowledged[0] += 200

        sender = threading.Thread(target=send)
        sender.start()
        before = locks(echo.db)
        assert before == {("POSIX", "WRITE", pid)}
        for number in range(7):
            copy = tmp_path / f"{number}.db"
            least = acknowledged[0]
            done = run("backup", "--db", echo.db, "-o", copy)
            assert done.returncode == 0, done.stderr
            with duckdb.connect(str(copy), read_only=True) as backup:
                (n_rows,) = backup.execute("SELECT count(*) FROM events").fetchone()
                (n_entries,) = backup.execute("SELECT count(*) FROM usage").fetchone()
            assert n_rows >= least
            n_all = n_rows + n_entries + 1  # and one node
            assert f"{n_all} rows; opened and counted" in done.stdout
            assert locks(echo.db) == before
            assert locks(Path(f"{echo.db}.lock")) == {("FLOCK", "WRITE", pid)}
        for command in (
            ("migrate", "--db", echo.db),
            ("repair", "--db", echo.db),
            ("restore", "--db", echo.db, tmp_path / "0.db"),
            ("mcp", "--db", echo.db),
        ):
            refused = run(*command)
            assert (refused.returncode, "in use" in refused.stderr) == (4, True), refused.stderr
        second = serve_again(tmp_path, echo.db)
        assert (second.returncode, "in use" in second.stderr) == (4, True), second.stderr
        is_over.set()
        sender.join()
        assert echo.sql("SELECT count(*), count(DISTINCT value_double) FROM events") == [
            [acknowledged[0]] * 2
        ]
        echo.process.send_signal(signal.SIGTERM)
        assert echo.process.wait(120) == 0
    assert locks(Path(f"{echo.db}.lock")) == set()


def test_a_crash_leaves_nothing_that_blocks_the_next_start(tmp_path):
    with Served(tmp_path) as echo:
        assert push(echo, 0) == 200
        echo.process.kill()
        echo.process.wait()
        with Served(tmp_path) as again:
            assert again.sql("SELECT count(*) FROM events") == [[200]]


def test_the_file_is_one_file_by_whatever_link_it_is_named(tmp_path):
    link = tmp_path / "link.db"
    with Served(tmp_path) as echo:
        link.symlink_to(echo.db)
        second = serve_again(tmp_path, link)
        assert (second.returncode, "in use" in second.stderr) == (4, True)


def test_a_lock_is_held_although_duckdbs_own_is_lost(tmp_path):
    """Closing any descriptor of the file in its process drops DuckDB's lock; a second writer stays out all the same."""
    import sys

    code = (
        "import os, sys\nfrom ingero.echo.db.store import Store, StoreSettings\n"
        "from ingero.telemetry.clock import SystemClock\n"
        "store = Store(sys.argv[1], StoreSettings(min_free_bytes=0), SystemClock())\nstore.open()\n"
        "os.close(os.open(sys.argv[1], os.O_RDONLY))\nprint('open', flush=True)\nsys.stdin.read()\n"
    )
    db = tmp_path / "echo.db"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(db)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "open\n"
    assert locks(db) == set()
    second = serve_again(tmp_path, db)
    assert (second.returncode, "in use" in second.stderr) == (4, True)
    holder.communicate()
    assert holder.returncode == 0


def test_a_copy_with_other_rows_than_its_database_is_no_backup(tmp_path, monkeypatch):
    from ingero.echo.db import files
    from ingero.errors import StoreError

    with Served(tmp_path) as echo:
        assert push(echo, 0) == 200
        real = files.request_backup
        monkeypatch.setattr(files, "request_backup", lambda *args: real(*args) | {"events": 201})
        with pytest.raises(StoreError, match="200 rows of events and not 201"):
            files.back_up(echo.db, tmp_path / "copy.db")
    assert list(tmp_path.glob("copy*")) == []
