"""The page's views against slow, obvious counts."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recording.scenarios.faults import FAULTS
from tests.support.degrade import degrade

from ingero.errors import BadDataError
from ingero.model.events import CudaOp, EventFlag, NcclOp, OffCpuReason, Source
from ingero.model.recording import Unprobed
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.rules.groups import find_groups
from ingero.recording.queries.catalog import QUERIES
from ingero.recording.queries.collectives import list_collectives
from ingero.recording.queries.flame import build_flame
from ingero.recording.queries.graphs import summarise_graphs
from ingero.recording.queries.memory import balance_memory
from ingero.recording.queries.recording_file import RecordingFile
from ingero.recording.queries.stacks import FoldedStack, FoldedStacks
from ingero.recording.queries.timeline import CATEGORIES, View, build_timeline
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.store.writer import RecordingWriter
from ingero.serving.query import get_query

PID = 7
LAUNCH, COPY = (Source.CUDA, CudaOp.LAUNCH_KERNEL), (Source.CUDA, CudaOp.MEMCPY)
MALLOC, FREE = (Source.CUDA, CudaOp.MALLOC), (Source.CUDA, CudaOp.FREE)
few = settings(max_examples=30, deadline=None)


def evidence_of(built):
    return Evidence(built.build())


spans = st.lists(
    st.tuples(st.sampled_from([LAUNCH, COPY]), st.integers(0, 90), st.integers(1, 40)),
    min_size=1,
    max_size=12,
)


@few
@given(spans, st.integers(1, 9))
def test_shares_are_the_covered_part_of_each_bin(calls, n_bins):
    built = RecordingBuilder()
    for op, at_ns, duration_ns in calls:
        built.call(op, at_ns, duration_ns, PID)
    answer = build_timeline(evidence_of(built), View(bins=n_bins))
    first = min(at for _, at, _ in calls)
    last = max(at + duration for _, at, duration in calls)
    edges = np.linspace(first, last, n_bins + 1).astype(int)
    (track,) = answer.tracks
    for category, shares in track.shares:
        op = {"launch": LAUNCH, "copy": COPY}[CATEGORIES[category]]
        busy = {ns for o, at, d in calls if o == op for ns in range(at, at + d)}
        for share, begin, end in zip(shares, edges, edges[1:], strict=False):
            covered = len(busy & set(range(begin, end)))
            assert share == -(-100 * covered // max(end - begin, 1))


def test_waits_and_calls_of_a_thread_are_tracks_of_their_own_and_reasons_are_told_apart():
    built = RecordingBuilder().name(PID, "train")
    built.call(LAUNCH, 0, 100, PID)
    built.off_cpu(10, 20, PID, OffCpuReason.PREEMPTED)
    built.off_cpu(40, 50, PID, OffCpuReason.BLOCKED_IO)
    answer = build_timeline(evidence_of(built), View(bins=1))
    assert [(t.what, t.busy_pct) for t in answer.tracks] == [("calls", 100.0), ("waits", 70.0)]
    waits = {CATEGORIES[category]: shares for category, shares in answer.tracks[1].shares}
    assert waits == {"preempted": [20], "disk wait": [50]}


def test_few_rows_are_drawn_one_by_one_with_their_nesting():
    built = RecordingBuilder()
    built.call(MALLOC, 1000, 500, PID)
    built.call((Source.DRIVER, 5), 1100, 300, PID)
    (track,) = build_timeline(evidence_of(built), View()).tracks
    drawn = [(track.ops[s.op], s.start_s, s.duration_us, s.depth) for s in track.slices]
    assert drawn == [("cudaMalloc", 0.0, 0.5, 0), ("cuMemAlloc", 1e-7, 0.3, 1)]


def test_view_holds_only_what_touches_it_and_a_view_behind_the_end_is_refused():
    built = RecordingBuilder()
    for second in range(4):
        built.call(LAUNCH, second * 10**9, 1000, PID)
    evidence = evidence_of(built)
    answer = build_timeline(evidence, View(from_s=0.5, to_s=2.5, bins=2))
    assert answer.tracks[0].rows == 2
    with pytest.raises(BadDataError, match="behind"):
        build_timeline(evidence, View(from_s=99))
    with pytest.raises(BadDataError, match="bins"):
        build_timeline(evidence, View(bins=5000))


@pytest.mark.parametrize(("from_s", "to_s"), [(2.5, 0.5), (1.0, 0.0), (-5.0, -3.0), (0.0, -1e-9)])
def test_a_view_that_ends_before_it_starts_is_refused(from_s, to_s):
    built = RecordingBuilder()
    for second in range(4):
        built.call(LAUNCH, second * 10**9, 1000, PID)
    with pytest.raises(BadDataError, match="to_s: the view ends before"):
        build_timeline(evidence_of(built), View(from_s=from_s, to_s=to_s))


def test_a_view_of_one_moment_is_a_nanosecond_long_and_one_that_begins_early_begins_with_the_first_event():
    built = RecordingBuilder()
    for second in range(4):
        built.call(LAUNCH, second * 10**9, 1000, PID)
    moment = build_timeline(evidence_of(built), View(from_s=2.0, to_s=2.0))
    early = build_timeline(evidence_of(built), View(from_s=-1.0, to_s=2.0))
    assert (moment.from_s, moment.to_s) == (2.0, 2.000000001)
    assert (early.from_s, early.to_s) == (0.0, 2.0)


steps = st.lists(
    st.tuples(st.sampled_from(["alloc", "free", "fail"]), st.integers(1, 4), st.integers(1, 99)),
    min_size=1,
    max_size=30,
)


@few
@given(steps)
def test_memory_balance_is_that_of_a_ledger(calls):
    built = RecordingBuilder()
    ledger, peak, unmatched, failed = {}, 0, 0, 0
    for i, (what, pointer, size) in enumerate(calls):
        if what == "free":
            built.call(FREE, i * 10, 5, PID, arg0=pointer)
            unmatched += pointer not in ledger
            ledger.pop(pointer, None)
        elif what == "fail" or pointer in ledger:  # a pointer that is held is not given out again
            built.call(MALLOC, i * 10, 5, PID, arg0=size, ret_code=2)
            failed += 1
        else:
            built.call(MALLOC, i * 10, 5, PID, arg0=size, arg1=pointer)
            ledger[pointer] = size
        peak = max(peak, sum(ledger.values()))
    (found,) = balance_memory(evidence_of(built)).processes
    assert found.held_bytes == sum(ledger.values())
    assert (found.peak_bytes, found.frees_unmatched, found.failed) == (peak, unmatched, failed)
    assert sum(size.bytes * size.count for size in found.held[:5]) <= found.held_bytes
    if found.series:
        assert max(value for _, value in found.series) == peak
        assert found.series[-1][1] == found.held_bytes


def test_leak_shows_as_a_rising_balance_and_uncounted_calls_are_not_called_exact():
    recording = FAULTS["memory_leak"]().build()
    (leak,) = balance_memory(Evidence(recording)).processes
    assert leak.is_exact
    assert (leak.held_bytes, leak.held[0].count) == (120 * (8 << 20), 120)
    values = [value for _, value in leak.series]
    assert values[0] < values[len(values) // 2] < values[-1]
    uncounted = replace(recording, coverage=recording.coverage[:0])
    assert not balance_memory(Evidence(uncounted)).processes[0].is_exact


def test_rank_that_comes_last_is_counted_in_every_collective():
    (found,) = list_collectives(evidence_of(FAULTS["late_rank"]())).collectives
    assert (found.op, found.operations, found.compared, found.ranks_of) == (
        "ncclAllReduce",
        60,
        60,
        4,
    )
    assert {one.rank: one.came_last for one in found.ranks} == {0: 0, 1: 0, 2: 60, 3: 0}
    assert found.is_blocking
    assert 7_500 < found.wait_p50_us < 8_500


def test_calls_that_only_enqueue_are_not_said_to_tell_who_was_late():
    built = RecordingBuilder()
    for rank in range(2):
        built.call(
            (Source.NCCL, NcclOp.ALL_REDUCE), rank * 5_000_000, 20_000 - rank, 10 + rank,
            arg1=5, arg3=rank << 32 | 2,
        )  # fmt: skip
    (found,) = list_collectives(evidence_of(built)).collectives
    assert not found.is_blocking
    assert found.wait_p50_us is None


@few
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 50)),
        min_size=1, max_size=20, unique_by=lambda call: call[:2],
    )
)  # fmt: skip
def test_last_arrivals_are_those_of_a_loop(calls):
    built = RecordingBuilder()
    for rank, seq, duration in calls:
        built.call(
            (Source.NCCL, NcclOp.ALL_REDUCE), seq * 1000, duration, 10 + rank,
            arg1=5, arg2=seq, arg3=rank << 32 | 4,
        )  # fmt: skip
    (found,) = list_collectives(evidence_of(built)).collectives
    n_shared = 0
    possible = dict.fromkeys(range(4), 0)
    for seq in {seq for _, seq, _ in calls}:
        inside = {rank: duration for rank, s, duration in calls if s == seq}
        n_shared += len(inside) > 1
        for rank, duration in inside.items():
            possible[rank] += len(inside) > 1 and duration == min(inside.values())
    assert found.compared == n_shared == sum(one.came_last for one in found.ranks)
    assert all(one.came_last <= possible[one.rank] for one in found.ranks)


def test_lost_collectives_are_told_and_accuse_nobody_who_only_has_a_row():
    whole = FAULTS["late_rank"]().build()
    events = whole.events
    is_lost = (
        (events["source"] == Source.NCCL) & (events["pid"] == 6002) & (events["arg2"] % 2 == 0)
    )
    lossy = degrade(whole, lambda every: every[~is_lost])
    (found,) = list_collectives(Evidence(lossy)).collectives
    late = next(one for one in found.ranks if one.rank == 2)
    assert {one.rank: one.came_last for one in found.ranks if one.rank != 2} == {0: 0, 1: 0, 3: 0}
    assert found.compared == late.came_last == late.count < found.operations
    assert found.row_share == late.row_share == round(late.count / found.operations, 4)
    uncounted = replace(lossy, aggregates=lossy.aggregates[:0], coverage=lossy.coverage[:0])
    assert list_collectives(Evidence(uncounted)).collectives[0].row_share is None


def test_a_track_says_which_share_of_the_calls_it_is_drawn_from():
    whole = FAULTS["late_rank"]().build()
    lossy = degrade(whole, lambda every: every[(every["pid"] != 6002) | (every["arg2"] % 2 == 0)])
    shares = {
        track.pid: track.row_share
        for track in build_timeline(Evidence(lossy), View()).tracks
        if track.what == "calls"
    }
    assert shares.pop(6002) < 1
    assert set(shares.values()) == {1}
    uncounted = replace(lossy, aggregates=lossy.aggregates[:0], coverage=lossy.coverage[:0])
    tracks = build_timeline(Evidence(uncounted), View()).tracks
    assert {track.row_share for track in tracks} == {None}


def test_collective_that_had_not_returned_is_in_no_number():
    whole = FAULTS["late_rank"]().build()
    last = np.flatnonzero((whole.events["source"] == Source.NCCL) & (whole.events["pid"] == 6001))
    whole.events["flags"][last[-1]] |= EventFlag.IN_FLIGHT
    whole.events["duration_ns"][last[-1]] = 10**12
    (found,) = list_collectives(Evidence(whole)).collectives
    assert max(one.max_us for one in found.ranks) < 10**6
    assert sum(one.came_last for one in found.ranks if one.rank != 2) == 0


def test_memory_of_a_recording_that_lost_every_free_is_not_called_a_balance():
    built = RecordingBuilder()
    for i in range(50):
        built.call(MALLOC, i * 1000, 50, PID, arg0=8, arg1=i + 1)
        built.call(FREE, i * 1000 + 100, 50, PID, arg0=i + 1)
    whole = built.build()
    lossy = degrade(whole, lambda every: every[every["op"] != CudaOp.FREE])
    (found,) = balance_memory(Evidence(lossy)).processes
    assert (found.is_exact, found.row_share) == (False, 0.5)
    assert balance_memory(Evidence(degrade(whole, lambda e: e))).processes[0].row_share == 1


def test_graph_calls_are_counted_although_some_have_no_row():
    whole = FAULTS["graph_recaptured"]().build()
    every = summarise_graphs(degrade(whole, lambda events: events))
    lossy = degrade(whole, lambda events: events[::2])
    few_rows = summarise_graphs(lossy)
    assert every.row_share == 1
    assert 0 < few_rows.row_share < 1
    counts = ("captures", "instantiations", "launches", "total_events", "avg_instantiate_dur_us")
    assert [getattr(few_rows, name) for name in counts] == [getattr(every, name) for name in counts]
    uncounted = replace(lossy, aggregates=lossy.aggregates[:0], coverage=lossy.coverage[:0])
    assert summarise_graphs(uncounted).row_share is None


def test_no_graph_is_called_never_launched_where_launches_have_no_row(tmp_path):
    built = FAULTS["graph_unused"]()
    path = tmp_path / "g.db"
    built.write(path)
    ask = get_query(QUERIES, "graph_frequency").ask
    pid = int(built.events()["pid"][0])
    whole = json.loads(ask(RecordingFile(path), {"pid": pid}))
    assert "never-launched" in {one["kind"] for one in whole["graphs"]}
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "UPDATE event_aggregates SET count = stored + 5 WHERE source = ?", (Source.CUDA_GRAPH,)
        )
    lossy = json.loads(ask(RecordingFile(path), {"pid": pid}))
    assert {one["kind"] for one in lossy["graphs"]} == {"unknown"}


@pytest.mark.parametrize("tool", ["get_causal_chains", "investigate"])
def test_an_assistant_is_told_what_the_recording_lacks(tmp_path, tool):
    path = tmp_path / "r.db"
    FAULTS["late_rank"]().write(path)
    ask = get_query(QUERIES, tool).ask
    assert "missing" not in json.loads(ask(RecordingFile(path)))
    with RecordingWriter(path, "node-0") as writer:
        writer.put_unprobed([Unprobed(6001, "/lib/libnccl.so.2", "gone")], [], START_NS)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "INSERT INTO unwritten (bucket, node, source, op, cause, count) VALUES (0, 'node-0', 1, 3, 'disk full', 12)"
        )
    assert json.loads(ask(RecordingFile(path)))["missing"] == [
        "incomplete: 12 rows were not stored: disk full",
        "not probed, calls are missing: /lib/libnccl.so.2 of pid 6001 (gone)",
    ]


def test_flame_joins_stacks_at_their_shared_callers():
    stacks = [
        FoldedStack(("main", "a", "cudaMalloc"), 2, 20, 3_000),
        FoldedStack(("main", "b", "cudaMalloc"), 1, 1, 1_000),
    ]
    answer = build_flame(FoldedStacks(stacks, None))
    (main,) = answer.root.children
    assert (answer.root.total_us, answer.root.calls, answer.rows) == (4.0, 21, 3)
    assert [(c.name, c.total_us, c.calls) for c in main.children] == [("a", 3.0, 20), ("b", 1.0, 1)]


def test_flame_stays_small_and_says_what_it_left_out():
    stacks = [FoldedStack((f"f{i}", "op"), 1, 1, 10_000 - i) for i in range(5000)]
    answer = build_flame(FoldedStacks(stacks, None))
    assert len(answer.root.children) == 1500
    assert answer.left_out == 3500


def test_what_a_collective_calls_inside_is_no_second_one():
    whole = FAULTS["late_rank"]().build()
    (before,) = list_collectives(Evidence(whole)).collectives
    inner = whole.events[whole.events["source"] == Source.NCCL].copy()
    inner["flags"] |= np.uint8(EventFlag.NESTED)
    inner["duration_ns"] //= 2
    twice = replace(whole, events=np.concatenate([inner, whole.events]))
    (found,) = list_collectives(Evidence(twice)).collectives
    assert found.ranks == before.ranks
    assert found.compared == before.compared
    assert [(group.ranks, group.inside_ns.tolist()) for group in find_groups(Evidence(twice))] == [
        (group.ranks, group.inside_ns.tolist()) for group in find_groups(Evidence(whole))
    ]
