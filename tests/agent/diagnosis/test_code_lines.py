"""Lines of real Python processes, seen from outside."""

import subprocess
import sys
import threading

import pytest
from tests.support.interpreters import find_interpreters

from ingero.agent.diagnosis.code_lines import sample_lines

PYTHONS = find_interpreters()
PROGRAM = """import json, threading, time

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

def main():
    print("ready", flush=True)
    while True:
        burn(0.03)
        time.sleep(0.03)
        json.dumps(list(range(120000)))

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
main()
"""


@pytest.fixture
def start(tmp_path):
    """Start a program from a file, as training programs are."""
    processes = []
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)

    def run(program, *arguments):
        command = [program, *(arguments or (file,))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


def sample(pid, seconds=2.0):
    stop = threading.Event()
    timer = threading.Timer(seconds, stop.set)
    timer.start()
    try:
        return sample_lines(pid, stop)
    finally:
        timer.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("python", PYTHONS, ids=[str(python.program) for python in PYTHONS])
def test_lines_at_which_the_first_thread_runs_and_at_which_it_sleeps(start, python):
    lines = sample(start(python.program).pid)
    assert lines.reason == ""
    assert lines.n_looks > 20
    assert lines.n_looks == sum(lines.running.values()) + sum(lines.waiting.values())
    burning = {line: n for line, n in lines.running.items() if line.endswith(" burn")}
    assert sum(burning.values()) > 0.3 * sum(lines.running.values())
    assert set(burning) <= {"train.py:5 burn", "train.py:6 burn"}
    assert lines.waiting["train.py:12 main"] > 0.5 * sum(lines.waiting.values()) > 0
    assert any(line.startswith("train.py:13 main → ") for line in lines.running)


def test_a_program_without_python_is_told(start):
    process = start("/bin/sh", "-c", "echo ready; exec sleep 60")
    assert sample(process.pid, 0.1).reason == "it runs no Python"


def test_a_process_that_is_gone_is_told():
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1, check=True
    )
    lines = sample(int(process.stdout), 0.1)
    assert lines.reason == "its memory cannot be read: No such file or directory"
    assert lines.n_looks == 0
