"""Processors that come online while it is traced. That they did is planted; perf's events are real, and reach none that was not named."""

import contextlib
import errno
import mmap
import os

import numpy as np
import pytest
from tests.support.uncached import write_uncached

from ingero.agent.capture import file_queue
from ingero.agent.capture.discover.processes import open_file
from ingero.agent.capture.kernel import perf
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.host import find_software_events
from ingero.agent.capture.session import TraceSession, TraceSettings
from ingero.sim.runner import SimSettings, Simulation, get_program
from ingero.units import NS_PER_S

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


@pytest.fixture
def online(monkeypatch, tmp_path):
    """The file that says which processors run: the first alone."""
    if not {FIRST, LATE} <= os.sched_getaffinity(0):
        pytest.skip("needs two processors")
    path = tmp_path / "online"
    path.write_text(f"{FIRST}\n")
    monkeypatch.setattr(perf, "ONLINE", path)
    return path


class Ticks:
    """Counts how often a session's totals came."""

    n_ticks = 0

    def on_process(self, identity):
        pass

    def on_events(self, ring, records, events):
        pass

    def on_totals(self, totals):
        self.n_ticks += 1


def is_found_late(online, said, *, n_before):
    """Whether a library is probed that a process loads on the late processor after so many ticks from its coming."""
    with open_file(get_program().parent / "libcudart.so.12") as opened:
        library = opened.file
    settings = TraceSettings(engine=EngineSettings(host_probes=("process", "fault")))
    ticks, rounds, started = Ticks(), [], []
    with (
        TraceSession(settings, [ticks], notify=said.append) as session,
        contextlib.ExitStack() as stack,
    ):
        online.write_text(f"{FIRST}-{LATE}\n")

        def is_over():
            rounds.append(len(said))
            if ticks.n_ticks >= n_before and not started:
                started.append(stack.enter_context(on_processor(LATE)))
                simulation = stack.enter_context(Simulation(SimSettings("hang")))
                assert simulation.read_line() == "hanging\n"
            return session.engine.is_attached(library) or len(rounds) > MOST_ROUNDS

        session.run(is_over)
        return session.engine.is_attached(library)


def test_what_is_loaded_on_a_processor_that_came_online_late_is_reported_by_perf(
    monkeypatch, online
):
    monkeypatch.setattr(file_queue, "RESCAN_NS", 3600 * NS_PER_S)
    said = []
    # The look at all processes when it comes is over by then.
    assert is_found_late(online, said, n_before=3)
    assert [line for line in said if "came online" in line] == []


def test_it_is_found_without_perf_and_the_processor_s_number_said_once(monkeypatch, online):
    opens = perf._open

    def refuse_late(attr, cpu):
        if cpu == LATE:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opens(attr, cpu)

    monkeypatch.setattr(perf, "_open", refuse_late)
    said = []
    assert is_found_late(online, said, n_before=0)
    assert len([line for line in said if "came online" in line and f": {LATE};" in line]) == 1


def test_a_page_fault_there_is_seen(online, start_engine, tmp_path):
    path, n_pages = tmp_path / "data", 16
    write_uncached(path, n_pages)
    engine = start_engine(EngineSettings(host_probes=("fault",)), attach=False, is_started=False)
    with contextlib.closing(perf.PerfEvents(find_software_events(("fault",)))) as events:
        engine.start_host_probes(events)
        online.write_text(f"{FIRST}-{LATE}\n")
        late = events.open_late()
        engine.follow_late(late)
        assert late.unreached == []
        engine.maps["gpu_pids"].update(os.getpid().to_bytes(4, "little"), bytes(8))
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory,
            on_processor(LATE),
        ):
            memory.madvise(mmap.MADV_RANDOM)  # no read-ahead: every page waits for the disk
            assert len([memory[page * mmap.PAGESIZE] for page in range(n_pages)]) == n_pages
    kept = [engine.rings["faults"].empty()]
    engine.drain({"faults": lambda view: kept.append(view.copy())})
    records = np.concatenate(kept)
    assert (records["tid"] == os.getpid()).sum() >= n_pages
