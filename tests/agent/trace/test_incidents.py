"""Incidents while a trace goes on.

Each told once, worse ones again, and never one that all of the recording does not show.
"""

from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tests.recording.scenarios.faults import FAULTS
from tests.recording.scenarios.healthy import HEALTHY
from tests.support.degrade import degrade

from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.capture.totals import Totals
from ingero.agent.trace.incidents import (
    MAX_COST_NS,
    MAX_COST_SHARE,
    MAX_REPORTED,
    MIN_PAUSE_NS,
    IncidentWatch,
    choose_pause_ns,
    identify,
)
from ingero.agent.trace.recent_recording import RecentRecording
from ingero.model.gpu_view import GpuView
from ingero.model.incidents import Explanation, Severity
from ingero.model.recording import Session, Unprobed
from ingero.recording.causal.engine import explain
from ingero.recording.scenarios.catalog import SCENARIOS
from ingero.units import NS_PER_MS, NS_PER_S

WORKLOADS = {scenario.name: scenario.build for scenario in SCENARIOS} | FAULTS
# Tests of one workload run in one process, in which it is built and watched once.
every_workload = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.xdist_group(f"of {name}")) for name in sorted(WORKLOADS)],
)


@cache
def record(name):
    return WORKLOADS[name]().build()


class AtOnce(Executor):
    """Runs what it is given before it returns."""

    def submit(self, fn, /, *args):
        future = Future()
        try:
            future.set_result(fn(*args))
        except ZeroDivisionError as error:
            future.set_exception(error)
        return future


class Never(Executor):
    """Starts nothing; remembers what it was given."""

    def __init__(self):
        self.given = []

    def submit(self, fn, /, *args):
        future = Future()
        self.given.append((future, fn, args))
        return future


def totals_at(second, *, is_last=False, unprobed=()):
    empty = {name: np.zeros(0, get_dtype(name)) for name in ("count_key", "count")}
    return Totals(
        mono_ns=second * NS_PER_S, wall_ns=0, elapsed_ns=second * NS_PER_S, keys=empty["count_key"],
        counts=empty["count"], changes=empty["count"], losses={}, in_flight=empty["count"], keep_one_in=1,
        is_last=is_last, unprobed=unprobed,
    )  # fmt: skip


def feed(recent, recording, n_parts=3):
    """Give a recording part by part, as a selection does; yields after each."""
    recent.put_process_names({pid: name for (_, pid), name in recording.process_names.items()}, 0)
    recent.put_ranks({pid: place for (_, pid), place in recording.ranks.items()})
    recent.put_snapshots(recording.snapshots)
    ends = recording.events["start_ns"] + recording.events["duration_ns"]
    order = np.argsort(ends, kind="stable")
    for idx in np.array_split(order, n_parts):
        part = degrade(recording, lambda events, idx=idx: events[np.sort(idx)])
        only = degrade(replace(recording, events=part.events), lambda events: events)
        counted = only.aggregates.copy()
        counted["stored"] = 0  # the sink notes what it keeps
        covered = only.coverage.copy()
        covered["stored"] = 0
        recent.put_events(part.events)
        recent.put_aggregates(counted)
        recent.put_histograms(only.histograms)
        recent.put_coverage(covered)
        yield


def watched(recording, max_rows=100_000, n_parts=3):
    """What is told of a workload, look by look, and the verdict."""
    recent = RecentRecording(recording.sessions[0], max_rows)
    told = []
    watch = IncidentWatch(recent, lambda one, _start_ns: told.append(one), pool=AtOnce())
    second = 0
    for _ in feed(recent, recording, n_parts):
        for _ in range(12):
            second += 1
            watch.on_totals(totals_at(second))
    last = totals_at(second + 1, is_last=True)
    watch.on_totals(
        replace(last, wall_ns=max((s.stopped_wall_ns for s in recording.sessions), default=0))
    )
    return told, watch


def test_what_a_process_is_shown_of_the_gpus_is_part_of_what_is_kept():
    recording = WORKLOADS["gpu-steal"]().build()
    recent = RecentRecording(recording.sessions[0], 100_000)
    for _ in feed(recent, recording):
        pass
    recent.put_gpu_views({4821: GpuView(("nvidia0",)), 5100: GpuView(("nvidia1",))})
    assert recent.freeze().build().gpu_views == {
        (0, 4821): GpuView(("nvidia0",)),
        (0, 5100): GpuView(("nvidia1",)),
    }


def keys_of(incidents):
    return {(i.rule, i.node, i.pid, i.rank, i.severity) for i in incidents}


