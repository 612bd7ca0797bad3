"""What an agent that starts again makes of the baseline that the one before it saved."""

import json
import threading

import pytest
from tests.agent.health.conftest import IDENTITY, SECOND_NS

from ingero.agent.health.service import AgentSettings, HealthAgent
from ingero.agent.health.signals.machine import State

JOB_A = {"for": "100h", "workload": "a", "throughput": 1000}
JOB_B = {"for": "100h", "workload": "b", "throughput": 250}
UNNAMED = {"for": "5s", "throughput": 1000}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "baseline.json"


@pytest.fixture
def start(make_rig, path):
    """Start an agent at a second of the clock: the rig it runs on, and the agent."""

    def start_agent(at_s, *steps):
        rig = make_rig(list(steps))
        rig.clock.advance(at_s * SECOND_NS)
        settings = AgentSettings(
            identity=IDENTITY,
            transport=rig.transport.settings,
            loop=rig.settings,
            persist_path=path,
        )
        agent = HealthAgent(settings, rig.parts, threading.Event())
        agent.restore()
        rig.loop = agent.loop
        rig.collector.set_threshold("0.9")
        return rig, agent

    return start_agent


def run_job_a(start):
    rig, agent = start(0, JOB_A)
    rig.samples(100)
    assert agent.save() == []


def test_the_same_workload_goes_on_at_once(start):
    run_job_a(start)
    rig, _ = start(140, UNNAMED, JOB_A)
    samples = rig.samples(60)
    assert {sample.state for sample in samples} == {State.ACTIVE}
    assert not any(sample.is_straggler for sample in samples)
    assert rig.loop.baseline.n_samples > 10


@pytest.mark.parametrize("before", [(), (UNNAMED,)])
def test_another_workload_is_not_judged_by_the_one_before_the_restart(start, before):
    run_job_a(start)
    rig, _ = start(140, *before, JOB_B)
    samples = rig.samples(200)
    named = samples[6 * len(before) :]
    assert named[0].state is State.CALIBRATING
    assert named[-1].state is State.ACTIVE
    assert not any(sample.is_straggler for sample in samples)
    assert rig.loop.baseline.fast.throughput == pytest.approx(250)


def test_a_file_that_names_no_workload_is_of_none_that_has_a_name(start, path):
    run_job_a(start)
    document = json.loads(path.read_text())
    assert document.pop("workload") == "a"
    path.write_text(json.dumps(document))
    rig, _ = start(140, JOB_A)
    assert rig.sample().state is State.CALIBRATING
    path.write_text(json.dumps(document))
    rig, _ = start(140, UNNAMED)
    assert rig.sample().state is State.ACTIVE


def test_nothing_is_kept_of_an_idle_node(start, path):
    run_job_a(start)
    rig, agent = start(140, JOB_A | {"for": "20s"}, {"for": "1h", "throughput": 0})
    rig.samples(15)
    agent.save()
    assert path.exists()
    assert rig.samples(60)[-1].state is State.IDLE
    assert agent.save() == []
    assert not path.exists()
