"""A recording that several runs of the agent wrote into: what happened while nobody watched counts for nothing."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from tests.recording.scenarios.faults import FAULTS
from tests.recording.scenarios.ranks import Meeting, collective_hang

from ingero.model.events import GraphOp, HostOp, Source
from ingero.model.recording import AGGREGATE, Session
from ingero.recording.causal.engine import explain
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.intervals import Intervals
from ingero.recording.causal.watching import NodeWatch
from ingero.recording.queries.graphs import summarise_graphs
from ingero.recording.queries.operations import list_operations
from ingero.recording.scenarios.catalog import SCENARIOS

S = 1_000_000_000
MS = 1_000_000
HOUR = 3600 * S
DEMOS = {one.name: one.build for one in SCENARIOS}
LAST = {name: FAULTS[name] for name in ("sync_bound", "launch_bound", "allocation_churn")}
LAST |= {name: FAULTS[name] for name in ("step_time_changed", "graph_recaptured", "memory_leak")}
LAST |= {name: FAULTS[name] for name in ("input_starvation", "blocking_io", "pinned_memory_leak")}


def run_of(recording, begin_ns=0, stop_ns=None):
    first, last = recording.window_ns
    stop_ns = last if stop_ns is None else stop_ns
    session = replace(recording.sessions[0], started_wall_ns=first - MS, stopped_wall_ns=stop_ns)
    return shift(replace(recording, sessions=(session,)), begin_ns)


def shift(recording, by_ns):
    events, coverage = recording.events.copy(), recording.coverage.copy()
    events["start_ns"] += by_ns
    coverage["bucket_ns"] += by_ns
    (one,) = recording.sessions
    stop_ns = one.stopped_wall_ns and one.stopped_wall_ns + by_ns
    moved = replace(one, started_wall_ns=one.started_wall_ns + by_ns, stopped_wall_ns=stop_ns)
    return replace(recording, events=events, coverage=coverage, sessions=(moved,))


def append(first, second):
    return replace(
        first,
        events=np.concatenate((first.events, second.events)),
        coverage=np.concatenate((first.coverage, second.coverage)),
        sessions=(*first.sessions, *second.sessions),
        process_names={**first.process_names, **second.process_names},
        n_events_stored=first.n_events_stored + second.n_events_stored,
    )


def other_program():
    built = DEMOS["incident"]().build()
    events = built.events[:200].copy()
    events["pid"], events["tid"] = 200, 200
    return replace(built, events=events, coverage=built.coverage[:0], process_names={})


def stopped_in_mid_step():
    """Rank 2 has not entered the collective that the others are in when the agent is stopped."""
    recording = Meeting(ends_at=40).build().build()
    return run_of(recording)


@pytest.mark.parametrize("distance_ns", [HOUR, 20 * S])
def test_a_rank_is_not_missing_because_nobody_watched_when_it_came(distance_ns):
    job = stopped_in_mid_step()
    assert explain(job).incidents == ()
    both = append(job, run_of(other_program(), distance_ns))
    assert explain(both).incidents == ()


def test_a_rank_is_not_missing_while_only_another_run_watches():
    job = stopped_in_mid_step()
    other = shift(run_of(other_program(), stop_ns=job.window_ns[1] + HOUR), 100 * MS)
    assert other.sessions[0].started_wall_ns < job.sessions[0].stopped_wall_ns
    assert explain(append(job, other)).incidents == ()


@pytest.mark.parametrize("says_when_it_stopped", [True, False])
def test_a_hang_is_found_also_where_another_run_follows(says_when_it_stopped):
    alone = run_of(collective_hang().build(), stop_ns=None if says_when_it_stopped else 0)
    (hang,) = explain(alone).incidents
    (found,) = explain(append(alone, run_of(other_program(), HOUR))).incidents
    assert (found.rule, found.severity) == ("collective_hang", "HIGH")
    assert (found.id, found.title, found.lost_ns) == (hang.id, hang.title, hang.lost_ns)


class Read:
    """A recording that counts how often its events are gone through."""

    def __init__(self, recording):
        self.nodes, self.sessions = recording.nodes, recording.sessions
        self._events = recording.events
        self.n_reads = 0

    @property
    def events(self):
        self.n_reads += 1
        return self._events


def traced_often(n_runs):
    """A hang after other runs of which none says when it stopped, as where the agent was killed."""
    job = run_of(collective_hang().build(), n_runs * HOUR, stop_ns=0)
    for i in reversed(range(n_runs)):
        job = append(run_of(other_program(), i * HOUR, stop_ns=0), job)
    return job


def test_a_nodes_rows_are_gone_through_once_however_many_its_runs_are_and_never_copied_whole():
    recording = traced_often(20)
    read = Read(recording)
    watch = NodeWatch(read, 0)
    tracemalloc.start()
    try:
        assert len(watch.unwatched) == 20
        assert {watch.until(moment) for moment in recording.events["start_ns"].tolist()[::50]}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert read.n_reads == 1
    assert peak < recording.events.nbytes / 2


def test_how_long_a_node_was_watched_is_found_once_for_all_of_its_ranks(monkeypatch):
    made = []
    find = NodeWatch.__init__
    monkeypatch.setattr(NodeWatch, "__init__", lambda *args: made.append(args) or find(*args))
    assert [one.rule for one in explain(traced_often(2)).incidents] == ["collective_hang"]
    assert len(made) == 1


def test_a_hang_of_the_second_run_is_found():
    second = run_of(collective_hang().build(), HOUR)
    (hang,) = explain(second).incidents
    (found,) = explain(append(run_of(other_program()), second)).incidents
    assert (found.title, found.lost_ns) == (hang.title, hang.lost_ns)


@pytest.mark.parametrize("name", sorted({*DEMOS, *LAST} - {"cold-start"}))
def test_what_was_traced_twice_is_as_bad_as_what_was_traced_once(name):
    once = run_of((DEMOS | LAST)[name]().build())
    twice = append(once, shift(once, HOUR))
    found, again = explain(once).incidents, explain(twice).incidents
    assert {(i.rule, i.severity) for i in again} == {(i.rule, i.severity) for i in found}
    causes = {i.rule: i.causes[0].name for i in found}
    assert {i.rule: i.causes[0].name for i in again} == causes
    watched = {i.pid: i.watched_ns for i in found if i.pid}
    for incident in again:
        assert incident.watched_ns == pytest.approx(2 * watched.get(incident.pid, 0), rel=0.01)
        assert incident.lost_ns <= incident.watched_ns or not incident.pid


def test_an_hour_without_the_agent_is_no_time_that_slow_steps_lost():
    once = run_of(FAULTS["step_time_changed"]().build())
    (change,) = explain(once).incidents
    slow = once.events[once.events["start_ns"] >= change.start_ns]
    later = run_of(replace(once, events=slow), HOUR)
    (found,) = explain(append(once, later)).incidents
    assert found.lost_ns == pytest.approx(2 * change.lost_ns, rel=0.02)
    assert found.causes[0].name == change.causes[0].name


def test_the_share_of_an_operation_is_of_the_time_that_was_watched():
    once = run_of(DEMOS["memcpy-bottleneck"]().build())
    shares = {one.op: one.wall_pct for one in list_operations(once)}
    twice = {one.op: one.wall_pct for one in list_operations(append(once, shift(once, HOUR)))}
    assert twice == pytest.approx(shares, rel=0.01)


def test_calls_without_a_row_are_shared_by_the_time_that_was_watched():
    once = run_of(DEMOS["memcpy-bottleneck"]().build())
    both = append(once, shift(once, HOUR))
    counted = np.zeros(1, AGGREGATE)
    counted["bucket_ns"], counted["source"], counted["op"] = both.window_ns[0], Source.CUDA, 3
    counted["pid"], counted["count"], counted["sum_duration_ns"] = 77, 9, S
    (one,) = [one for one in list_operations(replace(both, aggregates=counted)) if one.pid == 77]
    first, last = once.window_ns
    assert one.wall_pct == pytest.approx(100 * S / (2 * (last - first) + MS), rel=0.001)


def test_graphs_are_launched_as_often_a_second_in_two_runs_as_in_one():
    once = run_of(FAULTS["graph_unused"]().build())
    rate = summarise_graphs(once).launch_rate_per_sec
    twice = summarise_graphs(append(once, shift(once, HOUR)))
    assert twice.launch_rate_per_sec == pytest.approx(rate, rel=0.01)


def test_a_graph_is_not_unused_because_nobody_watched_when_it_was_launched():
    once = run_of(FAULTS["graph_recaptured"]().build())
    made = once.events[-1:].copy()
    made["source"], made["op"] = Source.CUDA_GRAPH, GraphOp.INSTANTIATE
    made["arg0"], made["start_ns"] = 0x7000, once.window_ns[1] - MS
    first = replace(once, events=np.concatenate((once.events, made)))
    found = explain(append(first, shift(once, HOUR))).incidents
    assert "graph_unused" not in {one.rule for one in found}


def test_a_pid_is_watched_only_while_it_is_somebodys():
    once = run_of(DEMOS["memcpy-bottleneck"]().build())
    (process,) = Evidence(once).gpu_processes
    end = once.events[-1:].copy()
    end["source"], end["op"], end["duration_ns"] = Source.HOST, HostOp.EXIT, 0
    end["start_ns"] = once.window_ns[1]
    events = np.concatenate((once.events, end, shift(once, HOUR).events))
    (of_two,) = Evidence(replace(once, events=events)).gpu_processes
    assert of_two.watched_ns == 2 * process.watched_ns


def test_runs_without_a_stop_last_to_the_last_row_before_the_next():
    once = run_of(other_program(), stop_ns=0)
    first, last = once.window_ns
    both = append(once, shift(once, HOUR))
    (process,) = Evidence(both).processes
    assert process.unwatched.starts.tolist() == [last]
    assert process.unwatched.ends.tolist() == [first + HOUR - MS]
    assert process.watched_within(last - 5, first + HOUR - MS + 7) == 12
    again = replace(both, sessions=(Session("another", first), *once.sessions))
    assert not len(Evidence(again).processes[0].unwatched)


def test_a_set_without_another_one():
    def of(*pairs):
        times = np.array(pairs, np.int64).reshape(-1, 2)
        return Intervals.of(times[:, 0], times[:, 1])

    left = of((0, 10), (20, 30), (40, 50)).without(of((5, 7), (25, 45)))
    assert (left.starts.tolist(), left.ends.tolist()) == ([0, 7, 20, 45], [5, 10, 25, 50])
    assert len(of((0, 10)).without(of((0, 10)))) == 0
    assert of((0, 10)).without(of()).total_ns == 10
