"""The program as a process: signals, crashes, a full disk, and its file tools."""

import asyncio
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import duckdb
import httpx
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from tests.echo.service.conftest import collectives, gauge, health, metrics, resource
from tests.support import local_http

from ingero.config import parse_model
from ingero.echo.db.backup_socket import _ask as send_request
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.listeners import name_setting
from ingero.errors import IngeroError
from ingero.otlp.names import Signal

ECHO = Path(sys.executable).with_name("ingero-echo")
TOKEN = "t" * 32
ADDRESSES = [
    part
    for flag in ("--otlp-addr", "--otlp-http-addr", "--mcp-addr", "--health-addr")
    for part in (flag, "127.0.0.1:0")
]


class Echo:
    """A served database in a process of its own."""

    def __init__(self, db, token_file, *more, program=(str(ECHO),)):
        command = [*program, "serve", "--insecure-no-tls", "--db", str(db), *ADDRESSES]
        command += ["--auth-token-file", str(token_file), *more]
        self.log = token_file.with_name(f"{db.name}.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        line = self.process.stdout.readline()
        ports = re.findall(r"127\.0\.0\.1:(\d+)", line)
        assert len(ports) == 4, self.log.read_text()
        _, self.otlp, self.api, self.health = (int(port) for port in ports)

    def push(self, export, signal=Signal.METRICS, token=TOKEN, timeout=120):
        return local_http.post(
            f"http://127.0.0.1:{self.otlp}/v1/{signal.value}",
            content=export.message.SerializeToString(),
            headers={"authorization": f"Bearer {token}", "content-type": "application/x-protobuf"},
            timeout=timeout,
        )

    def sql(self, text):
        answer = local_http.post(
            f"http://127.0.0.1:{self.api}/api/v2/sql",
            json={"sql": text, "time_window": "99d"},
            headers={"authorization": f"Bearer {TOKEN}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["rows"]

    def whoami(self, token):
        headers = {"authorization": f"Bearer {token}"}
        return local_http.get(
            f"http://127.0.0.1:{self.api}/api/v2/whoami", headers=headers
        ).status_code

    def end(self, how=signal.SIGTERM):
        self.process.send_signal(how)
        status = self.process.wait(120)
        self.process.stdout.close()
        return status


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return file


def run(*args):
    return subprocess.run([str(ECHO), *map(str, args)], capture_output=True, text=True, check=False)


def numbered(start, n):
    """Rows whose value is their number, so that each can be counted."""
    now_ns = time.time_ns()
    points = [gauge("numbered", float(start + i), now_ns + i) for i in range(n)]
    return metrics([(resource("c1", "n1"), points)])


def test_sigterm_ends_it_well_and_the_next_start_has_everything(tmp_path, token_file):
    echo = Echo(tmp_path / "echo.db", token_file)
    assert echo.push(health("c1", time.time_ns())).status_code == 200
    assert echo.end() == 0
    again = Echo(tmp_path / "echo.db", token_file)
    assert again.sql("SELECT count(*) FROM events") == [[45]]
    assert again.end(signal.SIGINT) == 0


def test_sighup_rotates_and_a_broken_file_keeps_the_old_token(tmp_path, token_file):
    echo = Echo(tmp_path / "echo.db", token_file)
    fresh = "f" * 32

    def hang_up(until):
        seen = echo.log.stat().st_size
        echo.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if until in echo.log.read_bytes()[seen:].decode():
                return
            os.sched_yield()
        raise AssertionError(until)

    token_file.write_text("")
    hang_up("the old ones stay")
    assert (echo.whoami(TOKEN), echo.whoami(fresh)) == (200, 401)
    token_file.write_text(fresh)
    hang_up("bearer_rotation_applied")
    assert (echo.whoami(TOKEN), echo.whoami(fresh)) == (200, 200)
    assert TOKEN not in echo.log.read_text()
    assert fresh not in echo.log.read_text()
    assert echo.end() == 0


N_SENDERS = 4
STRIDE = 10_000_000  # numbers of one sender


class Sender(threading.Thread):
    """Sends numbered rows until its Echo is killed under it; keeps what was and what was not answered."""

    def __init__(self, first, acks):
        super().__init__()
        self.next, self.acks = first, acks
        self.acknowledged, self.unsure = [], []
        self.echo = None

    def again(self, echo):
        """What a collector does after a restart: send again what was not answered, then go on."""
        retried = Sender(self.next, self.acks)
        retried.acknowledged, retried.unsure, retried.echo = self.acknowledged, self.unsure, echo
        return retried

    def retry(self):
        for start, export in self.unsure:
            assert self.echo.push(export).status_code == 200
            self.acknowledged.append(start)
        self.unsure = []

    def run(self):
        try:
            self.retry()
            while True:
                start, export = self.next, numbered(self.next, 200)
                self.unsure, self.next = [(start, export)], start + 200
                assert self.echo.push(export).status_code == 200
                self.acknowledged.append(start)
                self.unsure = []
                self.acks.release()
        except httpx.HTTPError:
            return


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_acknowledged_row_is_there_once_after_twenty_kills_under_several_senders(
    tmp_path, token_file
):
    db = tmp_path / "echo.db"
    acks = threading.Semaphore(0)
    senders = [Sender(STRIDE * number, acks) for number in range(N_SENDERS)]
    for round_number in range(20):
        echo = Echo(db, token_file)
        senders = [sender.again(echo) for sender in senders]
        for sender in senders:
            sender.start()
        for _ in range(N_SENDERS * (1 + round_number % 4)):
            assert acks.acquire(timeout=120)
        echo.process.kill()
        for sender in senders:
            sender.join()
        echo.process.wait()
        echo.process.stdout.close()
    last = Echo(db, token_file)
    for sender in senders:
        sender.echo = last
        sender.retry()
    found = last.sql("SELECT count(*), count(DISTINCT value_double) FROM events")
    n_rows = 200 * sum(len(sender.acknowledged) for sender in senders)
    assert n_rows > 20 * N_SENDERS * 200
    assert found == [[n_rows, n_rows]]
    for number, sender in enumerate(senders):
        first = STRIDE * number
        ((n_of_sender, most),) = last.sql(
            f"SELECT count(*), max(value_double) FROM events WHERE value_double >= {first} "
            f"AND value_double < {first + STRIDE}"
        )
        assert n_of_sender == 200 * len(sender.acknowledged)
        assert most == max(sender.acknowledged) + 199
    assert last.end() == 0


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


def fill(db, token_file, *batches):
    echo = Echo(db, token_file)
    for batch in batches:
        assert echo.push(batch).status_code == 200
    return echo


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


def test_stdio_speaks_mcp_over_a_file(tmp_path, token_file):
    db = tmp_path / "echo.db"
    fill(db, token_file, health("c1", time.time_ns())).end()

    async def work():
        server = StdioServerParameters(command=str(ECHO), args=["mcp", "--db", str(db)])
        async with Client(stdio_client(server)) as client:
            found = await client.call_tool("fleet.cluster.find_stragglers", {})
            counted = await client.call_tool(
                "fleet.cluster.run_analysis", {"sql": "SELECT count(*) FROM events"}
            )
            return found.structured_content, counted.structured_content

    found, counted = asyncio.run(work())
    assert [row["node_id"] for row in found["rows"]] == ["c1-n3"]
    assert counted["rows"] == [[45]]


def test_stdio_ends_at_the_first_interrupt_while_nobody_writes(tmp_path, token_file):
    db = tmp_path / "echo.db"
    fill(db, token_file).end()
    serving = subprocess.Popen(
        [ECHO, "mcp", "--db", db],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with serving:
        serving.stdin.write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
        serving.stdin.flush()
        assert json.loads(serving.stdout.readline())["id"] == 1
        serving.send_signal(signal.SIGINT)
        try:
            assert serving.wait(60) == 130
        finally:
            serving.kill()
        assert (serving.stdout.read(), serving.stderr.read()) == (b"", b"\n")


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


def test_a_time_that_is_in_no_year_of_utc_is_refused(tmp_path):
    until = "0001-01-01T00:00:00+14:00"
    refused = run("restore", "--db", tmp_path / "echo.db", "--until", until, tmp_path)
    assert refused.returncode == 2
    assert f"Invalid value for --until: '{until}' is in no year of UTC" in refused.stderr


def test_settings_are_refused_with_every_reason(tmp_path):
    file = tmp_path / "echo.yaml"
    file.write_text("mcp_addr: 0.0.0.0:8081\nretenton: 5d\nquery_timeout: fast\n")
    refused = run("validate", "--config", file, "--auth-token", TOKEN)
    assert refused.returncode == 2
    assert "line 2" in refused.stderr
    assert "retention" in refused.stderr
    assert "line 3" in refused.stderr
    open_wide = run(
        "validate", "--insecure-no-tls", "--mcp-addr", "0.0.0.0:8081", "--auth-token", TOKEN
    )
    assert (open_wide.returncode, "not loopback" in open_wide.stderr) == (2, True)
    plain = run("validate", "--auth-token", TOKEN)
    assert (plain.returncode, "--tls-cert" in plain.stderr) == (2, True)
    for refused in (open_wide, plain):
        assert "got a mapping" not in refused.stderr
    assert "--mcp-addr 0.0.0.0:8081 is not loopback; --insecure-no-tls is" in open_wide.stderr
    assert "--tls-cert and --tls-key are missing" in plain.stderr
    spelled = run("validate", "--insecure-no-tls", "--retention", "5parsecs", "--auth-token", TOKEN)
    assert "error: --retention: '5parsecs' is not a duration" in spelled.stderr
    mixed = run("validate", "--config", file, "--retention", "5parsecs", "--auth-token", TOKEN)
    assert "line 3: query_timeout: 'fast'" in mixed.stderr
    assert "--retention: '5parsecs'" in mixed.stderr
    nobody = run("validate", "--insecure-no-tls")
    assert (nobody.returncode, "no bearer token" in nobody.stderr) == (2, True)
    store = ("--store", "clickhouse://echo@127.0.0.1/d", "--store-password-file", tmp_path / "no")
    unknown = run("validate", "--insecure-no-tls", "--auth-token", TOKEN, *store)
    assert (unknown.returncode, "no: No such file" in unknown.stderr) == (2, True)


@pytest.mark.parametrize("flag", ["--otlp-addr", "--otlp-http-addr", "--mcp-addr", "--health-addr"])
def test_a_taken_address_is_named_with_the_flag_that_moves_it(tmp_path, token_file, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        addresses = list(ADDRESSES)
        addresses[addresses.index(flag) + 1] = f"127.0.0.1:{taken.getsockname()[1]}"
        started = run(
            *("serve", "--insecure-no-tls", "--db", tmp_path / "echo.db", *addresses),
            *("--auth-token-file", token_file),
        )
    assert started.returncode == 1
    assert "cannot listen on 127.0.0.1:" in started.stderr
    assert flag in started.stderr


@pytest.mark.parametrize("key", ["otlp_addr", "otlp_http_addr", "mcp_addr", "health_addr"])
def test_where_echo_and_fleet_meet_by_default_the_error_names_fleet(key):
    config = parse_model(EchoConfig, {"insecure_no_tls": True})
    with pytest.raises(IngeroError) as refused, name_setting(key, config):
        raise IngeroError("cannot listen")
    port = getattr(config, key).port
    flag = f"--{key.replace('_', '-')}"
    assert refused.value.hint.startswith(f"ingero-fleet listens on {port} by default")
    assert refused.value.hint.endswith(f"{flag} 127.0.0.1:{port + 10_000}")


def test_the_printed_defaults_are_valid_settings(tmp_path):
    printed = run("config", "--defaults")
    assert printed.returncode == 0
    file = tmp_path / "echo.yaml"
    file.write_text(printed.stdout)
    checked = run("validate", "--config", file, "--insecure-no-tls", "--auth-token", TOKEN)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout == "valid: 1 bearer\n"
