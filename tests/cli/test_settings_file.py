"""``ingero.yaml``: what a flag, a variable, the file and a default say to `trace` and `fleet-push`."""

import json
import os
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ingero.agent.health.signals.node_facts import GpuFacts
from ingero.cli.commands.config import write_template
from ingero.cli.commands.fleet_push import FleetPushConfig
from ingero.cli.commands.trace.config import TraceConfig
from ingero.cli.live import RemediateConfig
from ingero.cli.main import cli, run_program
from ingero.cli.options import take_config
from ingero.cli.push_settings import build_settings
from ingero.cli.settings_file import (
    OLD_KEYS,
    WHERE,
    ConfiguredCommand,
    find_settings,
    load_settings,
)
from ingero.config.agent_file import CONFIG_PATHS, SETTINGS_FILE, find_settings_file
from ingero.errors import ConfigError
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {"trace": TraceConfig, "fleet-push": FleetPushConfig}


def take(name, *args, environ=None):
    """The configuration that a command line of `trace` or `fleet-push` makes."""
    with CliRunner().isolation(env=environ or {}):
        root = cli.make_context("ingero", [name], resilient_parsing=True)
        with cli.commands[name].make_context(name, list(args), parent=root) as context:
            return take_config(CONFIGS[name], dict(context.params))


def write(folder, text):
    file = folder / "ingero.yaml"
    file.write_text(text)
    return str(file)


def refuse(folder, text):
    with pytest.raises(ConfigError) as raised:
        load_settings(Path(write(folder, text)), cli)
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("more", "url"),
    [
        ("endpoint: 'fleet:4318', insecure: true", "http://fleet:4318/v1/metrics"),
        ("endpoint: 'fleet:4318'", "https://fleet:4318/v1/metrics"),
        ("endpoint: 'http://fleet:4318'", "http://fleet:4318/v1/metrics"),
    ],
)
def test_trace_pushes_where_the_file_sends_fleet_push(tmp_path, capsys, more, url):
    file = write(tmp_path, f"fleet: {{cluster_id: prod, {more}}}\n")
    assert run_program(cli, ["config", "validate", file]) == 0
    assert not capsys.readouterr().err
    push = take("fleet-push", "--config", file, "--stub")
    settings = build_settings(push.push, push.remediate, GpuFacts(), push.spans)
    traced = take("trace", "--config", file).build_push()
    for transport in (settings.transport, traced.transport):
        assert transport.endpoint.signal_url(Signal.METRICS) == url


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option_is_a_key_of_the_file_and_a_variable(name):
    command = cli.commands[name]
    assert isinstance(command, ConfiguredCommand)
    settings = find_settings(cli)
    for option in command.params:
        if option.name in {"settings_file", "program"}:
            continue
        uses = [one for one in settings.values() if (command, option) in one.uses]
        assert uses, f"{option.opts[0]} of {name} is no key"
        assert option.envvar
        assert set(option.envvar) <= {name for one in uses for name in one.variables}


def test_no_two_keys_share_a_variable_and_none_is_one_that_kubernetes_sets_for_a_service():
    names = [name for one in find_settings(cli).values() for name in one.variables]
    owners = [
        (name, option.name)
        for one in find_settings(cli).values()
        for _, option in one.uses
        for name in option.envvar
    ]
    assert len({name for name, _ in owners}) == len(set(owners)) - 1  # node and fleet_node_id
    assert not [name for name in names if re.search(r"_(SERVICE_HOST|SERVICE_PORT|PORT)", name)]


@pytest.mark.parametrize(
    ("args", "environ", "description"),
    [
        ((), {}, 7),
        ((), {"INGERO_FLEET_PUSH_INTERVAL": "8s"}, 8),
        (("--fleet-push-interval", "9s"), {"INGERO_FLEET_PUSH_INTERVAL": "8s"}, 9),
    ],
)
def test_a_flag_wins_over_the_variable_and_that_over_the_file(tmp_path, args, environ, description):
    file = write(tmp_path, "fleet: {endpoint: 'https://f:4318', cluster_id: c, push_interval: 7s}")
    for name in CONFIGS:
        config = take(name, "--config", file, *args, environ=environ)
        push = config.fleet if name == "trace" else config.push
        assert push.fleet_push_interval == description * NS_PER_S
        assert (push.fleet_endpoint, push.fleet_cluster_id) == ("https://f:4318", "c")


