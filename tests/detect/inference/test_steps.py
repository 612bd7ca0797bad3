"""Steps of servers out of their calls."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingero.detect.inference.steps import MAX_RESULT_BYTES, StepFinder, build_calls
from ingero.model.events import EVENT, CopyKind, CudaOp, EventFlag, GraphOp, NcclOp, Source

IN, OUT = CopyKind.HOST_TO_DEVICE, CopyKind.DEVICE_TO_HOST
LAUNCH, COPY, BLOCKING, STREAM_SYNC, DEVICE_SYNC, EVENT_SYNC, RECORD = (
    (Source.CUDA, op)
    for op in (CudaOp.LAUNCH_KERNEL, CudaOp.MEMCPY_ASYNC, CudaOp.MEMCPY, CudaOp.STREAM_SYNC,
               CudaOp.DEVICE_SYNC, CudaOp.EVENT_SYNC, CudaOp.EVENT_RECORD)
)  # fmt: skip
GRAPH, ALL_REDUCE = (Source.CUDA_GRAPH, GraphOp.LAUNCH), (Source.NCCL, NcclOp.ALL_REDUCE)
S1, S2, S3 = 0x51, 0x52, -0x53  # a handle above 2^63 is stored as a negative number


def launch(stream, blocks=4, **more):
    return LAUNCH, {"arg1": stream, "arg2": blocks, **more}


def copy(stream, kind, n_bytes, op=COPY):
    return op, {"arg0": n_bytes, "arg1": kind, "arg2": stream}


def wait(stream, **more):
    return STREAM_SYNC, {"arg0": stream, "arg1": stream, **more}


def events_of(*calls, at_ns=1000, gap_ns=10, duration_ns=5):
    """Rows one after another; each call is an operation and fields of EVENT."""
    rows = np.zeros(len(calls), EVENT)
    rows["weight"], rows["duration_ns"] = 1, duration_ns
    rows["pid"] = rows["tid"] = 7
    rows["start_ns"] = at_ns + gap_ns * np.arange(len(calls))
    for row, ((source, op), fields) in zip(rows, calls, strict=True):
        row["source"], row["op"] = source, op
        for name, value in fields.items():
            row[name] = value
    return rows


def steps_of(*calls):
    return StepFinder().take(build_calls(events_of(*calls)))


def test_a_step_runs_from_the_first_call_to_the_return_of_the_wait_for_its_result():
    token = (copy(S1, IN, 8), launch(S1), launch(S1, 8), copy(S1, OUT, 4), wait(S1))
    steps = steps_of(*token, *token)
    assert steps["start_ns"].tolist() == [1000, 1050]
    assert steps["end_ns"].tolist() == [1045, 1095]
    assert steps["n_launches"].tolist() == [2, 2]
    assert steps["blocks"].tolist() == [6.0, 6.0]
    assert steps["input_bytes"].tolist() == [8, 8]
    assert steps["output_bytes"].tolist() == [4, 4]


def test_waits_before_the_result_are_inside_the_step():
    """A pageable copy in, or a look at an intermediate value, waits without bringing a token."""
    steps = steps_of(
        copy(S1, IN, 8), wait(S1), launch(S1), wait(S1), launch(S1), copy(S1, OUT, 4), wait(S1)
    )
    assert (len(steps), steps["n_launches"][0]) == (1, 2)


def test_without_any_result_every_wait_after_a_launch_ends_a_step():
    steps = steps_of(launch(S1), wait(S1), wait(S1), launch(S1), launch(S1), wait(S1))
    assert steps["n_launches"].tolist() == [1, 2]
    swap = copy(S1, OUT, MAX_RESULT_BYTES + 1)
    assert len(steps_of(launch(S1), swap, wait(S1), swap, wait(S1))) == 1


def test_a_blocking_copy_back_is_the_result_and_the_wait():
    steps = steps_of(
        launch(0), copy(0, OUT, 4096, BLOCKING), launch(0), copy(0, OUT, 4096, BLOCKING)
    )
    assert steps["end_ns"].tolist() == [1015, 1035]
    assert steps["output_bytes"].tolist() == [4096, 4096]


def test_a_result_on_a_stream_of_its_own_belongs_to_the_stream_its_thread_launched_on():
    """As engines do that copy on one stream while the next step runs on another, and wait for an event."""
    event = {"arg0": 0xE1, "arg1": S2}
    step = (launch(S1), copy(S2, OUT, 4), (RECORD, event), (EVENT_SYNC, {"arg0": 0xE1}))
    steps = steps_of(launch(S3), *step, *step)
    assert steps["stream"].tolist() == [S1, S1]
    assert steps["n_launches"].tolist() == [1, 1]


def test_a_thread_that_only_waits_waits_for_the_busiest_stream_of_its_process():
    step = (launch(S1), launch(S1), copy(S2, OUT, 4), wait(S2, tid=8))
    steps = steps_of(launch(S3, tid=9), *step, *step)
    assert steps["stream"].tolist() == [S1, S1]
    assert steps["tid"].tolist() == [8, 8]


def test_a_wait_for_the_device_and_a_collective_belong_to_their_threads_stream():
    steps = steps_of(launch(S1), (ALL_REDUCE, {"arg0": 4096}), copy(S1, OUT, 4), (DEVICE_SYNC, {}))
    assert steps[["stream", "n_collectives"]].tolist() == [(S1, 1)]


def test_graphs_are_counted_apart_from_launches():
    steps = steps_of((GRAPH, {"arg0": 9, "arg1": S1}), launch(S1), copy(S1, OUT, 4), wait(S1))
    assert steps[["n_graphs", "n_launches"]].tolist() == [(1, 1)]


def test_processes_and_streams_do_not_share_steps():
    other = {"pid": 8, "tid": 8}
    steps = steps_of(
        launch(S1), launch(S2), launch(S1, **other), wait(S2), wait(S1, **other), wait(S1)
    )
    assert sorted(steps[["pid", "stream", "start_ns", "end_ns"]].tolist()) == [
        (7, S1, 1000, 1055), (7, S2, 1010, 1035), (8, S1, 1020, 1045),
    ]  # fmt: skip


def test_inner_and_failed_calls_are_no_part_of_a_step():
    steps = steps_of(
        launch(S1, flags=EventFlag.NESTED), launch(S1, ret_code=2), launch(S1), wait(S1)
    )
    assert steps[["start_ns", "n_launches"]].tolist() == [(1020, 1)]


def test_a_collective_of_a_communicator_that_does_not_block_is_part_of_a_step():
    steps = steps_of((ALL_REDUCE, {"ret_code": 7}), launch(S1), wait(S1))
    assert (
        steps["start_ns"].tolist()
        == steps_of((ALL_REDUCE, {}), launch(S1), wait(S1))["start_ns"].tolist()
    )


def test_sampled_launches_are_estimated_and_said_to_be():
    steps = steps_of(launch(S1, 2), launch(S1, 8, weight=3), wait(S1), launch(S1), wait(S1))
    assert steps["n_launches"].tolist() == [4, 1]
    assert steps["blocks"].tolist() == [6.5, 4.0]
    assert steps["is_estimated"].tolist() == [True, False]


def test_a_step_over_a_minute_is_left_out_and_counted():
    rows = events_of(launch(S1), wait(S1))
    rows["duration_ns"][1] = 61 * 10**9
    finder = StepFinder()
    assert len(finder.take(build_calls(rows))) == 0
    assert finder.n_long == 1


def test_calls_whose_step_never_ends_are_forgotten_and_counted(monkeypatch):
    monkeypatch.setattr("ingero.detect.inference.steps.MAX_CARRIED", 3)
    finder = StepFinder()
    finder.take(build_calls(events_of(*[launch(S1)] * 5)))
    assert finder.n_dropped == 2
    (step,) = finder.take(build_calls(events_of(wait(S1), at_ns=10_000)))
    assert (step["n_launches"], step["start_ns"]) == (3, 1020)


def test_an_ended_process_is_forgotten():
    finder = StepFinder()
    finder.take(build_calls(events_of(launch(S1))))
    finder.forget({7})
    assert len(finder.take(build_calls(events_of(wait(S1), at_ns=10_000)))) == 0


CALLS = st.sampled_from([
    launch(S1), launch(S2), launch(S1, tid=8), copy(S1, IN, 100), copy(S2, OUT, 4), copy(S3, OUT, 4),
    wait(S1), wait(S2), wait(S3), wait(S1, tid=8), (DEVICE_SYNC, {}), copy(S1, OUT, 8, BLOCKING),
    (RECORD, {"arg0": 1, "arg1": S2}), (EVENT_SYNC, {"arg0": 1}), (EVENT_SYNC, {"arg0": 2}),
])  # fmt: skip


WAITS = {STREAM_SYNC, DEVICE_SYNC, EVENT_SYNC, BLOCKING}


def resolve_by_the_obvious_loop(rows):
    """Operation, stream and row of each call, one after another; launches are known for the whole of it."""
    launched = [int(row["arg1"]) for row in rows if (row["source"], row["op"]) == LAUNCH]
    busiest = max(launched, key=launched.count, default=None)
    last, recorded = {}, {}
    for row in rows:
        op = (row["source"], row["op"])
        said = {
            RECORD: row["arg1"], LAUNCH: row["arg1"], STREAM_SYNC: row["arg1"], DEVICE_SYNC: None,
            EVENT_SYNC: recorded.get(row["arg0"]),
        }  # fmt: skip
        stream = said.get(op, row["arg2"])
        if op == RECORD:
            recorded[row["arg0"]] = stream
            continue
        if op == LAUNCH:
            last[row["tid"]] = stream
        stream = stream if stream in launched else last.get(row["tid"], busiest)
        if stream is not None:
            yield op, int(stream), row


def steps_by_the_obvious_loop(rows):
    """Stream, first and last moment and launches of each step."""
    calls = list(resolve_by_the_obvious_loop(rows))
    is_result = {id(row): op in {COPY, BLOCKING} and row["arg1"] == OUT for op, _, row in calls}
    brings = {stream for _, stream, row in calls if is_result[id(row)]}
    open_steps, found = {}, []
    for op, stream, row in calls:
        inside = open_steps.setdefault(stream, [])
        inside.append((op, row))
        counted = [
            is_result[id(one)] if stream in brings else what == LAUNCH for what, one in inside
        ]
        if op not in WAITS or not any(counted):
            continue
        n_launches = sum(what == LAUNCH for what, _ in inside)
        begins = [int(one["start_ns"]) for what, one in inside
                  if what == LAUNCH or (what in {COPY, BLOCKING} and one["arg1"] == IN)]  # fmt: skip
        if begins:
            found.append((stream, begins[0], int(row["start_ns"] + row["duration_ns"]), n_launches))
        del open_steps[stream]
    return sorted(found)


@settings(max_examples=200, deadline=None)
@given(st.lists(CALLS, max_size=25))
def test_finding_steps_agrees_with_the_obvious_loop(calls):
    launches = [call for call in calls if call[0] == LAUNCH]
    counts = [sum(call[1]["arg1"] == stream for call in launches) for stream in (S1, S2)]
    if counts[0] == counts[1] and counts[0]:
        calls = [launch(S1), *calls]  # the busiest stream is to be one
    rows = events_of(*calls)
    steps = StepFinder().take(build_calls(rows))
    assert sorted(
        steps[["stream", "start_ns", "end_ns", "n_launches"]].tolist()
    ) == steps_by_the_obvious_loop(rows)


@pytest.mark.parametrize("cut", range(1, 16))
def test_batches_may_end_anywhere_in_a_step(cut):
    step = (copy(S1, IN, 8), launch(S1), (RECORD, {"arg0": 1, "arg1": S1}), copy(S2, OUT, 4),
            (EVENT_SYNC, {"arg0": 1}))  # fmt: skip
    rows = events_of(launch(S1), copy(S1, OUT, 4), wait(S1), *step, *step, *step)
    finder = StepFinder()
    parts = [finder.take(build_calls(part)) for part in (rows[:cut], rows[cut:])]
    whole = StepFinder().take(build_calls(rows))
    assert len(whole) == 4
    assert np.concatenate(parts).tolist() == whole.tolist()
