"""Programs of host probes at the places that a kernel has. They are loaded and not attached, so nothing is watched."""

import pytest

from ingero.agent.capture.kernel import features
from ingero.agent.capture.probes import hooks
from ingero.agent.capture.probes.hooks import load_host_probe
from ingero.agent.capture.probes.host import PROBES

pytestmark = pytest.mark.kernel

SCHED = next(probe for probe in PROBES if probe.name == "sched")
NEWEST, OLDER = (place.program for place in SCHED.hooks[0].attach_points)


@pytest.fixture
def load():
    """Load the scheduler's probe; it is freed at the end of the test."""
    loaded = []

    def load_one():
        loaded.append(load_host_probe(SCHED, is_filtered=False))
        return loaded[-1]

    yield load_one
    for one in loaded:
        one.loaded.close()


def test_a_program_is_loaded_at_one_place_only_which_is_named(load):
    found = load()
    assert len({NEWEST, OLDER} & found.loaded.programs.keys()) == 1
    assert len(found.attach_points) == 1
    assert not found.refusals


def test_a_kernel_whose_tracepoint_has_fewer_arguments_gets_the_older_program(load, monkeypatch):
    monkeypatch.setattr(hooks, "count_arguments", lambda _tracepoint: 3)
    found = load()
    assert OLDER in found.loaded.programs
    assert NEWEST not in found.loaded.programs
    assert found.attach_points == ("sched_switch without the state left",)
    assert not found.refusals


def test_a_place_that_the_kernel_lacks_costs_that_program_only(load, monkeypatch):
    names = features._read_names().replace(b"\0btf_trace_sched_switch\0", b"\0\0")
    monkeypatch.setattr(features, "_read_names", lambda: names)
    found = load()
    assert set(found.loaded.programs) == {"sched_waking", "sched_wakeup", "sched_exit"}
    (refusal,) = found.refusals
    assert refusal.program == NEWEST
    assert features.describe_kernel() in refusal.reason
    assert refusal.costs == "threads that leave the CPU are not seen"


def test_a_program_that_the_verifier_refuses_gives_way_to_that_of_the_next_place(load, monkeypatch):
    real = hooks.BpfObject

    def refuse(*arguments, left_out, **others):
        if NEWEST not in left_out:
            raise hooks.ProgramRefusedError(
                hooks.UnsupportedError("cannot load"), NEWEST, "Permission denied"
            )
        return real(*arguments, left_out=left_out, **others)

    monkeypatch.setattr(hooks, "BpfObject", refuse)
    found = load()
    assert OLDER in found.loaded.programs
    assert found.attach_points == ("sched_switch without the state left",)
    assert not found.refusals
