"""What a command starts for itself ends with the command, also when that is killed."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support import local_http

from ingero.errors import IngeroError, UnsupportedError
from ingero.sim.launcher import launch

FLEET = """
from ingero.sim.local_fleet import run_local_fleet
started = run_local_fleet()
"""
ECHO = """
from ingero.sim.local_echo import run_local_echo
started = run_local_echo()
"""
HOLDER = """
with started:
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", [FLEET, ECHO], ids=["fleet", "echo"])
@pytest.mark.parametrize("how", ["killed", "asked to end"])
def test_what_a_command_started_ends_with_it(what, how):
    command = [sys.executable, "-c", f"import sys\n{what}{HOLDER}"]
    with (
        ExitStack() as stack,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder,
    ):
        assert holder.stdout.readline() == b"started\n"
        children = [int(pid) for pid in children_of(holder.pid)]
        assert len(children) == 1
        pidfd = os.pidfd_open(children[0])
        stack.callback(os.close, pidfd)
        if how == "killed":
            holder.send_signal(signal.SIGKILL)
        else:
            holder.stdin.close()
            assert holder.wait(120) == 0
        ended, _, _ = select.select([pidfd], [], [], 30)
        assert ended


def test_program_that_ends_instead_says_why_and_leaves_nothing_open():
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with (
        pytest.raises(IngeroError, match=r"(?s)ingero-fleet did not start .exit status 2.*no.yaml"),
        launch("ingero.cli.programs.fleet", ["--config", "no.yaml"]),
    ):
        pass
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.slow
def test_every_program_reports_where_it_listens(tmp_path):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("t" * 32)
    alerter = tmp_path / "alerter.json"
    alerter.write_text(
        json.dumps({"uds_path": str(tmp_path / "s"), "webhook": {"url": "http://127.0.0.1:9/"}})
    )
    anywhere = [f"--{name}-addr=127.0.0.1:0" for name in ("otlp", "otlp-http", "mcp", "health")]
    arguments = {
        "echo": ["serve", "--insecure-no-tls", f"--db={tmp_path}/e.db", f"--auth-token-file={token}",
                 *anywhere],
        "sink": ["--listen=127.0.0.1:0", f"--socket-path={tmp_path}/s"],
        "alerter": [f"--config={alerter}", "--listen=127.0.0.1:0"],
    }  # fmt: skip
    expected = {
        "echo": {"health": "/healthz", "mcp": "/healthz", "otlp_http": "/", "otlp_grpc": None},
        "sink": {"metrics": "/metrics"},
        "alerter": {"metrics": "/metrics"},
    }
    for name, given in arguments.items():
        with launch(f"ingero.cli.programs.{name}", given) as program:
            assert program.addresses.keys() == expected[name].keys()
            for what, path in expected[name].items():
                host, port = program.address(what).split(":")
                assert (host, int(port) > 0) == ("127.0.0.1", True)
                if path:
                    local_http.get(program.url(what, path), timeout=120)
            with pytest.raises(UnsupportedError, match=f"ingero-{name} has no address of gopher"):
                program.address("gopher")
            program.signal(signal.SIGTERM)
            assert program.wait() == 0


def children_of(pid):
    return [
        child
        for tasks in Path(f"/proc/{pid}/task").iterdir()
        for child in (tasks / "children").read_text().split()
    ]
