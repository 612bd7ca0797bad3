"""Commands that run until a signal end in order, and say by which."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ingero.cli.signals import catch_stop, unwind_on_end
from ingero.testing.waiting import wait_until


@pytest.mark.parametrize(
    ("sent", "first", "status"),
    [
        ([], 0, 0),
        ([signal.SIGTERM], signal.SIGTERM, 0),
        ([signal.SIGINT], signal.SIGINT, 130),
        ([signal.SIGTERM, signal.SIGINT], signal.SIGTERM, 130),
    ],
)
def test_signals_are_noted_and_the_handlers_are_put_back(sent, first, status):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with catch_stop() as stop:
        for number in sent:
            signal.raise_signal(number)
        assert stop() is bool(sent)
        assert stop.event.wait(30 if sent else 0) is bool(sent)
    assert (stop.first, stop.exit_status) == (first, status)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.timeout(30)
def test_a_signal_that_comes_while_a_thread_begins_to_wait_for_it_ends_the_wait():
    """Right there it holds the event's lock."""
    with catch_stop() as stop:
        with stop.event._cond:
            signal.raise_signal(signal.SIGTERM)
        assert stop.event.wait(20)


@pytest.fixture
def signals():
    """Numbers of the two that unwind, which nothing handles or ignores here, nor in processes that a test starts."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    yield numbers
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_once_and_the_handlers_are_put_back(signals, number):
    removed = []

    @unwind_on_end()
    def run():
        try:
            signal.raise_signal(number)
        finally:
            for again in signals:
                signal.raise_signal(again)
            removed.append("all")

    with pytest.raises(SystemExit) as ended:
        run()
    assert (ended.value.code, removed) == (128 + number, ["all"])
    assert [signal.getsignal(one) for one in signals] == [signal.SIG_DFL] * 2


def test_a_signal_that_is_ignored_stays_ignored(signals):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with unwind_on_end():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


MERGING = """
import sys, time
import ingero.recording.export.merge as merge
from ingero.cli.main import cli, run_program

def merge_slowly(sources, output, **_):
    output.touch()
    print("merging", flush=True)
    time.sleep(100)

merge.merge_recordings = merge_slowly
sys.exit(run_program(cli, sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", ["explain", "query"])
def test_a_merged_copy_does_not_stay_when_its_command_is_ended(signals, tmp_path, command, number):
    (tmp_path / "run.20260131T020000.000000000Z-0123abcd.db").touch()
    copies = tmp_path / "copies"
    copies.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", MERGING, command, "--db", tmp_path / "run.db", "--include-rolled"],
        env={**os.environ, "TMPDIR": str(copies)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline() == "merging\n"
        assert len(list(copies.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert list(copies.iterdir()) == []


HELD_DEMO = """
import sys, time
import ingero.cli.commands.demo.live as live
from ingero.cli.main import cli, run_program

class HeldSession:
    def __init__(self, settings, observers):
        self._pids = settings.pids

    def __enter__(self):
        print(*self._pids, flush=True)
        time.sleep(100)

    def __exit__(self, *_):
        pass

live.check_probes = lambda: None
live.TraceSession = HeldSession
sys.exit(run_program(cli, ["demo", "gpu-steal", "--sim"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_no_program_and_no_recording(signals, tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-c", HELD_DEMO],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline().startswith("──")
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: not any(Path("/proc", str(pid)).exists() for pid in pids))
