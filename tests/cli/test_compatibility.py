"""Command lines of the existing agent's programs: taken with their meaning, or with a warning, never with an exit."""

import json
import socket
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import click
import pytest
import yaml

from ingero.cli import main
from ingero.cli.arguments import modernise
from ingero.cli.compatibility import OPTIONS
from ingero.cli.programs import alerter, echo, fleet, sink

PROGRAMS = {
    "ingero": main.cli,
    "ingero-fleet": fleet.cli,
    "ingero-echo": echo.cli,
    "ingero-sink": sink.cli,
    "ingero-alerter": alerter.cli,
}
COMMAND_LINES = yaml.safe_load((Path(__file__).parents[1] / "data/old_options.yaml").read_text())


def run(*args, **more):
    return subprocess.run(
        [sys.executable, "-m", "ingero", *map(str, args)],
        capture_output=True, text=True, timeout=120, check=False, **more,
    )  # fmt: skip


def turn(line, program="ingero"):
    return modernise(PROGRAMS[program], line.split())


def find(path):
    program, *names = path.split()
    found = PROGRAMS[program]
    for name in names:
        found = found.commands[name]
    return found


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(path, name, value) for path, names in COMMAND_LINES.items() for name, value in names.items()],
)
def test_option_of_the_existing_agent_is_taken(path, name, value):
    words = path.split()[1:]
    given = [name] if value is None else [name, str(value)]
    turned = modernise(PROGRAMS[path.split()[0]], [*words, *given])
    command = find(path)
    parser = command.make_parser(click.Context(command))
    _, left_over, _ = parser.parse_args(turned.now[len(words) :])  # raises for what is not known
    assert left_over == []


def test_every_old_option_belongs_to_a_command_that_there_is():
    for old in OPTIONS:
        assert isinstance(find(old.where), click.Command)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("trace --record=false --stack=true", "trace --no-record --stack"),
        ("trace --record=TRUE --stack=0", "trace --record --no-stack"),
        ("trace --no-io=false --json=1", "trace --json"),
        ("trace --no-record=false", "trace --record"),
        ("trace -db x.db -json", "trace --db x.db --json"),
        ("trace -p 1,2 -u me", "trace -p 1,2 -u me"),
        ("trace --cluster c --annotate-socket-gid=7", "trace --fleet-cluster-id c --annotate-gid 7"),
        ("trace --prometheus --nccl", "trace --prometheus"),
        ("trace --prometheus -- python -v --nccl -db=x", "trace --prometheus -- python -v --nccl -db=x"),
        ("fleet-push --fleet-node-rank -1", "fleet-push --fleet-node-rank -1"),
        ("annotate --label --debug=x", "annotate --label --debug=x"),
        ("-v", "--version"),
    ],
)  # fmt: skip
def test_old_spelling_becomes_ours(line, expected):
    assert turn(line).now == expected.split()


def test_one_dash_serves_the_other_programs():
    assert turn("-listen :1 -socket-path /x", "ingero-sink").now == [
        "--listen",
        ":1",
        "--socket-path",
        "/x",
    ]
    assert turn("-config f -verbose=true", "ingero-alerter").now == ["--config", "f", "--verbose"]
    assert turn("-config=f validate", "ingero-fleet").now == ["--config=f", "validate"]


def test_config_is_the_programs_own_where_it_has_one():
    assert turn("--config f", "ingero-alerter").now == ["--config", "f"]
    assert turn("serve --config f", "ingero-echo").now == ["serve", "--config", "f"]
    assert turn("check --config f").now == ["check"]


def test_options_of_one_reason_share_one_line():
    warnings = turn(
        "trace --inference-phase-classifier rule --inference-phase-mixed-memcpy 10m"
    ).warnings()
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "--inference-phase-classifier, --inference-phase-mixed-memcpy: no effect; "
    )


def test_switch_that_is_neither_true_nor_false_is_wrong_usage():
    done = run("check", "--json=maybe")
    assert (done.returncode, done.stderr) == (2, "Error: --json=maybe: write true or false\n")


def test_unknown_option_stays_an_error_with_a_suggestion():
    done = run("trace", "--recrod")
    assert done.returncode == 2
    assert "--recrod" in done.stderr
    assert "--record" in done.stderr


def test_secret_on_the_command_line_of_mcp_is_refused_as_before():
    done = run("mcp", "--mcp-bearer-token", "hush")
    assert done.returncode == 2
    assert "INGERO_MCP_BEARER_TOKEN" in done.stderr
    assert "hush" not in done.stderr


def test_help_command_shows_a_commands_help_and_the_old_options():
    assert run("help", "trace").stdout == run("trace", "--help").stdout
    listed = run("help", "compatibility").stdout
    assert "--inference-pause-on-severity" in listed
    assert "no effect: " in listed
    assert run("help", "nothing").returncode == 2


def test_warning_goes_to_standard_error_alone(data_dir):
    database = data_dir / "agent_dbs" / "sample-cluster.db"
    plain = run("query", "--db", database, "--json")
    old = run("query", "--db", database, "--json=true", "--debug", "--fleet-require-tls=false")
    assert (old.returncode, old.stdout) == (0, plain.stdout)
    assert [line for line in old.stderr.splitlines() if line.startswith("warning")] == [
        (
            "warning: --fleet-require-tls=false: no effect; nodes beyond loopback are asked over TLS only; "
            "--no-tls speaks plain HTTP to loopback"
        )
    ]