def test_values_of_each_kind_are_those_of_the_command_line(tmp_path):
    file = write(
        tmp_path,
        """
        agent: {node: n1}
        trace:
          pid: [1, 2]
          record: false
          stack: false
          no_io: true
          max_db: 20m
          db: a.db
          prometheus: true
          otlp_header: [a=b]
          sampling_rate: 3
        annotate: {enabled: true, gid: -1}
        remediate:
        """,
    )
    assert take("trace", "--config", file) == take(
        *("trace", "--node", "n1", "--pid", "1,2", "--no-record", "--no-stack", "--no-io", "--db", "a.db"),
        *("--max-db", "20m", "--prometheus", "--otlp-header", "a=b", "--sampling-rate", "3", "--annotate"),
        *("--annotate-gid", "-1"),
    )  # fmt: skip


def test_a_name_of_digits_is_the_one_that_is_written(tmp_path):
    file = write(
        tmp_path,
        """
        agent: {node: 0042}
        fleet: {endpoint: "https://f:4318", cluster_id: 2025.10, node_id: '0x1f', world_size: 0x10}
        trace: {db: 1.50, max_db: 2097152, user: 1e3, duration: 0}
        """,
    )
    traced = take("trace", "--config", file)
    assert (traced.node, traced.fleet.fleet_cluster_id, traced.user) == ("0042", "2025.10", "1e3")
    assert (traced.fleet.fleet_node_id, traced.fleet.fleet_world_size) == ("0x1f", 16)
    assert (str(traced.db), traced.max_db, traced.duration) == ("1.50", 2 << 20, 0)


FLEET = {"INGERO_FLEET_ENDPOINT": "https://f:4318", "INGERO_FLEET_CLUSTER_ID": "c"}
VARIABLES = {"fleet-push": "INGERO_FLEET_HEADER", "trace": "INGERO_TRACE_OTLP_HEADER"}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_holds_headers_with_spaces_one_a_line(name):
    environ = FLEET | {VARIABLES[name]: "Authorization=Bearer T0 KEN\nX-Team=a b\r\n\n"}
    config = take(name, environ=environ)
    headers = ["Authorization=Bearer T0 KEN", "X-Team=a b"]
    if name == "fleet-push":
        assert list(config.push.fleet_header) == headers
    else:
        assert config.metrics.otlp_headers == dict(one.split("=") for one in headers)


@pytest.mark.parametrize("text", ["Bearer s3cret", "Bearer s3cret==", "s3cret\nX=ä"])
def test_a_header_that_is_none_is_not_quoted_in_the_message(text):
    environ = FLEET | {VARIABLES["fleet-push"]: text}
    with pytest.raises(ConfigError) as refused:
        build_settings(take("fleet-push", environ=environ).push, RemediateConfig(), GpuFacts())
    told = str(refused.value)
    assert "--fleet-header: header 1: write NAME=VALUE" in told
    assert "s3cret" not in told
    with pytest.raises(click.BadParameter) as wrong:
        take("trace", environ={VARIABLES["trace"]: "s3cret"})
    assert "header 1 is not NAME=VALUE" in wrong.value.format_message()
    assert "s3cret" not in wrong.value.format_message()


def test_the_template_changes_nothing_and_all_of_it_is_valid(tmp_path):
    text = "\n".join(write_template(cli))
    file = write(tmp_path, text)
    assert take("trace", "--config", file) == take("trace")
    on = write(tmp_path, re.sub(r"^  # ([a-z_]+:)", r"  \1", text, flags=re.MULTILINE))
    assert len(load_settings(Path(on), cli).values) > 40
    assert {line.split(":")[0].strip(" #") for line in text.splitlines() if ":" in line} >= {
        key.split(".")[1] for key in find_settings(cli)
    }


def test_unknown_keys_and_wrong_values_are_refused_with_their_lines(tmp_path):
    text = """fleet:
  endpont: x
  push_interval: 5
  insecure: yes
  header: {a: b}
fleeet: {}
trace: [1]
agent: {probe_mode: fast}
health: {}
otlp: {protocoll: grpc}
"""
    assert refuse(tmp_path, text) == [
        "line 2: fleet.endpont: unknown key (did you mean endpoint?)",
        "line 3: fleet.push_interval: '5' is not a duration; write 500ms, 5s, 1m30s, 2h or 7d",
        "line 4: fleet.insecure: should be true or false, not 'yes'",
        "line 5: fleet.header: should be one text or number, not several",
        "line 6: fleeet: unknown key (did you mean fleet?)",
        "line 7: trace: should be a section of keys",
        "line 8: agent.probe_mode: 'fast' is not one of 'session', 'pair', 'event', 'auto'.",
        "line 10: otlp.protocoll: unknown key (known here: enabled, endpoint, insecure)",
    ]


