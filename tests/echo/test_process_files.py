"""A real `ingero-echo` and its files: backup and restore, repair, full disks, tokens, and paths that hold no database."""

import asyncio
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from contextlib import AsyncExitStack, closing, suppress
from pathlib import Path

import duckdb
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from tests.echo.one_token import ADDRESSES, ECHO, TOKEN, Echo, fill, numbered, run
from tests.echo.service.conftest import collectives, health
from tests.support import local_http

from ingero.echo.db.backup_socket import _ask as send_request
from ingero.otlp.names import Signal


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.kernel
@pytest.mark.timeout(200)
@pytest.mark.parametrize("min_free", ["4MiB", "0"])
def test_a_full_disk_stops_ingest_and_not_reads_and_room_mends_it(small_disk, token_file, min_free):
    """With the watch, and with the watch off: then the database itself meets the end of the disk."""
    echo = Echo(small_disk / "echo.db", token_file, "--set", f"min_free_space={min_free}")
    ballast = small_disk / "ballast"
    n_taken = 0
    ballast.write_bytes(bytes(12 << 20))
    refused = None
    for i in range(3000):
        answer = echo.push(collectives("c1", time.time_ns() + i, n_ops=4000))
        answer = echo.push(collectives(f"c{i}", time.time_ns(), n_ops=4000), Signal.LOGS)
        if answer.status_code != 200:
            refused = answer
            break
        n_taken += 1
    assert refused is not None
    assert refused.status_code in {429, 503}
    assert int(refused.headers["retry-after"]) >= 1
    expected = 4 * 4000 * n_taken
    assert echo.sql("SELECT count(*) >= 1 FROM collectives") == [[True]]
    ballast.unlink()
    deadline = time.monotonic() + 60
    answer = refused
    while answer.status_code != 200 and time.monotonic() < deadline:
        answer = echo.push(health("after", time.time_ns()))
    assert answer.status_code == 200
    assert echo.sql("SELECT count(*) FROM events WHERE cluster_id = 'after'") == [[45]]
    headers = {"authorization": f"Bearer {TOKEN}"}
    metrics_text = local_http.get(f"http://127.0.0.1:{echo.api}/metrics", headers=headers).text
    written = re.search(r'rows_total\{outcome="written"\} (\S+)', metrics_text)
    assert float(written[1]) >= expected
    assert echo.end() == 0


def mode(path):
    return path.stat().st_mode & 0o777


def test_backup_and_restore_round_trip_and_keep_what_was_there(tmp_path, token_file):
    db, copy = tmp_path / "new" / "echo.db", tmp_path / "copy.db"
    fill(db, token_file, numbered(0, 10)).end()
    assert (mode(db.parent), mode(db)) == (0o700, 0o600)
    assert run("backup", "--db", db, "-o", copy).returncode == 0
    assert run("backup", "--db", db, "-o", copy).returncode == 4
    fill(db, token_file, numbered(10, 10)).end()
    restored = run("restore", "--db", db, copy)
    assert restored.returncode == 0
    assert "before-restore-1" in restored.stdout
    assert (mode(copy), mode(db)) == (0o600, 0o600)
    again = Echo(db, token_file)
    assert again.sql("SELECT count(*) FROM events") == [[10]]
    busy = run("restore", "--db", db, copy)
    assert (busy.returncode, "in use" in busy.stderr) == (4, True)
    again.end()
    foreign = tmp_path / "foreign.db"
    foreign.write_bytes(b"not a database" * 1000)
    assert run("restore", "--db", db, foreign).returncode == 4
    with duckdb.connect(str(copy)) as newer:
        newer.execute("INSERT INTO schema_migrations VALUES (999, 'later', now()::TIMESTAMP)")
    refused = run("restore", "--db", db, copy)
    assert (refused.returncode, "has schema 999" in refused.stderr) == (4, True)
    assert run("restore", "--db", copy, db).returncode == 4  # nor onto one
    assert Echo(db, token_file).end() == 0


def test_a_backup_beside_full_ingest_is_of_one_moment_and_loses_no_acknowledged_row(
    tmp_path, token_file
):
    db, copy = tmp_path / "echo.db", tmp_path / "copy.db"
    echo = fill(db, token_file, numbered(0, 200))
    control = Path(f"{db}.backup.sock")
    assert (control.is_socket(), mode(control)) == (True, 0o600)
    acknowledged, is_over = [], threading.Event()

    def send():
        start = 200
        while not is_over.is_set():
            assert echo.push(numbered(start, 200)).status_code == 200
            start += 200
            acknowledged.append(start)

    sender = threading.Thread(target=send)
    sender.start()
    while not acknowledged:
        os.sched_yield()
    before = acknowledged[-1]
    done = run("backup", "--db", db, "-o", copy)
    after = acknowledged[-1] + 200  # one more may be on disk and not answered yet
    is_over.set()
    sender.join()
    assert done.returncode == 0, done.stderr
    assert mode(copy) == 0o600
    assert sorted(path.name for path in tmp_path.glob("copy*")) == ["copy.db"]
    with duckdb.connect(str(copy), read_only=True) as backup:
        n_rows, n_values, most = backup.execute(
            "SELECT count(*), count(DISTINCT value_double), max(value_double) FROM events"
        ).fetchone()
    assert n_rows == n_values == most + 1
    assert n_rows % 200 == 0
    assert before <= n_rows <= after
    assert echo.sql("SELECT count(*) FROM events") == [[acknowledged[-1]]]
    assert echo.end() == 0
    assert not control.exists()