def test_log_file_gets_what_is_printed_on_standard_error(tmp_path):
    log = tmp_path / "mcp.log"
    done = run("mcp", "--log", log, "--db", tmp_path / "absent.db")
    assert done.returncode == 2
    assert "absent.db: no such file" in done.stderr
    assert log.read_text() == done.stderr


def test_log_file_that_cannot_be_opened_is_a_warning(data_dir):
    done = run("mcp", "--log", "/nowhere/x.log", "--db", "absent.db")
    assert done.stderr.startswith("warning: --log /nowhere/x.log: ")


def test_token_of_the_dashboard_is_its_bearer(data_dir):
    database = data_dir / "agent_dbs" / "sample-cluster.db"
    code = (
        "from ingero.cli.main import cli, run_program\n"
        "import ingero.cli.commands.dashboard as d\n"
        "from ingero.config.environment import read_bearer\n"
        "d.serve = lambda *_a, **_k: print(read_bearer())\n"
        f"run_program(cli, ['dashboard', '--token', 's3', '--db', {str(database)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "s3\n"


def test_processes_may_be_a_list(data_dir):
    database = data_dir / "agent_dbs" / "sample-cluster.db"
    listed = run("query", "--db", database, "-p", "1887,4599", "--json", "--limit", "0")
    repeated = run("query", "--db", database, "-p", "1887", "-p", "4599", "--json")
    assert listed.returncode == 0, listed.stderr
    assert listed.stdout == repeated.stdout
    assert listed.stdout.count('"pid"') > 200


@pytest.mark.parametrize("command", ["query", "explain"])
def test_what_was_set_aside_is_read_as_one_recording(data_dir, tmp_path, command):
    databases = data_dir / "agent_dbs"
    now = tmp_path / "run.db"
    now.write_bytes((databases / "sample-gpu-node-01.db").read_bytes())
    aside = tmp_path / "run.20261122T101500.000000001Z-0123abcd.db"
    aside.write_bytes((databases / "sample-gpu-node-02.db").read_bytes())
    ask = ["query", "SELECT count(*) AS n FROM events"] if command == "query" else ["explain"]
    alone = json.loads(run(*ask, "--db", now, "--json").stdout)
    both = json.loads(run(*ask, "--db", now, "--json", "--include-rolled").stdout)
    count = (
        (lambda told: told[0]["n"])
        if command == "query"
        else (lambda told: told["window"]["events"])
    )
    assert (count(alone), count(both)) == (200, 400)


CLOCK = {"TZ": "UTC-3"}  # three hours east of Greenwich, as POSIX writes it


def moments_of(database, *window):
    done = run("explain", "--db", database, "--json", *window, env={**CLOCK, "PATH": "/bin"})
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)["window"]


def test_time_of_day_is_that_of_the_recording_and_of_this_machines_zone(data_dir):
    database = data_dir / "agent_dbs" / "pytorch-dataloader-starvation.db"
    rows = run("query", "--db", database, "--limit", 1, "--json", "--op", "cudaStreamSync").stdout
    at = datetime.fromisoformat(yaml.safe_load(rows)[-1]["timestamp"])
    local = at.replace(hour=(at.hour + 3) % 24, second=0, microsecond=0)
    zulu = at.replace(second=0, microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ")
    by_clock = moments_of(database, "--from", local.strftime("%H:%M"))
    assert by_clock == moments_of(database, "--from", zulu)
    assert by_clock["events"] > 0


@pytest.mark.parametrize("bad", ["25:70", "yesterday", "2026-13-01", "10:00:99"])
def test_bad_time_is_told_with_every_form_that_is_taken(data_dir, bad):
    done = run("explain", "--db", data_dir / "agent_dbs" / "sample-cluster.db", "--from", bad)
    assert done.returncode == 2
    assert f"--from: {bad!r} is no time" in done.stderr
    for form in ("2026-04-03T12:18:35Z", "15:40", "12.5s"):
        assert form in done.stderr


def test_rates_without_an_address_say_what_to_do():
    done = run("rates", "update")
    assert done.returncode == 2
    assert "--url" in done.stderr
    assert "no price list of ours" in done.stderr


def test_help_of_mcp_names_every_tool():
    from ingero.recording.queries.catalog import QUERIES

    text = run("mcp", "--help").stdout
    assert [query.name for query in QUERIES if query.name not in text] == []


def test_sink_takes_one_dash_and_serves(tmp_path):
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        agent.listen()
        process = subprocess.Popen(
            [sys.executable, "-c", "from ingero.cli.programs.sink import main; main()",
             "-socket-path", path, "-listen", "127.0.0.1:0", "-readiness-window=1m"],
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            agent.settimeout(30)
            agent.accept()[0].close()
            assert "serving http://127.0.0.1:" in process.stderr.readline()
        finally:
            process.terminate()
            assert process.wait(120) == 0
            process.stderr.close()
