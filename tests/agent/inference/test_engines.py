"""Serving engines, found among the processes of a node."""

import pytest
from tests.agent.inference.engine_pages import write_process

from ingero.agent.inference.engines import SGLANG, TGI, TRITON, VLLM, find_engine, find_option
from ingero.agent.inference.scrape import find_engines


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("python3 -m vllm.entrypoints.openai.api_server --model x", VLLM),
        ("/usr/bin/python3 /opt/bin/vllm serve meta/x --port 9000", VLLM),
        ("python -m sglang.launch_server --model-path x", SGLANG),
        ("text-generation-launcher --model-id x", TGI),
        ("/opt/tritonserver/bin/tritonserver --model-repository=/m", TRITON),
        ("vim vllm.py", None),
        ("python train.py --comment vllm", None),
        ("", None),
    ],
)
def test_engines_are_recognised_by_their_command_lines(line, engine):
    assert find_engine(line.split()) is engine


def test_options_are_read_in_both_forms():
    assert find_option(["vllm", "--port", "9000"], ("--port",)) == "9000"
    assert find_option(["vllm", "--port=9001"], ("--port",)) == "9001"
    assert find_option(["vllm", "--port"], ("--port",)) == ""


def test_each_port_is_one_engine_and_a_wrong_port_is_the_usual_one(tmp_path):
    write_process(tmp_path, 5, "vllm serve a --port 9000")
    write_process(tmp_path, 6, "vllm serve a --port 9000")  # a fork of it
    write_process(tmp_path, 7, "tritonserver --metrics-port=99999")
    write_process(tmp_path, 8, "bash")
    found = [(one.engine, one.pid, one.port) for one in find_engines([8, 7, 6, 5, 4], tmp_path)]
    assert found == [(VLLM, 5, 9000), (TRITON, 7, 8002)]


@pytest.mark.parametrize(
    ("line", "environ", "port"),
    [
        ("text-generation-launcher", None, 3000),  # ended, or not ours to read
        ("text-generation-launcher", b"", 3000),
        ("text-generation-launcher", b"A=1\0PORT=80\0", 80),
        ("text-generation-launcher --port 8080", b"PORT=80\0", 8080),
        ("text-generation-launcher", b"PORT=tcp://10.0.0.1:80\0", 3000),
        ("text-generation-launcher", b"PORT=99999\0", 3000),
        ("vllm serve a", b"PORT=80\0", 8000),  # no variable of its own
        (f"vllm serve a --port {'9' * 5000}", None, 8000),
    ],
)
def test_a_port_is_that_of_an_option_else_of_the_environment_of_tgi_else_the_default(
    tmp_path, line, environ, port
):
    write_process(tmp_path, 5, line)
    if environ is not None:
        (tmp_path / "5" / "environ").write_bytes(environ)
    assert [one.port for one in find_engines([5], tmp_path)] == [port]


def test_the_server_that_tgi_starts_is_no_engine_of_its_own(tmp_path):
    write_process(tmp_path, 5, "text-generation-launcher")
    write_process(tmp_path, 6, "text-generation-router --port 3000 --master-shard-uds-path /s-0")
    assert [(one.pid, one.port) for one in find_engines([5, 6], tmp_path)] == [(5, 3000)]


def test_of_processes_with_one_port_the_first_that_started_is_the_engine(tmp_path):
    """A fork may have the lower number once numbers have begun anew."""
    (tmp_path / "stat").write_text("btime 1700000000\n")
    write_process(tmp_path, 5, "vllm serve a", start_ticks=2000)
    write_process(tmp_path, 9, "vllm serve a", start_ticks=1000)
    assert [one.pid for one in find_engines([5, 9], tmp_path)] == [9]