def test_keys_of_the_existing_agent_are_taken_with_a_warning(tmp_path):
    lines = "agent: {log_level: info, max_overhead_percent: 2}\nalerter: {pagerduty: {routing_key: k}}\n"
    file = write(
        tmp_path, lines + "fleet: {nodes: [a]}\nstore: {path: x}\notlp: {protocol: grpc}\n"
    )
    done = CliRunner().invoke(cli, ["config", "validate", "--json", file])
    assert set(json.loads(done.stdout)["ignored"]) == {
        *("agent.log_level", "agent.max_overhead_percent", "alerter.pagerduty", "fleet.nodes"),
        *("otlp.protocol", "store"),
    }
    warned = CliRunner().invoke(cli, ["config", "validate", file]).stderr
    assert f"warning: {file}: store: no effect; {OLD_KEYS['store']}" in warned


def test_what_a_command_has_no_option_for_is_said(tmp_path, capsys):
    file = write(
        tmp_path, "fleet: {endpoint: 'https://f', protocol: grpc}\notlp: {enabled: true}\n"
    )
    assert run_program(cli, ["trace", "--config", file, "--max-db", "bad"]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert said == [
        f"warning: {file}: otlp.enabled: no effect on `ingero trace`, which has no such option"
    ]


def test_validate_finds_what_does_not_fit_together(tmp_path, capsys):
    text = "fleet:\n  endpoint: https://f:4318\n  timeout: 30s\n  tls_ca: /nowhere/ca\n"
    file = write(tmp_path, text)
    assert run_program(cli, ["config", "validate", file]) == 2
    said = capsys.readouterr().err
    assert "line 3: fleet.timeout: must not be longer than fleet.push_interval" in said
    assert "line 4: fleet.tls_ca" in said
    file = write(tmp_path, text.replace("30s", "1s"))
    assert run_program(cli, ["config", "validate", "--skip-files", file]) == 0
    assert "valid, 3 settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "descriptions"),
    [
        (
            "insecure: true\ntls_ca: /etc/hosts",
            ["line 3: fleet.insecure: contradicts fleet.tls_ca"],
        ),
        ("tls_cert: /etc/hosts", ["fleet.tls_key: is missing: it goes with fleet.tls_cert"]),
        (
            "world_size: 2\nnode_rank: 2",
            ["line 4: fleet.node_rank: must be below fleet.world_size"],
        ),
        (
            "classifier_hysteresis: 0.5\nclassifier_confirm: 0",
            [
                "line 3: fleet.classifier_hysteresis: must be at least 0 and below 0.5",
                "line 4: fleet.classifier_confirm: must be at least 1",
            ],
        ),
        (
            "threshold_url: ftp://f/t",
            ["line 3: fleet.threshold_url: 'ftp://f/t': the scheme is 'ftp', not http or https"],
        ),
    ],
)
def test_validate_speaks_of_keys_and_not_of_options(tmp_path, capsys, more, descriptions):
    lines = ["fleet:", "endpoint: f:4318", *more.splitlines()]
    file = write(tmp_path, "\n  ".join(lines))
    assert run_program(cli, ["config", "validate", file]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"{'error: ' if not at else ''}{file}: {one}" for at, one in enumerate(descriptions)
    ]


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("fleet: {endpoint: f:4318, node_id: ' '}\n", "line 1: fleet.node_id: must not be blank"),
        (
            "fleet: {endpoint: f:4318}\nagent: {node: ' '}\n",
            "line 2: agent.node: must not be blank",
        ),
        (
            "fleet: {endpoint: f:4318}\notlp: {enabled: true}\n",
            "otlp.endpoint: is required with otlp.enabled",
        ),
    ],
)
def test_validate_names_the_key_that_is_given_or_missing(tmp_path, capsys, text, description):
    file = write(tmp_path, text)
    assert run_program(cli, ["config", "validate", file]) == 2
    assert capsys.readouterr().err == f"error: {file}: {description}\n"


@pytest.mark.parametrize(
    ("text", "description"),
    [
        (
            "trace:\n  max_db: 1g\n  db_rollover_size: 2g\n",
            "line 3: trace.db_rollover_size: excludes trace.max_db",
        ),
        (
            "trace:\n  pid: 7\n  cgroup: /pods\n  user: ada\n",
            "line 4: trace.user: excludes trace.pid",
        ),
        (
            "trace:\n  user: ada\n  cgroup: /pods\n",
            "line 3: trace.cgroup: excludes trace.user",
        ),
    ],
)
def test_validate_refuses_what_trace_would(tmp_path, capsys, text, description):
    file = write(tmp_path, text)
    assert run_program(cli, ["config", "validate", file]) == 2
    assert description in capsys.readouterr().err


