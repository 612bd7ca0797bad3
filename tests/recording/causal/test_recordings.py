"""What happened in recordings made on real GPUs by another program."""

from pathlib import Path

import pytest

from ingero.recording.causal.engine import explain
from ingero.recording.store.reader import load_recording

DBS = Path(__file__).parents[2] / "data" / "agent_dbs"


def told(name):
    return explain(load_recording(DBS / name))


@pytest.fixture(scope="module")
def starved():
    return told("pytorch-dataloader-starvation.db")


def test_dataloader_job_is_starved_of_input_by_host_computation(starved):
    top = starved.incidents[0]
    assert (top.rule, top.severity, top.process) == ("input_starvation", "HIGH", "python3")
    assert top.n_cases == 7
    assert (top.end_ns - top.start_ns) / 1e9 == pytest.approx(49.6, abs=0.05)
    assert top.lost_ns / (top.end_ns - top.start_ns) == pytest.approx(0.99, abs=0.01)
    (cause,) = top.causes
    assert cause.name == "computing on the host"
    assert cause.share == pytest.approx(0.999, abs=0.0005)


def test_slow_first_launch_is_lazy_loading(starved):
    (lazy,) = [i for i in starved.incidents if i.rule == "lazy_load"]
    assert lazy.severity == "LOW"
    assert lazy.lost_ns == pytest.approx(25.8e6, rel=0.01)
    assert lazy.causes[0].name == "lazy module loading at first launch"


def test_nobody_is_blamed_for_preemption(starved):
    named = [cause.name for incident in starved.incidents for cause in incident.causes]
    assert not [name for name in named if "preempt" in name]
    ruled_out = {r.name: r.share for r in starved.incidents[0].ruled_out}
    assert ruled_out["preemption"] == 0
    assert ruled_out["off the CPU, reason not recorded"] < 0.002
    assert len(starved.incidents) == 2


def test_coverage_tells_how_many_calls_have_no_row(starved):
    coverage = starved.incidents[0].coverage
    assert coverage.state == "sampled"
    # 12 runtime launches, 29 driver launches and 6 copies of the first minute; 2, 5 and 1 of the second.
    assert coverage.seen - coverage.stored == 55


@pytest.mark.parametrize("name", ["sample-gpu-node-01.db", "sample-cluster.db"])
def test_node_01_is_blocked_by_its_own_disk_reads(name):
    (incident,) = told(name).incidents
    assert (incident.node, incident.pid, incident.rule) == ("gpu-node-01", 1887, "blocking_io")
    assert incident.n_cases == 98
    cause = incident.causes[0]
    assert (cause.name, round(cause.share, 2)) == ("blocked on disk reads", 0.98)
    assert "98 of 98 reads" in " ".join(cause.evidence)
    assert incident.coverage.state == "unknown"


@pytest.mark.parametrize("name", ["sample-gpu-node-02.db", "sample-gpu-node-03.db"])
def test_sleeping_loop_beside_a_writing_agent_is_healthy(name):
    assert told(name).incidents == ()


def test_same_recording_gives_the_same_answer_twice(starved):
    assert told("pytorch-dataloader-starvation.db") == starved
