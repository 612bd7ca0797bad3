"""The program that a trace runs: how it starts, and how it ends."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ingero.agent.capture import program as program_module
from ingero.agent.capture.program import HeldProgram, ProgramSettings
from ingero.errors import IngeroError
from ingero.testing.waiting import wait_until

IGNORER = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(600)
"""


def hold(*arguments):
    held = HeldProgram(
        ProgramSettings(arguments, {"PATH": os.environ["PATH"]}, os.geteuid(), os.getegid())
    )
    held.release()
    return held


def wait_for(held):
    return wait_until(lambda: held.poll() is not None) and held.exit_code


@pytest.mark.parametrize("status", [0, 3, 126, 127])
def test_a_program_that_ran_has_the_status_with_which_it_ended(status):
    held = hold("sh", "-c", f"exit {status}")
    wait_until(lambda: held.poll() is not None)
    assert held.exit_code == status
    held.end()


def test_a_program_that_cannot_be_run_is_refused_with_the_reason(tmp_path):
    plain, broken = tmp_path / "plain", tmp_path / "broken"
    plain.write_text("no program")
    broken.write_text("no program")
    broken.chmod(0o755)
    for name, reason in (
        (tmp_path / "none", "no such program"),
        (plain, "not executable"),
        (broken, "Exec format error"),
    ):
        held = hold(str(name))
        with pytest.raises(IngeroError, match=f"cannot run '{name}': {reason}"):
            wait_until(lambda held=held: held.poll() is not None)
        held.end()


def test_the_file_of_a_program_is_that_which_exec_will_find(tmp_path, monkeypatch):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, mode in ((first, 0o644), (second, 0o755)):
        folder.mkdir()
        (folder / "run").write_text("#!/bin/sh\n")
        (folder / "run").chmod(mode)
    monkeypatch.setenv("PATH", str(tmp_path))
    environment = {"PATH": f"{first}:{second}"}
    for name, found in (
        ("run", (second / "run",)), (f"{second}/run", (second / "run",)), ("none", ()), (f"{first}/run", ()),
    ):  # fmt: skip
        held = HeldProgram(ProgramSettings((name,), environment, os.geteuid(), os.getegid()))
        assert held.paths == found
        held.end()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["nice", "-n", "5", "train", "--steps", "7"], ["nice", "train"]),
        (["env", "A=1", "nice", "train"], ["env", "nice", "train"]),
        (["sh", "-c", "A=1 nice train 'the data'; exit 3"], ["sh", "nice", "train"]),
        (["sh", "-c", "nice train>log&&env"], ["sh", "nice", "train", "env"]),
        (["sh", "-c", "nice 'train"], ["sh"]),
        (["train", "train", "."], ["train"]),
        (["sh", "-c", " \n"], ["sh"]),
        (["nice", *["-x"] * 1000, "train"], ["nice"]),
    ],
)
def test_programs_behind_another_are_found_among_its_arguments(tmp_path, arguments, names):
    for name in ("nice", "env", "sh", "train"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path)}
    held = HeldProgram(ProgramSettings(arguments, environment, os.geteuid(), os.getegid()))
    assert held.paths == tuple(tmp_path / name for name in names)
    held.end()


def test_a_program_that_is_killed_before_its_time_has_ended():
    held = HeldProgram(ProgramSettings(("true",), {}, os.geteuid(), os.getegid()))
    os.kill(held.pid, signal.SIGKILL)
    os.waitid(os.P_PID, held.pid, os.WEXITED | os.WNOWAIT)
    held.release()
    assert held.poll() == 137
    held.end()
    assert (held.was_killed, held.exit_code) == (False, 137)


def test_a_program_that_ignores_sigterm_is_killed_after_a_while(tmp_path, monkeypatch):
    monkeypatch.setattr(program_module, "_PATIENCE_MS", 100)
    ready = tmp_path / "ready"
    held = hold(sys.executable, "-c", IGNORER, str(ready))
    wait_until(ready.exists)
    held.end()
    assert (held.was_killed, held.exit_code) == (True, 137)


def test_a_stopped_program_ends_by_sigterm():
    held = hold("sleep", "600")
    wait_until(lambda: Path(f"/proc/{held.pid}/comm").read_text() == "sleep\n")
    os.kill(held.pid, signal.SIGSTOP)
    began = time.monotonic()
    held.end()
    assert (held.was_killed, held.exit_code) == (False, 143)
    assert time.monotonic() - began < 9  # it was not waited for in vain


@pytest.mark.parametrize("name", ["PIPE", "XFSZ"])
def test_a_signal_that_python_ignores_ends_a_program_as_it_does_without_a_trace(name):
    number = signal.Signals[f"SIG{name}"]
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])  # ClickHouse's engine blocks one
    try:
        held = hold("sh", "-c", f"ulimit -c 0; kill -{name} $$; exit 3")
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    wait_until(lambda: held.poll() is not None)
    assert held.exit_code == 128 + number
    held.end()