@pytest.mark.parametrize("size", ["0", "''", "2g"])
def test_validate_takes_a_size_that_excludes_nothing(tmp_path, size):
    text = (
        "trace: {max_db: 1g, db_rollover_size: SIZE}\n"
        if size != "2g"
        else "trace: {db_rollover_size: SIZE}\n"
    )
    file = write(tmp_path, text.replace("SIZE", size))
    assert run_program(cli, ["config", "validate", file]) == 0


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ("fleet: {endpoint: ' , ', cluster_id: c}", "line 1: fleet.endpoint: is required"),
        (
            "fleet: {endpoint: 'https://f', cluster_id: c, world_size: 2147483648}",
            "line 1: fleet.world_size: must be at most 2147483647",
        ),
        ("fleet: {push_interval: 2562048h}", "line 1: fleet.push_interval: '2562048h' is too long"),
        ("fleet: {peers_wait: 2562048h}", "line 1: fleet.peers_wait: '2562048h' is too long"),
        ("remediate: {gid: 4294967295}", "line 1: remediate.gid: 4294967295 is not in the range"),
        ("annotate: {gid: -2}", "line 1: annotate.gid: -2 is not in the range"),
    ],
)
def test_validate_refuses_numbers_that_nothing_can_take(tmp_path, capsys, text, description):
    assert run_program(cli, ["config", "validate", write(tmp_path, text)]) == 2
    assert description in capsys.readouterr().err


def test_the_shipped_example_is_valid_and_is_what_it_says(tmp_path, capsys):
    file = ROOT / "deploy/ingero.yaml"
    assert run_program(cli, ["config", "validate", str(file)]) == 0
    assert "valid" in capsys.readouterr().out
    config = take("fleet-push", "--config", str(file), environ={"NODE_NAME": "gpu-7"})
    assert config.push.fleet_node_id == "gpu-7"
    assert config.remediate.remediate is True


def test_the_stronger_of_two_that_exclude_each_other_holds(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(
        "ingero.cli.commands.trace.run.run_trace", lambda one: taken.append(one) or 0
    )
    rolls = write(tmp_path, "trace: {db_rollover_size: 1g}")
    assert run_program(cli, ["trace", "--config", rolls, "--max-db", "2g"]) == 0
    assert run_program(cli, ["trace", "--config", rolls]) == 0
    assert [(one.max_db, one.rollover_bytes) for one in taken] == [(2 << 30, 0), (0, 1 << 30)]
    both = write(tmp_path, "trace: {db_rollover_size: 1g, max_db: 2g}")
    assert run_program(cli, ["trace", "--config", both]) == 2


def test_the_file_is_found_where_help_says(tmp_path, monkeypatch):
    assert f"${SETTINGS_FILE}, or the first of {', '.join(CONFIG_PATHS)}" == WHERE
    places = ("./ingero.yaml", str(tmp_path / "etc.yaml"))
    monkeypatch.chdir(tmp_path)
    assert find_settings_file({}, places) is None
    (tmp_path / "etc.yaml").touch()
    assert find_settings_file({}, places) == tmp_path / "etc.yaml"
    mine = tmp_path / "ingero.yaml"
    mine.touch()
    assert find_settings_file({}, places) == Path("ingero.yaml")
    assert find_settings_file({SETTINGS_FILE: "/no.yaml"}, places) == Path("/no.yaml")
    if os.geteuid() == 0:
        os.chown(mine, 4711, 4711)
        assert find_settings_file({}, places) == tmp_path / "etc.yaml"
        assert find_settings_file({"SUDO_UID": "4711", "SUDO_GID": "1"}, places) == Path(
            "ingero.yaml"
        )


def test_a_place_that_may_not_be_looked_into_has_no_file(tmp_path):
    place = str(
        tmp_path / ("x" * 300) / "ingero.yaml"
    )  # as an error of the system, to root as well
    assert find_settings_file({}, (place,)) is None


def test_the_old_place_of_the_option_names_the_file_too(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(SETTINGS_FILE, "")
    file = write(tmp_path, "trace: {}")
    assert run_program(cli, ["--config", file, "config"]) == 0
    assert capsys.readouterr().out == f"reads {file}\n"


def test_option_of_the_group_before_a_subcommand_is_refused(tmp_path, capsys):
    file = tmp_path / "ingero.yaml"
    file.write_text("")
    assert run_program(cli, ["config", "--defaults", "validate", str(file)]) == 2
    assert "validate takes no --defaults" in capsys.readouterr().err
