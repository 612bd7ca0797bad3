"""perf's events are opened once, before a trace gives up privileges.

Kernels of Debian and Ubuntu refuse them afterwards.
"""

import os
import resource
from pathlib import Path

import pytest

from ingero.agent.capture.kernel.perf import PerfEvents
from ingero.agent.capture.probes.engine import EngineSettings
from ingero.agent.capture.probes.host import find_software_events
from ingero.agent.capture.session import TraceSession, TraceSettings

pytestmark = pytest.mark.kernel
NAMES = ("process", "fault")


def count_events():
    """Descriptors of perf's events that this process has."""
    n_events = 0
    for fd in Path("/proc/self/fd").iterdir():
        try:
            n_events += str(fd.readlink()) == "anon_inode:[perf_event]"
        except FileNotFoundError:  # the one that listed them
            continue
    return n_events


def test_a_session_opens_no_event_beside_those_that_it_is_given():
    before = count_events()
    events = PerfEvents(find_software_events(NAMES))
    opened = count_events()
    assert opened > before
    settings = TraceSettings(engine=EngineSettings(host_probes=NAMES))
    with TraceSession(settings, [], events=events) as session:
        assert (session.missing, session.notes) == ((), ())
        assert count_events() == opened
    assert count_events() == before


def test_a_session_that_is_given_none_opens_and_closes_its_own():
    before = count_events()
    settings = TraceSettings(engine=EngineSettings(host_probes=NAMES))
    with TraceSession(settings, []) as session:
        assert (session.missing, session.notes) == ((), ())
        assert count_events() > before
    assert count_events() == before


def test_processors_that_need_more_descriptors_than_the_soft_limit_get_their_events():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 2, hard))  # each processor takes three
    try:
        settings = TraceSettings(engine=EngineSettings(host_probes=NAMES))
        with TraceSession(settings, []) as session:
            assert (session.missing, session.notes) == ((), ())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