@pytest.fixture(scope="module")
def whole():
    """What is told of a workload of which every row is kept, made once."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = watched(record(name))
        return made[name]

    return get


@every_workload
def test_the_verdict_of_all_rows_is_that_of_the_recording(name, whole):
    told, watch = whole(name)
    truth = explain(degrade(record(name), lambda events: events))
    assert keys_of(watch.verdict.incidents) == keys_of(truth.incidents)
    assert {identify(one) for one in truth.incidents} <= {identify(one) for one in told}


@every_workload
def test_each_is_told_once_at_each_severity(name, whole):
    told, _ = whole(name)
    order = [Severity.LOW, Severity.MEDIUM, Severity.HIGH]
    levels = {}
    for one in told:
        levels.setdefault(identify(one), []).append(order.index(one.severity))
    for seen in levels.values():
        assert seen == sorted(set(seen))


@pytest.mark.parametrize("name", sorted(HEALTHY))
@pytest.mark.parametrize("part", [1.0, 0.3])
def test_a_healthy_workload_is_accused_in_no_part(name, part):
    recording = HEALTHY[name]().build()
    told, watch = watched(recording, max(int(len(recording.events) * part), 1))
    assert told == []
    assert watch.verdict.incidents == ()


LESS_SPECIFIC = {"noisy_neighbour": "preemption", "graph_contended": "preemption"}
"""A part may not show who took the CPU; that it was taken is in it."""


@pytest.mark.parametrize("part", [0.5, 0.2])
@every_workload
def test_a_bound_accuses_nobody_new(name, part, whole):
    recording = record(name)
    all_told, _ = whole(name)
    truth = {(one.rule, one.node, one.pid, one.rank) for one in all_told}
    truth |= {(LESS_SPECIFIC[rule], *rest) for rule, *rest in truth if rule in LESS_SPECIFIC}
    told, watch = watched(recording, max(int(len(recording.events) * part), 1))
    said = {(one.rule, one.node, one.pid, one.rank) for one in (*told, *watch.verdict.incidents)}
    assert said <= truth


def test_rows_that_were_let_go_of_leave_the_asked_time():
    recording = WORKLOADS["cpu_contention"]().build()
    recent = RecentRecording(recording.sessions[0], max_rows=500)
    for _ in feed(recent, recording, 20):
        pass
    frozen = recent.freeze()
    assert 500 <= frozen.n_rows <= 625
    kept = frozen.build(300)
    assert len(kept.events) == 300
    assert kept.is_truncated
    assert kept.asked_ns[0] == int(kept.events["start_ns"].min())
    assert kept.n_events_stored == len(recording.events)


def found(title, severity, watched_ns=1):
    """One incident of a recording that has it, changed."""
    (one, *_) = explain(degrade(WORKLOADS["gpu_xid"]().build(), lambda events: events)).incidents
    return replace(one, title=title, severity=severity, watched_ns=watched_ns)


def told_of(answers, costs_ns=(0,)):
    """What is told when the looks find these; and the seconds at which they began."""
    told, looked, cpu = [], [], [0]
    costs = iter(costs_ns)
    remaining = list(answers)

    def judge(_recording):
        looked.append(watch_at[0])
        cpu[0] += next(costs, 0)
        incidents = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return Explanation(tuple(incidents), 0, 1, 0, 0, 0)

    watch = IncidentWatch(
        RecentRecording(Session("n", 0)),
        lambda one, _start_ns: told.append(one),
        judge,
        lambda: cpu[0],
        AtOnce(),
    )
    watch_at = [0]
    for second in range(1, 90):
        watch_at[0] = second
        watch.on_totals(totals_at(second))
    watch.on_totals(totals_at(90, is_last=True))
    return told, looked, watch


def test_a_worse_severity_is_told_again_and_a_lesser_one_is_not():
    low, high = found("a", Severity.LOW), found("b", Severity.HIGH)
    told, _, watch = told_of([[low], [high], [low], [high]])
    assert [one.title for one in told] == ["a", "b"]
    (series,) = watch.iter_series()
    assert {dict(labels)["severity"]: n for labels, n in series.points} == {"LOW": 1, "HIGH": 1}
    assert watch.verdict.count(Severity.HIGH) == 1


def test_of_many_incidents_those_found_last_are_remembered():
    one = found("a", Severity.HIGH)
    lasting, first = replace(one, pid=1), replace(one, pid=2)
    others = [replace(one, pid=pid) for pid in range(10, 10 + MAX_REPORTED - 1)]
    answers = [[lasting, first], [lasting, *others], [lasting, first], []]
    told, _, watch = told_of(answers)
    assert [one.pid for one in told] == [1, 2, *(one.pid for one in others), 2]
    (series,) = watch.iter_series()
    assert sum(n for _, n in series.points) == len(told)


def test_a_look_that_costs_much_is_followed_by_a_long_pause():
    _, cheap, _ = told_of([[]], [NS_PER_MS] * 99)
    assert np.diff(cheap[:-1]).min() * NS_PER_S >= MIN_PAUSE_NS
    _, dear, _ = told_of([[]], [600 * NS_PER_MS] * 99)
    assert np.diff(dear[:-1]).min() * NS_PER_S >= choose_pause_ns(600 * NS_PER_MS)
    assert choose_pause_ns(MAX_COST_NS) == MAX_COST_NS / MAX_COST_SHARE


def test_there_are_never_two_looks_at_once():
    pool = Never()
    watch = IncidentWatch(RecentRecording(Session("n", 0)), lambda *_: None, pool=pool)
    for second in range(60):
        watch.on_totals(totals_at(second, unprobed=(Unprobed(1, "x", "y"),)))
    assert len(pool.given) == 1
    assert pool.given[0][2][0].rest.unprobed == (Unprobed(1, "x", "y"),)


def test_a_rule_that_fails_ends_the_looking_and_is_said():
    looked = []

    def judge(_recording):
        looked.append(1)
        raise ZeroDivisionError("of a rule")

    watch = IncidentWatch(RecentRecording(Session("n", 0)), lambda *_: None, judge, pool=AtOnce())
    for second in range(60):
        watch.on_totals(totals_at(second))
    watch.on_totals(totals_at(60, is_last=True))
    assert len(looked) == 1
    assert watch.verdict.failure == "ZeroDivisionError: of a rule"