@pytest.mark.kernel
def test_a_backup_that_finds_no_room_says_so_and_leaves_nothing_and_the_server_well(
    small_disk, tmp_path, token_file
):
    echo = fill(tmp_path / "echo.db", token_file, numbered(0, 200))
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(1 << 16)):
            pass
    refused = run("backup", "--db", tmp_path / "echo.db", "-o", small_disk / "copy.db")
    assert (refused.returncode, "free" in refused.stderr) == (4, True)
    fds = [os.open(small_disk / name, os.O_WRONLY | os.O_CREAT) for name in ("a", "b")]
    answer = send_request(tmp_path / "echo.db.backup.sock", fds)  # past the look at the room
    for fd in fds:
        os.close(fd)
    assert "No space left" in answer["error"]
    assert echo.push(numbered(200, 200)).status_code == 200
    assert echo.sql("SELECT count(*) FROM events") == [[400]]
    assert echo.end() == 0


def test_a_token_file_that_everybody_may_read_is_refused(tmp_path, token_file):
    token_file.chmod(0o604)
    checked = run("validate", "--insecure-no-tls", "--auth-token-file", token_file)
    assert checked.returncode == 2
    assert "everybody may read it (mode 604)" in checked.stderr
    token_file.chmod(0o640)
    checked = run("validate", "--insecure-no-tls", "--auth-token-file", token_file)
    assert checked.stderr == ""


def test_repair_cuts_a_damaged_log_and_keeps_a_copy_and_every_earlier_batch(tmp_path, token_file):
    db = tmp_path / "echo.db"
    echo = fill(db, token_file, *(numbered(i * 100, 100) for i in range(6)))
    echo.end(signal.SIGKILL)
    wal = Path(f"{db}.wal")
    log = bytearray(wal.read_bytes())
    log[-2000:-1000] = bytes(1000)
    wal.write_bytes(log)
    refused = subprocess.run(
        [
            str(ECHO),
            "serve",
            "--insecure-no-tls",
            "--db",
            str(db),
            *ADDRESSES,
            "--auth-token-file",
            str(token_file),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert refused.returncode == 4
    assert "ingero-echo repair" in refused.stderr
    done = run("repair", "--db", db)
    assert done.returncode == 0, done.stderr
    (kept,) = tmp_path.glob("echo.db.wal.damaged-*")
    assert kept.read_bytes() == bytes(log)
    assert run("repair", "--db", db).stdout.strip().endswith("nothing to repair")
    again = Echo(db, token_file)
    ((n_rows, least),) = again.sql("SELECT count(*), min(value_double) FROM events")
    assert (n_rows, least) == (500, 0.0)
    again.end()


async def count_over_stdio(db, n_at_once):
    """Rows of `events`, asked of processes that are open together: of a tool's question and of SQL's in the sandbox."""
    counts = []
    server = StdioServerParameters(command=str(ECHO), args=["mcp", "--db", str(db)])
    async with AsyncExitStack() as stack:
        for client in [Client(stdio_client(server)) for _ in range(n_at_once)]:
            await stack.enter_async_context(client)
            given = {"sql": "SELECT count(*) FROM events", "time_window": "99d"}
            found = await client.call_tool("fleet.cluster.run_analysis", given)
            listed = await client.call_tool("fleet.cluster.usage", {"time_window": "99d"})
            assert not listed.is_error
            counts += found.structured_content["rows"]
    return counts


def test_mcp_over_a_file_changes_nothing_also_where_a_killed_server_left_its_log(
    tmp_path, token_file
):
    db, copy, left = tmp_path / "echo.db", tmp_path / "copy" / "copy.db", tmp_path / "left"
    fill(db, token_file, numbered(0, 10), numbered(10, 10)).end(signal.SIGKILL)
    left.mkdir()
    for name in ("echo.db", "echo.db.wal"):
        shutil.copy(tmp_path / name, left)
        (left / name).chmod(0o400)
    copy.parent.mkdir()
    assert run("backup", "--db", db, "-o", copy).returncode == 0
    for path in (left / "echo.db", copy):
        path.parent.chmod(0o500)
        before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
        assert asyncio.run(count_over_stdio(path, 2)) == [[20], [20]]
        assert {file.name: file.read_bytes() for file in path.parent.iterdir()} == before
        path.parent.chmod(0o700)
    log = bytearray((left / "echo.db.wal").read_bytes())
    log[-2000:-1000] = bytes(1000)
    (left / "echo.db.wal").chmod(0o600)
    (left / "echo.db.wal").write_bytes(log)
    refused = run("mcp", "--db", left / "echo.db")
    assert (refused.returncode, "ingero-echo repair" in refused.stderr) == (4, True)


def test_a_path_without_an_echo_database_is_said_to_be_what_it_is_and_none_is_made(tmp_path):
    recording, folder, absent = (tmp_path / name for name in ("run.db", "folder", "ehco.db"))
    with closing(sqlite3.connect(recording)) as connection:
        connection.execute("CREATE TABLE events (timestamp INTEGER)")
    folder.mkdir()
    said = {
        absent: "ehco.db does not exist",
        folder: "folder is not a file",
        recording: "run.db is not an Echo database: it is an SQLite file",
    }
    before = recording.read_bytes()
    for path, reason in said.items():
        for refused in (run("mcp", "--db", path), run("verify", path)):
            assert refused.returncode == 4, refused.stderr
            assert reason in refused.stderr
    assert not absent.exists()
    assert recording.read_bytes() == before
