"""``ingero-fleet`` as a user types it."""

import json

import pytest

from ingero.cli.main import run_program
from ingero.cli.programs.fleet import cli

GOOD = """
receivers: {otlp: {protocols: {http: }}}
exporters: {debug: , file: {path: /tmp/x}}
service: {pipelines: {metrics: {receivers: [otlp], exporters: [debug]}}}
"""


@pytest.fixture
def good(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(GOOD)
    return str(file)


def _run(capsys, *args):
    code = run_program(cli, list(args))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("form", [(), ("--config",)])
def test_validate_says_valid_and_warns_about_what_is_not_used(capsys, good, form):
    code, out, err = _run(capsys, "validate", *form, good)
    assert (code, out) == (0, f"{good}: valid, 1 pipeline\n")
    assert "exporters.file: is defined and not used" in err


def test_validate_lists_every_problem_and_ends_with_2(capsys, tmp_path):
    file = tmp_path / "bad.yaml"
    file.write_text(GOOD.replace("debug: ", "debug: {verbosity: loud}").replace("otlp]", "otpl]"))
    code, out, err = _run(capsys, "validate", str(file))
    assert (code, out) == (2, "")
    assert "line 3: exporters.debug.verbosity" in err
    assert "did you mean otlp?" in err


FILES = """
receivers:
  otlp: {protocols: {http: {tls: {cert_file: nope.pem, key_file: nope.key}}}}
processors: {provider_lookup: {mapping_file: MAPPING}}
exporters: {file: {path: /nowhere/x}, otlp: {endpoint: "x:1", tls: {ca_file: nope-ca.pem}}}
service: {pipelines: {metrics: {receivers: [otlp], processors: [provider_lookup], exporters: [file, otlp]}}}
"""


def test_validate_finds_the_files_that_would_keep_it_from_starting(capsys, tmp_path):
    mapping = tmp_path / "mapping.yaml"
    mapping.write_text("rules: [{provider: aws, node: x}]")
    file = tmp_path / "fleet.yaml"
    file.write_text(FILES.replace("MAPPING", str(mapping)))
    code, out, err = _run(capsys, "validate", str(file))
    assert (code, out) == (2, "")
    assert "line 3: receivers.otlp.protocols.http.tls: nope.pem: No such file" in err
    assert "line 4: processors.provider_lookup: " in err
    assert "rules.0.node" in err
    assert "line 5: exporters.file: /nowhere: no such folder" in err
    assert "line 5: exporters.otlp.tls: nope-ca.pem: No such file" in err
    assert _run(capsys, "validate", "--skip-files", str(file))[0] == 0


def test_set_overrides_the_file(capsys, good):
    args = ["validate", good, "--set", "service.pipelines.metrics.exporters=[file, debug]"]
    code, _, err = _run(capsys, *args)
    assert (code, err) == (0, "")
    code, _, err = _run(capsys, "validate", good, "--set", "exporters.debug.verbosity=loud")
    assert code == 2
    assert "exporters.debug.verbosity" in err


@pytest.mark.parametrize("early", [("--set", "nosuch.key=1"), ("--config", "nosuch.yaml")])
def test_what_belongs_after_the_command_is_refused_before_it(capsys, good, early):
    code, out, err = _run(capsys, *early, "validate", good)
    assert (code, out) == (2, "")
    assert f"{early[0]} belongs after the command: validate {early[0]} …" in err
    code, out, err = _run(capsys, *early, "components")
    assert (code, out) == (2, "")
    assert f"components takes no {early[0]}" in err


def test_two_files_to_validate_are_refused(capsys, good):
    code, out, err = _run(capsys, "validate", good, "--config", "nosuch.yaml")
    assert (code, out) == (2, "")
    assert "give one of them" in err


def test_printed_defaults_can_be_validated(capsys, tmp_path):
    code, out, _ = _run(capsys, "config", "--defaults")
    assert code == 0
    file = tmp_path / "defaults.yaml"
    file.write_text(out)
    code, _, err = _run(capsys, "validate", str(file))
    assert (code, err) == (0, "")


def test_components_are_listed_for_people_and_programs(capsys):
    code, out, _ = _run(capsys, "components", "--json")
    found = json.loads(out)
    assert code == 0
    assert {one["name"] for one in found["exporters"]} >= {
        "prometheus",
        "otlp",
        "otlphttp",
        "file",
        "debug",
    }
    (batch,) = [one for one in found["processors"] if one["name"] == "batch"]
    assert batch["signals"] == ["logs", "metrics", "traces"]
    _, text, _ = _run(capsys, "components")
    assert "  memory_limiter" in text


def test_no_file_at_all_is_wrong_usage_with_the_next_step(capsys):
    code, _, err = _run(capsys)
    assert code == 2
    assert "config --defaults" in err


def test_unreadable_file_says_why(capsys, tmp_path):
    code, _, err = _run(capsys, "--config", str(tmp_path / "nowhere.yaml"))
    assert code == 2
    assert "No such file" in err


@pytest.mark.parametrize("command", [[], ["validate"], ["components"], ["config"], ["version"]])
def test_every_command_has_help_with_an_example_per_line(capsys, command):
    code, out, _ = _run(capsys, *command, "--help")
    assert code == 0
    after = out.partition("  Examples:\n")[2]
    assert after.startswith("    ingero-fleet ")
