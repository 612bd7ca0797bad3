"""Statistics come from every call where the recording counted them, and say so where they do not."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.degrade import degrade, sample

from ingero.model.events import CudaOp, EventFlag, GpuOp, NcclOp, Source
from ingero.model.latency import build_bucket_edges_ns
from ingero.recording.causal.engine import explain
from ingero.recording.causal.exact import Basis, compute_statistics
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import LAUNCH, SYNC, Loop, LoopStep

MS = 1_000_000
MINUTE = 60_000 * MS
QUERY, ALL_REDUCE = (Source.CUDA, CudaOp.EVENT_QUERY), (Source.NCCL, NcclOp.ALL_REDUCE)


def launches(durations, every_ns=10_000):
    built = RecordingBuilder()
    for i, duration_ns in enumerate(durations):
        built.call(LAUNCH, i * every_ns, duration_ns, 7, arg0=1)
    return built.build()


@given(st.lists(st.integers(1, 2**33), min_size=40, max_size=200))
def test_sampled_rows_do_not_change_what_was_counted(durations):
    exact = launches(durations)
    (one,) = compute_statistics(degrade(exact, lambda events: sample(events, 100)))
    assert (one.basis, one.count, one.total_ns) == (Basis.COUNTED, len(durations), sum(durations))
    assert one.max_ns == max(durations)
    assert one.rows < one.count or len(durations) <= 140
    edges = build_bucket_edges_ns()
    for share, value in zip((0.5, 0.95, 0.99), one.quantiles, strict=True):
        true = sorted(durations)[int(np.ceil(share * len(durations))) - 1]
        at = int(np.searchsorted(edges, true, "right")) - 1
        assert edges[at] <= value <= edges[at + 1]


def test_a_window_that_cuts_a_minute_says_what_is_exact():
    recording = degrade(
        launches([1000] * 600, every_ns=MINUTE // 200), lambda events: sample(events, 10)
    )
    first = START_NS + MINUTE // 2
    events = recording.events[recording.events["start_ns"] >= first]
    (one,) = compute_statistics(replace(recording, events=events, asked_ns=(first, 0)))
    assert one.basis is Basis.ESTIMATE
    assert one.exact == 400  # of the two whole minutes
    assert one.count == pytest.approx(500, abs=15)


def test_a_window_in_which_every_call_has_a_row_needs_no_counts():
    recording = degrade(launches([1000] * 600, every_ns=MINUTE // 200), lambda events: events)
    first = START_NS + MINUTE // 2
    events = recording.events[recording.events["start_ns"] >= first]
    (one,) = compute_statistics(replace(recording, events=events, asked_ns=(first, 0)))
    assert (one.basis, one.count, one.row_share) == (Basis.ROWS, 500, 1.0)


@pytest.mark.parametrize("n_late", [14, 200])
def test_calls_that_are_counted_a_minute_after_their_rows_are_counted_once(n_late):
    recording = degrade(launches([1000] * 400, every_ns=MINUTE // 200), lambda events: events)
    aggregates = recording.aggregates.copy()
    aggregates["count"] += [-n_late, n_late]
    (one,) = compute_statistics(replace(recording, aggregates=aggregates))
    assert (one.basis, one.count, one.rows) == (Basis.COUNTED, 400, 400)


def test_a_window_that_cuts_a_minute_has_the_errors_of_both_parts():
    built = RecordingBuilder()
    for i in range(600):
        built.call(LAUNCH, i * MINUTE // 200, 1000, 7, ret_code=2 if i % 4 == 0 else 0)
    recording = degrade(built.build(), lambda events: sample(events, 10))
    first = START_NS + MINUTE // 2
    events = recording.events[recording.events["start_ns"] >= first]
    (one,) = compute_statistics(replace(recording, events=events, asked_ns=(first, 0)))
    assert one.exact == 400
    assert one.errors == 500 // 4


def test_rows_stand_for_as_many_errors_as_calls_and_a_query_that_is_not_ready_is_none():
    built = RecordingBuilder()
    built.call(QUERY, 0, 1000, 7, ret_code=600, weight=50)
    built.call(QUERY, MS, 1000, 7, ret_code=709, weight=3)
    built.call(ALL_REDUCE, 2 * MS, 1000, 7, ret_code=7, weight=2)
    built.call(LAUNCH, 3 * MS, 1000, 7, ret_code=600)
    errors = {(one.source, one.op): one.errors for one in compute_statistics(built.build())}
    assert errors == {QUERY: 3, ALL_REDUCE: 0, LAUNCH: 1}


def test_a_recording_that_counts_nothing_says_that_it_does_not_know():
    recording = replace(launches([1000] * 50), coverage=launches([1]).coverage[:0])
    (one,) = compute_statistics(recording)
    assert (one.basis, one.count) == (Basis.UNKNOWN, 50)


def test_a_call_in_flight_is_in_no_number():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(20)
    loop.call(SYNC, 60_000 * MS, flags=EventFlag.IN_FLIGHT)
    sync = next(one for one in compute_statistics(built.build()) if (one.source, one.op) == SYNC)
    assert (sync.count, sync.in_flight) == (20, 1)
    assert sync.max_ns < 20 * MS


def test_a_hang_is_unknown_when_collectives_have_no_row():
    from tests.recording.scenarios.ranks import collective_hang

    def lose(events):
        return events[(events["source"] != Source.NCCL) | (events["arg2"] % 7 != 3)]

    told = explain(degrade(collective_hang().build(), lose))
    assert [i for i in told.incidents if i.rule == "collective_hang"] == []
    (first, *_) = [one for one in told.unknown if "collective_hang" in one.rules]
    assert re.search(r"ncclAllReduce: 3\d of 4\d calls have a row", first.missing)


def test_a_rank_inside_the_collective_has_entered_it():
    from tests.recording.scenarios.ranks import collective_hang

    recording = collective_hang().build()
    events = recording.events.copy()
    is_last = (events["source"] == Source.NCCL) & (events["arg2"] == 40)
    events["flags"][is_last] = EventFlag.IN_FLIGHT
    events["duration_ns"][is_last] = 39_000 * MS
    told = explain(replace(recording, events=events))
    hang = next(i for i in told.incidents if i.rule == "collective_hang")
    assert (hang.pid, hang.severity) == (6002, "HIGH")
    assert "ranks 0, 1, 3 had not returned from it" in " ".join(hang.causes[0].evidence)


def test_a_call_in_flight_is_told_with_its_place_in_the_program():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(60)
    loop.call(SYNC, 30_000 * MS, flags=EventFlag.IN_FLIGHT, stack_hash=9)
    frames = '[{"s":"cudaStreamSynchronize"},{"pf":"/job/train.py","pfn":"forward","pl":142}]'
    told = explain(replace(built.build(), stacks={9: frames}))
    (incident,) = told.incidents
    assert incident.rule == "call_in_flight"
    assert "has not returned for 30 s, called in forward() at train.py:142" in incident.title
    assert incident.places == ("forward() at train.py:142",)


def growing(n_minutes, freed_share, pool_minutes=0, calls=(CudaOp.MALLOC, CudaOp.FREE)):
    """A service that allocates all the time, whose allocations are counted and mostly have no row."""
    built = RecordingBuilder()
    for i in range(n_minutes * 200):
        at = i * MINUTE // 200
        if pool_minutes and at >= pool_minutes * MINUTE:
            built.call(SYNC, at, MS, 7)
            continue
        pointer = 0x7E00_0000_0000 + (i << 24)
        built.call((Source.CUDA, calls[0]), at, 1000, 7, arg0=1 << 20, arg1=pointer)
        if (i % 10) < 10 * freed_share:
            built.call((Source.CUDA, calls[1]), at + 5000, 1000, 7, arg0=pointer, arg1=1 << 20)
    exact = degrade(built.build(), lambda events: sample(events, 50))
    aggregates = exact.aggregates.copy()
    is_memory = np.isin(aggregates["op"], calls)
    aggregates["sum_arg0"] = np.where(is_memory, aggregates["count"] << 20, 0)
    return replace(exact, aggregates=aggregates)


def test_growth_is_told_from_counted_bytes_without_rows():
    told = explain(growing(8, 0.7))
    (leak,) = [i for i in told.incidents if i.rule == "memory_leak"]
    assert leak.severity == "HIGH"
    assert "took 480 MiB more than it gave back in 8 minutes" in leak.title


def test_counted_bytes_of_pinned_host_memory_are_not_the_devices():
    told = explain(growing(8, 0.7, calls=(CudaOp.HOST_ALLOC, CudaOp.FREE_HOST)))
    (leak,) = [i for i in told.incidents if i.rule.endswith("memory_leak")]
    assert leak.rule == "pinned_memory_leak"
    assert "Pinned host memory grows: " in leak.title
    assert "took 480 MiB more than it gave back in 8 minutes" in leak.title


@pytest.mark.parametrize(("freed", "pool"), [(1.0, 0), (0.0, 2)])
def test_balanced_memory_and_a_pool_that_stays_are_no_leak(freed, pool):
    told = explain(growing(8, freed, pool))
    assert [i for i in told.incidents if i.rule == "memory_leak"] == []


def test_steps_that_turn_slow_are_dated_and_both_times_given():
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(300, LoopStep(n_launches=4, copy_ns=0, sync_ns=2 * MS))
    for _ in range(300):
        loop.sleep(20 * MS)
        loop.step(LoopStep(n_launches=4, copy_ns=0, sync_ns=2 * MS))
    (incident,) = explain(built.build()).incidents
    assert incident.rule == "step_time_changed"
    assert incident.n_cases == 300
    assert incident.causes[0].name == "the host thread sleeps between its calls"
    assert "22.1 ms instead of 2.14 ms" in incident.title


@pytest.mark.parametrize("node", [0, 1])
def test_steps_that_turn_slow_are_explained_by_their_own_node_alone(node):
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(300, LoopStep(n_launches=4, copy_ns=0, sync_ns=2 * MS))
    start_ns = loop.at_ns
    loop.steps(300, LoopStep(n_launches=4, copy_ns=0, sync_ns=20 * MS))
    built.call(
        (Source.GPU, GpuOp.THROTTLE_POWER), start_ns, loop.at_ns - start_ns, 0, node=node
    )  # fmt: skip
    told = explain(replace(built.build(), nodes=("a", "b"))).incidents
    assert ("gpu_throttling", "ab"[node]) in [(i.rule, i.node) for i in told]
    changed = [(i.rule, i.node) for i in told if i.rule == "step_time_changed"]
    assert changed == ([("step_time_changed", "a")] if node else [])


def test_noise_alone_changes_no_step_time():
    random = np.random.default_rng(11)
    n_alarms = 0
    for _ in range(300):
        built = RecordingBuilder()
        ends = np.cumsum(random.lognormal(np.log(8 * MS), 0.5, 400).astype(np.int64))
        for end in ends.tolist():
            built.call(SYNC, end - MS, MS, 7)
        told = explain(built.build())
        n_alarms += sum(i.rule == "step_time_changed" for i in told.incidents)
    assert n_alarms == 0


def test_the_group_of_page_allocations_hides_no_other_group():
    recording = degrade(launches([1000] * 400), lambda events: sample(events, 10))
    (group,) = explain(recording).groups
    assert group.name == "GPU calls"
    assert group.stored < group.seen == 400
