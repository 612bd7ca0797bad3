"""What every command of every program shares: exit codes, closed pipes, full disks."""

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from tests.support.packaged_trace import write_first_steps

from ingero.cli import main
from ingero.cli.programs import echo

INGERO = [sys.executable, "-m", "ingero"]
JOB = "tests/data/jobs/ddp.cpu-quota-2-50pct.s0.parquet"


def shell(line, environ=None):
    return subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", line.replace("ingero", " ".join(INGERO), 1)],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **(environ or {})},
        errors="replace",
    )  # fmt: skip


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Of the packaged trace so much as has a verdict: what is printed is tested here, not how it is found."""
    return write_first_steps(tmp_path_factory.mktemp("trace") / "AR.parquet", 4)


@pytest.mark.parametrize("command", ["sim list", "replay {trace} --offline --json", "--help"])
def test_reader_that_closes_the_pipe_is_no_error(command, trace):
    done = shell(f"ingero {command.format(trace=trace)} | head -c 1 >/dev/null")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def left():
    """A pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as left:
        yield left


def test_a_table_without_a_reader_is_no_error(left, trace):
    line = [*INGERO, "replay", str(trace), "--offline"]
    done = subprocess.run(line, stdout=left, stderr=subprocess.PIPE, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "line",
    ["replay {job} --speed 20000 --json", "check --json --support-bundle {folder}/bundle.tar.gz"],
)
@pytest.mark.parametrize("is_full", [False, True])
def test_a_result_is_printed_whatever_becomes_of_standard_error(line, is_full, left, tmp_path):
    arguments = line.format(folder=tmp_path, job=JOB).split()
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*INGERO, *arguments],
            stdout=subprocess.PIPE,
            stderr=full if is_full else left,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0
    assert json.loads(done.stdout)


@pytest.mark.parametrize(
    "line", ["demo incident", "query --db /nowhere.db", "replay {trace} --offline"]
)
@pytest.mark.parametrize(("wish", "has_colours"), [("", True), ("1", False)])
def test_a_terminal_shows_colours_unless_the_user_wants_none(line, wish, has_colours, trace):
    line = line.format(trace=trace)
    ours, its = pty.openpty()
    environ = {**os.environ, "NO_COLOR": wish, "TERM": "xterm"}
    shown = b""
    with subprocess.Popen([*INGERO, *line.split()], stdout=its, stderr=its, env=environ):
        os.close(its)
        with suppress(OSError):  # pty(7): EIO once nobody has the other end
            while part := os.read(ours, 4096):
                shown += part
    os.close(ours)
    assert shown
    assert bool(re.search(rb"\x1b\[(1;)?3\dm", shown)) is has_colours


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_standard_file_that_is_closed_is_no_error(closed):
    done = shell(f"ingero version {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    done = shell(f"ingero query --db /nowhere.db {closed}")
    assert done.returncode == 4


def test_no_file_of_ours_takes_the_place_of_a_standard_file_that_is_closed(tmp_path):
    file = tmp_path / "x"
    code = (
        "import click; from ingero.cli.main import run_program\n"
        "def use():\n"
        f"  with open({str(file)!r}, 'w') as file: file.write(str(file.fileno()))\n"
        "run_program(click.Command('x', callback=use), [])"
    )
    line = f'{sys.executable} -c "$CODE" <&- >&- 2>&-'
    done = subprocess.run(
        ["/bin/bash", "-c", line], env={**os.environ, "CODE": code}, timeout=120, check=False
    )
    assert done.returncode == 0
    assert int(file.read_text()) > 2


def test_full_device_is_one_line_and_a_failure(trace):
    done = shell(f"ingero replay {trace} --offline --json > /dev/full")
    assert done.returncode == 1
    assert done.stderr == "error: the output cannot be written: no space left on device\n"


def test_count_below_zero_is_wrong_usage(data_dir):
    done = shell(f"ingero explain --db {data_dir}/agent_dbs/sample-cluster.db --last -3")
    assert done.returncode == 2
    assert "--last" in done.stderr


def test_export_into_a_directory_that_is_not_there_names_the_file(data_dir, tmp_path):
    database = data_dir / "agent_dbs" / "sample-cluster.db"
    done = shell(f"ingero export --format perfetto --db {database} -o {tmp_path}/absent/x.json")
    assert done.returncode == 4
    assert "absent/x.json: No such file or directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_short_push_interval_needs_no_timeout_of_its_own():
    done = shell(
        "ingero fleet-push --stub --fleet-endpoint 127.0.0.1:9 --fleet-insecure --fleet-cluster-id c"
        " --fleet-push-interval 1s --fleet-node-id ''$'\\n'"
    )
    assert done.returncode == 2
    assert "--fleet-timeout" not in done.stderr


PROGRAMS = (
    "main",
    *(f"programs.{name}" for name in ("alerter", "echo", "fleet", "remediator", "sink")),
)
HEAVY = ("pydantic", "numpy", "httpx", "yaml", "msgspec", "rich", "asyncio", "ssl", "sqlite3")


def run_and_list(program, words):
    """Run a command line in a new process; returns the names of all modules that it imported."""
    code = (
        f"import sys; from ingero.cli.{program} import cli, run_program\n"
        f"status = run_program(cli, {words!r})\n"
        "assert status == 0, status\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout
    return done.stderr.split()


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_help_and_version_load_no_heavy_library(program, words):
    assert not set(HEAVY) & set(run_and_list(program, words))


@pytest.mark.parametrize(
    ("program", "words", "places", "loaded"),
    [
        ("main", ["version"], "ingero.cli.commands.", {"version"}),
        ("main", ["explain", "--help"], "ingero.cli.commands.", {"explain"}),
        ("programs.fleet", ["version"], "ingero.cli.commands.", {"help_page"}),
        ("programs.echo", ["backup", "--help"], "ingero.cli.programs.echo_", {"files"}),
    ],
)
def test_command_loads_no_other_command(program, words, places, loaded):
    found = {name.removeprefix(places) for name in run_and_list(program, words) if places in name}
    assert found == loaded


@pytest.mark.parametrize("verb", ["query", "explain"])
def test_recording_is_read_without_what_checks_configuration_and_speaks_to_servers(verb, data_dir):
    line = [verb, "--db", f"{data_dir}/agent_dbs/sample-cluster.db"]
    assert not {"pydantic", "yaml", "httpx", "ssl", "asyncio"} & set(run_and_list("main", line))


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("ingero.fleet.builtin", {"nats", "httpx"}),
        ("ingero.echo.service.app", {"jwt", "cryptography", "httpx", "clickhouse_connect"}),
        ("ingero.sim.cluster.run", {"pyarrow"}),
        (
            "ingero.cli.commands.trace.run",
            {"httpx", "ssl", "asyncio", "pyarrow", "ingero.recording.causal", "ingero.agent.push"},
        ),
    ],
)
def test_program_loads_nothing_of_what_it_is_not_asked_for(module, unneeded):
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert not unneeded & set(done.stdout.split())


