"""Processors that come online while it is traced. That they did is planted; that perf does not reach them is real."""

import contextlib
import os

import pytest

from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.kernel import perf
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.sim.runner import SimSettings, Simulation, get_program

pytestmark = pytest.mark.kernel
FIRST, LATE = 0, 1
MOST_ROUNDS = 200  # of a tenth of a second


@contextlib.contextmanager
def on_processor(number):
    """Run this thread, and what it starts, there alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {number})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def test_what_is_loaded_on_a_processor_that_came_online_late_is_found_and_its_number_said_once(
    monkeypatch, tmp_path
):
    if not {FIRST, LATE} <= os.sched_getaffinity(0):
        pytest.skip("needs two processors")
    online = tmp_path / "online"
    online.write_text(f"{FIRST}\n")
    monkeypatch.setattr(perf, "ONLINE", online)
    with open_file(get_program().parent / "libcudart.so.12") as opened:
        library = opened.file
    said, rounds = [], []
    settings = TraceSettings(engine=EngineSettings(host_probes=("process", "fault")))
    with TraceSession(settings, [], notify=said.append) as session:
        online.write_text(f"{FIRST}-{LATE}\n")
        with on_processor(LATE), Simulation(SimSettings("hang")) as simulation:
            assert simulation.read_line() == "hanging\n"

            def is_over():
                rounds.append(len(said))
                return session.engine.is_attached(library) or len(rounds) > MOST_ROUNDS

            session.run(is_over)
        assert session.engine.is_attached(library)
    assert len([line for line in said if "came online" in line and f": {LATE};" in line]) == 1
