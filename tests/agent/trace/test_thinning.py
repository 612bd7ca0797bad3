"""Rows of sampled kinds are thinned so that no call is forgotten: weights add up, and what judges keeps every row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.trace.recorder import Recorder
from ingero.agent.trace.selection import EVERYTHING_NS
from ingero.agent.trace.thinning import MAX_PER_KIND, is_kept_whole, thin
from ingero.config.invoker import find_invoker
from ingero.model.events import EVENT, CudaOp, EventFlag, HostOp, NcclOp, NetOp, Source
from ingero.model.sampling import NEVER_SAMPLED
from ingero.recording.store.reader import load_recording
from ingero.testing.clock import ManualClock

KINDS = (
    (Source.CUDA, CudaOp.LAUNCH_KERNEL), (Source.CUDA, CudaOp.MALLOC), (Source.CUDA, CudaOp.MEMCPY_ASYNC),
    (Source.NCCL, NcclOp.ALL_REDUCE), (Source.NET, NetOp.SEND), (Source.HOST, HostOp.SCHED_SWITCH),
)  # fmt: skip
events_of = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(1, 3),
        st.integers(1, 1000),
        st.sampled_from([0, 0, 0, int(EventFlag.EXEMPLAR), int(EventFlag.NESTED), int(EventFlag.IN_FLIGHT)]),
    ),
    max_size=60,
)  # fmt: skip


def build(rows):
    events = np.zeros(len(rows), EVENT)
    for i, ((source, op), pid, weight, flags) in enumerate(rows):
        events[i]["source"], events[i]["op"], events[i]["pid"] = source, op, pid
        events[i]["weight"], events[i]["flags"], events[i]["start_ns"] = weight, flags, i
    return events


def key_of(event):
    return int(event["pid"]), int(event["source"]), int(event["op"])


def thin_slowly(events, max_rows):
    """Part j of n ordinary rows in m parts are those whose number times m lies in it.

    Its last row stays for all of it.
    """
    numbers, totals = {}, {}
    is_whole = [
        key_of(e)[1:] in NEVER_SAMPLED or int(e["flags"]) & (EventFlag.EXEMPLAR | EventFlag.IN_FLIGHT)
        for e in events
    ]  # fmt: skip
    for event, whole in zip(events, is_whole, strict=True):
        if not whole:
            totals[key_of(event)] = totals.get(key_of(event), 0) + 1
    kept, pending = [], {}
    for event, whole in zip(events, is_whole, strict=True):
        if whole:
            kept.append((int(event["start_ns"]), int(event["weight"])))
            continue
        key = key_of(event)
        number, total = numbers.get(key, 0), totals[key]
        numbers[key] = number + 1
        pending[key] = pending.get(key, 0) + int(event["weight"])
        parts = min(total, max_rows)
        if number + 1 == total or (number + 1) * parts // total != number * parts // total:
            kept.append((int(event["start_ns"]), pending.pop(key)))
    return kept


@given(events_of, st.integers(1, 5))
def test_thinning_does_what_a_loop_would_and_forgets_no_call(rows, max_rows):
    events = build(rows)
    before = events.copy()
    kept = thin(events, max_rows)
    assert [(int(e["start_ns"]), int(e["weight"])) for e in kept] == thin_slowly(events, max_rows)
    assert (events == before).all()
    for key in {key_of(event) for event in events}:
        weights = [
            sum(int(e["weight"]) for e in rows if key_of(e) == key) for rows in (events, kept)
        ]
        assert weights[0] == weights[1], key
    whole = events[is_kept_whole(events)]
    assert set(whole["start_ns"].tolist()) <= set(kept["start_ns"].tolist())
    assert len(kept) - len(whole) <= max_rows * len({key_of(event) for event in events})


def test_after_ten_seconds_a_recording_has_every_allocation_and_each_second_a_few_launches(
    tmp_path,
):
    clock = ManualClock()
    recorder = Recorder(tmp_path / "r.db", "n", clock, invoker=find_invoker())
    clock.advance(EVERYTHING_NS)
    rows = [(KINDS[i % 2], 7, 1 + 99 * (i % 2 == 0), 0) for i in range(400)]
    recorder.on_events("calls", np.zeros(400, [("flags", "u1")]), build(rows))
    recorder.close()
    events = load_recording(tmp_path / "r.db").events
    launches = events[events["op"] == CudaOp.LAUNCH_KERNEL]
    assert len(launches) == MAX_PER_KIND
    assert launches["weight"].sum() == 200 * 100
    assert (events["op"] == CudaOp.MALLOC).sum() == 200
