"""What others may rely on of the existing agent: tools, paths, messages and exit status are here, with its names."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner
from tests.recording.scenarios.faults import FAULTS

from ingero.cli.main import cli
from ingero.recording.queries.api import ANSWERS
from ingero.recording.queries.catalog import PROMPTS, QUERIES
from ingero.recording.store.writer import RecordingWriter
from ingero.wire import uds
from ingero.wire.names import UdsType

SURFACE = yaml.safe_load((Path(__file__).parents[1] / "data/existing_surface.yaml").read_text())
TOOLS = {query.name: query for query in QUERIES}


@pytest.mark.parametrize(("name", "arguments"), SURFACE["tools"].items())
def test_a_tool_takes_each_argument_of_the_existing_one(name, arguments):
    taken = msgspec.convert(arguments, TOOLS[name].args)
    assert {key: getattr(taken, key) for key in arguments} == arguments


def test_prompts_are_there():
    assert {prompt.name for prompt in PROMPTS} >= set(SURFACE["prompts"])


def test_paths_of_the_dashboard_are_there():
    assert set(ANSWERS) | {"time"} >= set(SURFACE["paths"])


@pytest.fixture(scope="module")
def leaking(tmp_path_factory):
    path = tmp_path_factory.mktemp("leak") / "r.db"
    FAULTS["memory_leak"]().write(path)
    return path


def print_json(line, path):
    words = [str(path) if word == "DB" else word for word in line.split()]
    return json.loads(CliRunner().invoke(cli, words, catch_exceptions=False).stdout)


@pytest.mark.parametrize(("line", "keys"), SURFACE["json"].items())
def test_a_list_that_a_command_prints_has_the_keys_of_the_existing_one(line, keys, leaking):
    printed = print_json(line, leaking)
    assert printed
    assert [one for one in printed if not set(keys) <= set(one)] == []


@pytest.mark.parametrize("line", SURFACE["missing_json"])
def test_a_list_that_is_said_to_be_missing_is_none(line, leaking):
    assert isinstance(print_json(line, leaking), dict)


@pytest.mark.parametrize(("kind", "names"), SURFACE["messages"].items())
def test_a_message_has_every_field_that_its_readers_require(kind, names):
    (message,) = (
        one
        for one in vars(uds).values()
        if isinstance(one, type)
        and issubclass(one, uds.UdsMessage)
        and one.__struct_config__.tag == UdsType(kind).value
    )
    required = {field.encode_name for field in msgspec.structs.fields(message) if field.required}
    assert required == set(names)


@pytest.mark.parametrize(("line", "status"), SURFACE["exit_status"].items())
def test_a_command_line_ends_with_the_status_that_scripts_expect(line, status, tmp_path):
    path = tmp_path / "empty.db"
    if "DB" in line:
        RecordingWriter(path, "n1").close()
    words = [str(path) if word == "DB" else word for word in line.split()]
    done = subprocess.run(
        [sys.executable, "-m", "ingero", *words], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert (done.returncode == status) if status == 0 else (done.returncode != 0), done.stderr