def test_name_that_no_command_has_is_answered_with_the_nearest():
    done = shell("ingero explian")
    assert done.returncode == 2
    assert "explain" in done.stderr


@pytest.mark.parametrize("program", [main.cli, echo.cli])
def test_each_command_has_the_name_by_which_it_is_asked_for(program):
    assert program.commands
    assert {name: command.name for name, command in program.commands.items()} == {
        name: name for name in program.commands
    }


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        ("exec('raise KeyboardInterrupt')", 130, ""),
        ("raise ValueError('cleaning up')", 130, ""),
        (
            "raise IngeroError('the recording was not closed')",
            130,
            "error: the recording was not closed",
        ),
    ],
)
def test_interrupted_command_ends_with_130_whatever_the_interrupt_made_fail(
    tmp_path, raised, status, said
):
    (tmp_path / "interrupted.py").write_text(f"""
import sys
import click
from ingero.cli.main import run_program
from ingero.errors import IngeroError

@click.command()
def command():
    try:
        exec("raise KeyboardInterrupt")
    finally:
        {raised}

sys.exit(run_program(command))
""")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (status, said)


SCRIPTS = sorted(
    script.value
    for script in metadata.distribution("ingero").entry_points.select(group="console_scripts")
    if script.name != "ingero-health-check"  # it imports next to nothing
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_program_that_is_interrupted_while_it_is_imported_ends_with_130_and_says_nothing(script):
    module, _, function = script.partition(":")
    code = f"""
import importlib.abc, os, signal, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "click":
            exec("os.kill(os.getpid(), signal.SIGINT); signal.sigtimedwait([], 0)")

sys.meta_path.insert(0, Interrupts())
from {module} import {function}
{function}()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_failure_without_an_interrupt_keeps_its_status():
    code = (
        "import click; from ingero.cli.main import run_program;"
        "run_program(click.Command('x', callback=lambda: 1 / 0), [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "iso-8859-1", "utf-8"])
@pytest.mark.parametrize("line", ["demo incident", "replay {trace} --offline"])
def test_output_that_cannot_write_a_character_writes_its_number(line, encoding, trace):
    done = shell(f"ingero {line.format(trace=trace)}", {"PYTHONIOENCODING": encoding})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_a_path_of_other_bytes_is_written_under_utf_8(tmp_path):
    path = tmp_path / "a\udcff.yaml"
    path.write_text("fleet: {cluster_id: a}\n")
    done = shell(f"ingero config validate {tmp_path}/a*.yaml", {"PYTHONIOENCODING": "utf-8:strict"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"a\udcff.yaml: valid" in done.stdout
