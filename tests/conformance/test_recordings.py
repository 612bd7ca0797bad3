"""The same workload in every kind of recording: the same culprit and severity, or unknown; never somebody else."""

from functools import cache

import pytest
from tests.recording.scenarios.faults import FAULTS
from tests.recording.scenarios.healthy import HEALTHY
from tests.support.degrade import degrade, fill_disk, lose_bursts, sample, thin_seconds

from ingero.model.sampling import NEVER_SAMPLED
from ingero.recording.causal.engine import explain
from ingero.recording.causal.rules import RULES
from ingero.recording.scenarios.catalog import SCENARIOS

MODES = {
    "every call": lambda events: events,
    "default": lambda events: thin_seconds(sample(events, 1, NEVER_SAMPLED)),
    "default under load": lambda events: thin_seconds(sample(events, 16, NEVER_SAMPLED)),
    "1 of 100": lambda events: sample(events, 100, NEVER_SAMPLED),
    "1 of 100 of everything": lambda events: sample(events, 100),
    "1 of 5 of everything": lambda events: sample(events, 5),
    "ring that loses": lose_bursts,
    "ring that loses much": lambda events: lose_bursts(events, share=0.4, seed=3),
    "full disk": fill_disk,
}
WORKLOADS = {scenario.name: scenario.build for scenario in SCENARIOS} | FAULTS


def verdicts(told):
    """What the answer accuses: rule, process, rank and severity."""
    return {(i.rule, i.node, i.pid, i.rank, i.severity) for i in told.incidents}


@pytest.fixture(scope="module")
def exact():
    """Recordings with every call and what they say, made once."""
    made = {}

    def get(name, build):
        if name not in made:
            recording = build().build()
            made[name] = recording, explain(degrade(recording, lambda events: events))
        return made[name]

    return get


def test_every_rule_is_among_the_workloads(exact):
    shown = {i.rule for name, build in WORKLOADS.items() for i in exact(name, build)[1].incidents}
    assert shown == {rule.name for rule in RULES}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_worse_recording_says_the_same_or_that_it_cannot_tell(name, mode, exact):
    recording, truth = exact(name, WORKLOADS[name])
    told = explain(degrade(recording, MODES[mode]))
    said, expected = verdicts(told), verdicts(truth)
    assert said <= expected, "a new incident, another rank or another severity"
    open_rules = {(rule, one.pid) for one in told.unknown for rule in one.rules}
    for rule, _, pid, _, _ in expected - said:
        assert any(r == rule for r, _ in open_rules) or is_in_no_count(rule, mode), (rule, pid)


STATEMENTS = {"oom_kill", "pod_oom_kill", "pod_restart", "pod_eviction", "gpu_xid", "gpu_ecc"}
"""Of the kernel, the driver or the orchestrator: single rows that nobody counts by operation."""
LAST_ROW = {"gpu_throttling", "call_in_flight"}
"""Facts that are written when they are over."""


def is_in_no_count(rule, mode):
    """A statement that comes when the ring or the disk is full is in no row and in no count: no rule can know of it."""
    loses = mode in {"full disk", "ring that loses", "ring that loses much"}
    return loses and rule in STATEMENTS | LAST_ROW


@cache
def build_healthy(name):
    """A recording with every call, made once."""
    return HEALTHY[name]().build()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", sorted(HEALTHY))
def test_a_healthy_workload_is_accused_in_no_recording(name, mode):
    told = explain(degrade(build_healthy(name), MODES[mode]))
    assert verdicts(told) == set()
