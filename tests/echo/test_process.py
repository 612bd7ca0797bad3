"""The program as a process: signals, crashes, a full disk, and its file tools."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time

import httpx
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from tests.echo.one_token import ADDRESSES, ECHO, TOKEN, Echo, fill, numbered, run
from tests.echo.service.conftest import health

from ingero.config import parse_model
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.listeners import name_setting
from ingero.errors import IngeroError


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
