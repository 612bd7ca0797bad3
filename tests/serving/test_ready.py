"""The line by which a supervisor learns that a program is ready."""

import json
import os
import socket
import subprocess
import sys

import pytest

REPORT = """
import os
from ingero.serving.ready import report_ready
report_ready("ingero-fleet", {"receivers.otlp http": "127.0.0.1:4318"})
report_ready("ingero-fleet", {})
print("INGERO_READY_FD" in os.environ)
"""


def report(number, fds=()):
    environ = {**os.environ, "INGERO_READY_FD": number}
    command = [sys.executable, "-c", REPORT]
    return subprocess.run(
        command, env=environ, pass_fds=fds, capture_output=True, text=True, check=False
    )


def test_each_report_is_one_json_line_and_children_do_not_inherit_the_number():
    reading, writing = os.pipe()
    done = report(str(writing), [writing])
    os.close(writing)
    with os.fdopen(reading) as stream:
        first, second = map(json.loads, stream)
    assert (first["program"], first["listens"]) == (
        "ingero-fleet", {"receivers.otlp http": "127.0.0.1:4318"},
    )  # fmt: skip
    assert first["pid"] == second["pid"]
    assert second["listens"] == {}
    assert done.stdout == "False\n"


@pytest.mark.parametrize("kind", ["a path", "an abstract name"])
def test_systemd_is_told_where_it_asks_for_that_and_children_are_not_asked(tmp_path, kind):
    path = str(tmp_path / "s") if kind == "a path" else f"@ingero-test-{os.getpid()}"
    program = REPORT.replace("INGERO_READY_FD", "NOTIFY_SOCKET")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path.replace("@", "\0"))
        systemd.settimeout(30)
        done = subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "NOTIFY_SOCKET": path},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert [systemd.recv(64) for _ in range(2)] == [b"READY=1"] * 2
    assert done.stdout == "False\n"


def test_systemd_that_has_gone_ends_no_program(tmp_path):
    environ = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "gone")}
    subprocess.run([sys.executable, "-c", REPORT], env=environ, check=True, capture_output=True)


def test_reader_that_has_gone_ends_no_program():
    reading, writing = os.pipe()
    os.close(reading)
    done = report(str(writing), [writing])
    os.close(writing)
    assert (done.returncode, done.stdout) == (0, "False\n")


@pytest.mark.parametrize("number", ["987", "two", "", "-1"])
def test_number_that_is_no_descriptor_is_a_configuration_error(number):
    done = report(number)
    assert f"ConfigError: INGERO_READY_FD={number} is not an open descriptor" in done.stderr
