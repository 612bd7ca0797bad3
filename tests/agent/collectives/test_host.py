"""Kernel records of collectives and synchronisations become rows; the kernel's layouts come from the built object."""

import numpy as np
import pytest

from ingero.agent.capture.kernel.abi import Flag, get_dtype
from ingero.agent.collectives.host import ENQUEUE_AFTER_NS, SETTLE_NS, CollectiveTracker
from ingero.model.collectives import UNKNOWN_NS, ClockKind, CollectiveOp
from ingero.model.events import CudaOp, NcclOp, Source

COMM = 0xAB
LATER = 10**12


def collective(
    entry_ns, seq, *, stream=7, call_ns=5, comm=COMM, rank=1, op=NcclOp.ALL_REDUCE, device=0
):
    record = np.zeros(1, get_dtype("collective"))
    record["header"]["mono_ns"], record["duration_ns"] = entry_ns, call_ns
    record["seq"], record["stream"], record["comm_hash"] = seq, stream, comm
    record["pid"], record["rank"], record["nranks"], record["op"] = 42, rank, 4, op
    record["bytes"], record["source"], record["device"] = 4096, Source.NCCL, device
    return record


def call(op, entry_ns, duration_ns=0, *, stream=0, handle=0, flags=0, rc=0, device=0):
    record = np.zeros(1, get_dtype("call"))
    record["header"]["mono_ns"], record["duration_ns"] = entry_ns, duration_ns
    record["source"], record["op"], record["pid"] = Source.CUDA, op, 42
    record["stream"], record["handle"], record["flags"], record["rc"] = stream, handle, flags, rc
    record["device"] = device
    return record


def take(collectives, calls=(), at_ns=LATER, tracker=None):
    tracker = tracker or CollectiveTracker()
    for record in calls:
        tracker.add_calls(record)
    for record in collectives:
        tracker.add_collectives(record)
    return tracker, tracker.take(at_ns)


def test_end_of_a_collective_is_the_return_of_the_next_wait_for_its_stream():
    _, (run,) = take(
        [collective(1000, 1), collective(3000, 2)],
        [
            call(CudaOp.STREAM_SYNC, 1010, 490, stream=7),
            call(CudaOp.STREAM_SYNC, 3010, 190, stream=7),
        ],
    )
    assert (run.comm, run.comm_rank, run.n_ranks) == (f"{COMM:016x}", 1, 4)
    assert run.clock is ClockKind.SYNC
    assert run.ops["seq"].tolist() == [1, 2]
    assert run.ops["inside_ns"].tolist() == [500, 200]
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 1500]
    assert run.ops["op"].tolist() == [CollectiveOp.ALL_REDUCE] * 2
    assert run.ops["n_bytes"].tolist() == [4096] * 2


def test_wait_for_another_stream_or_one_that_began_before_says_nothing():
    _, runs = take(
        [collective(1000, 1)],
        [
            call(CudaOp.STREAM_SYNC, 1010, 490, stream=8),
            call(CudaOp.STREAM_SYNC, 990, 900, stream=7),
        ],
    )
    assert runs == []


def test_nested_and_failed_waits_say_nothing():
    _, runs = take(
        [collective(1000, 1)],
        [
            call(CudaOp.STREAM_SYNC, 1010, 490, stream=7, flags=int(Flag.NESTED)),
            call(CudaOp.STREAM_SYNC, 1010, 490, stream=7, rc=700),
        ],
    )
    assert runs == []


def test_device_wait_ends_collectives_of_every_stream():
    _, (run,) = take(
        [collective(1000, 1, stream=7), collective(1100, 2, stream=8)],
        [call(CudaOp.DEVICE_SYNC, 1200, 800)],
    )
    assert run.ops["inside_ns"].tolist() == [1000, 900]


@pytest.mark.parametrize(
    ("op", "stream"), [(CudaOp.DEVICE_SYNC, 7), (CudaOp.STREAM_SYNC, 0), (CudaOp.STREAM_SYNC, 2)]
)
def test_a_wait_for_one_device_ends_nothing_of_another(op, stream):
    def wait(at_ns, device):
        return call(op, at_ns, 800, stream=stream, device=device)

    tracker, (run,) = take(
        [
            collective(1000, 1, stream=stream, comm=0xA, device=0),
            collective(1100, 1, stream=stream, comm=0xB, device=1),
        ],
        [wait(1200, 0)],
    )
    assert (run.comm, run.ops["inside_ns"].tolist()) == (f"{0xA:016x}", [1000])
    _, (run,) = take([], [wait(5000, 1)], tracker=tracker)
    assert (run.comm, run.ops["inside_ns"].tolist()) == (f"{0xB:016x}", [4700])


def test_what_nobody_waited_for_is_over_when_its_communicator_is_destroyed():
    tracker, (run,) = take(
        [collective(1000, 1), collective(2000, 2)],
        [call(CudaOp.STREAM_SYNC, 1010, 490, stream=7)],
    )
    assert run.ops["seq"].tolist() == [1]
    position = tracker.positions(42)[f"{COMM:016x}"]
    assert (position.entered, position.left) == (2, 1)
    destroy = collective(3000, 0, op=NcclOp.COMM_DESTROY, call_ns=500)
    take([destroy], at_ns=3400 + SETTLE_NS, tracker=tracker)
    assert position.left == 1  # the call may still be in it
    take([], at_ns=3500 + SETTLE_NS, tracker=tracker)
    assert (position.entered, position.left) == (2, 2)


def test_a_program_that_becomes_another_leaves_its_collectives_and_has_no_own_time_before_the_next():
    tracker, (run,) = take(
        [collective(1000, 1), collective(3000, 2)],
        [call(CudaOp.STREAM_SYNC, 1010, 490, stream=7)],
    )
    tracker.note_exec(42, 5000)
    _, (left,) = take([], at_ns=5000 + SETTLE_NS, tracker=tracker)
    assert (left.clock, left.ops["seq"].tolist()) == (ClockKind.ENQUEUE, [2])
    position = tracker.positions(42)[f"{COMM:016x}"]
    assert (position.entered, position.left) == (2, 2)
    _, (run,) = take(
        [collective(10**9, 1, comm=0xCD)],
        [call(CudaOp.DEVICE_SYNC, 10**9 + 10, 490)],
        tracker=tracker,
    )
    assert (run.comm, run.ops["own_ns"].tolist()) == (f"{0xCD:016x}", [UNKNOWN_NS])


@pytest.mark.parametrize(("of_collective", "of_wait"), [(-1, 1), (1, -1), (-1, -1)])
def test_a_wait_ends_what_may_be_of_its_device(of_collective, of_wait):
    _, (run,) = take(
        [collective(1000, 1, device=of_collective)],
        [call(CudaOp.DEVICE_SYNC, 1200, 800, device=of_wait)],
    )
    assert run.ops["inside_ns"].tolist() == [1000]


def test_a_stream_that_was_made_for_one_device_may_be_waited_for_from_another():
    _, (run,) = take(
        [collective(1000, 1, device=1)], [call(CudaOp.STREAM_SYNC, 1200, 800, stream=7, device=0)]
    )
    assert run.ops["inside_ns"].tolist() == [1000]


def test_event_wait_ends_only_what_was_enqueued_before_the_event_was_recorded():
    tracker, (run,) = take(
        [collective(1000, 1), collective(2000, 2)],
        [
            call(CudaOp.EVENT_RECORD, 1500, stream=7, handle=99),
            call(CudaOp.EVENT_SYNC, 2100, 400, handle=99),
        ],
    )
    assert run.ops["seq"].tolist() == [1]
    assert run.ops["inside_ns"].tolist() == [1500]
    assert tracker.positions(42)[f"{COMM:016x}"].entered == 2
    assert tracker.positions(42)[f"{COMM:016x}"].left == 1


def in_one_batch(*calls):
    """Records of calls as one reading of their ring gives them: in the order in which the calls ended."""
    records = np.concatenate(calls)
    ends = records["header"]["mono_ns"].astype(np.int64) + records["duration_ns"].astype(np.int64)
    return records[np.argsort(ends, kind="stable")]


def test_each_wait_for_an_event_means_the_record_before_it_though_all_are_read_at_once():
    calls = in_one_batch(
        *(call(CudaOp.EVENT_RECORD, at, stream=7, handle=99) for at in (2_000, 32_000, 62_000)),
        *(call(CudaOp.EVENT_SYNC, at, 17_000, handle=99) for at in (3_000, 33_000, 63_000)),
    )
    _, (run,) = take(
        [collective(at, 1 + at // 30_000, call_ns=1_000) for at in (0, 30_000, 60_000)], [calls]
    )
    assert run.clock is ClockKind.SYNC
    assert run.ops["inside_ns"].tolist() == [20_000, 20_000, 20_000]
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 10_000, 10_000]


def test_a_wait_for_an_event_does_not_mean_a_record_that_another_thread_made_meanwhile():
    _, (run,) = take(
        [collective(1000, 1), collective(2000, 2)],
        [
            call(CudaOp.EVENT_RECORD, 1500, stream=7, handle=99),
            call(CudaOp.EVENT_RECORD, 2500, stream=7, handle=99),
            call(CudaOp.EVENT_SYNC, 1600, 2400, handle=99),
        ],
    )
    assert (run.ops["seq"].tolist(), run.ops["inside_ns"].tolist()) == ([1], [3000])


def test_a_stream_that_waits_for_an_event_of_another_ends_what_that_had_been_given():
    # As PyTorch does it: the collective's stream waits for the current one and the other way round.
    _, (run,) = take(
        [collective(1000, 1), collective(3000, 2)],
        [
            in_one_batch(
                call(CudaOp.EVENT_RECORD, 900, stream=0, handle=1),
                call(CudaOp.STREAM_WAIT_EVENT, 910, stream=7, handle=1),
                call(CudaOp.EVENT_RECORD, 1100, stream=7, handle=2),
                call(CudaOp.STREAM_WAIT_EVENT, 1200, stream=0, handle=2),
                call(CudaOp.STREAM_SYNC, 1300, 700, stream=0),
                call(CudaOp.EVENT_RECORD, 3100, stream=7, handle=2),
                call(CudaOp.STREAM_SYNC, 3150, 850, stream=0),
                call(CudaOp.STREAM_WAIT_EVENT, 4100, stream=0, handle=2),
                call(CudaOp.STREAM_SYNC, 4200, 800, stream=0),
            )
        ],
    )
    assert run.clock is ClockKind.SYNC
    assert run.ops["seq"].tolist() == [1, 2]
    assert run.ops["inside_ns"].tolist() == [1000, 2000]
    assert run.ops["own_ns"].tolist() == [
        UNKNOWN_NS,
        UNKNOWN_NS,
    ]  # the device decides when they begin


def test_an_event_on_the_waiting_stream_stands_for_what_that_stream_waited_for():
    _, (run,) = take(
        [collective(1000, 1, stream=5)],
        [
            call(CudaOp.EVENT_RECORD, 1100, stream=5, handle=1),
            call(CudaOp.STREAM_WAIT_EVENT, 1200, stream=6, handle=1),
            call(CudaOp.EVENT_RECORD, 1300, stream=6, handle=2),
            call(CudaOp.STREAM_WAIT_EVENT, 1400, stream=0, handle=2),
            call(CudaOp.EVENT_RECORD, 1500, stream=0, handle=3),
            call(CudaOp.EVENT_SYNC, 1600, 400, handle=3),
        ],
    )
    assert run.ops["inside_ns"].tolist() == [1000]


def test_of_two_waits_the_one_that_ended_first_is_the_end():
    _, (run,) = take(
        [collective(1000, 1)],
        [
            call(CudaOp.STREAM_SYNC, 1010, 990, stream=7),
            call(CudaOp.STREAM_SYNC, 1020, 480, stream=7),
        ],
    )
    assert run.ops["inside_ns"].tolist() == [500]


def test_a_rank_that_was_idle_for_a_fortnight_says_that_its_own_time_is_not_known():
    later = 14 * 24 * 3600 * 10**9
    _, (run,) = take(
        [collective(1000, 1), collective(later, 2)],
        [
            call(CudaOp.STREAM_SYNC, 1010, 490, stream=7),
            call(CudaOp.STREAM_SYNC, later + 10, 490, stream=7),
        ],
        at_ns=later + LATER,
    )
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, UNKNOWN_NS]
    assert run.ops["inside_ns"].tolist() == [500, 500]


def test_own_time_of_a_batch_counts_from_the_collective_enqueued_before():
    _, (run,) = take(
        [collective(1000, 1, call_ns=10), collective(1500, 2, call_ns=10)],
        [call(CudaOp.STREAM_SYNC, 2000, 100, stream=7)],
    )
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 490]
    assert run.ops["inside_ns"].tolist() == [1100, 600]


def test_wait_that_is_read_before_its_collective_still_ends_it():
    tracker = CollectiveTracker()
    tracker.add_calls(call(CudaOp.STREAM_SYNC, 1010, 490, stream=7))
    assert tracker.take(1500 + SETTLE_NS - 1) == []
    tracker.add_collectives(collective(1000, 1))
    (run,) = tracker.take(1500 + SETTLE_NS)
    assert run.ops["inside_ns"].tolist() == [500]


def test_of_a_process_that_ended_all_goes_out_and_of_the_others_what_is_complete():
    tracker = CollectiveTracker()
    others = collective(1000, 1)
    others["pid"] = 43
    for record in (collective(1000, 1), others):
        tracker.add_collectives(record)
    (run,) = tracker.take(1100, {42, 99})
    assert (run.pid, run.clock, run.ops["seq"].tolist()) == (42, ClockKind.ENQUEUE, [1])
    assert tracker.take(LATER) == []
    (run,) = tracker.take(LATER, None)
    assert (run.pid, run.clock) == (43, ClockKind.ENQUEUE)


def test_collective_nobody_waits_for_goes_out_as_enqueued_and_without_an_end():
    tracker = CollectiveTracker()
    take(
        [collective(1000, 1, stream=8), collective(1100, 2, stream=7)],
        [call(CudaOp.STREAM_SYNC, 1200, 100, stream=7)],
        at_ns=SETTLE_NS + 2000,
        tracker=tracker,
    )
    tracker.add_collectives(collective(ENQUEUE_AFTER_NS + 2000, 3, stream=7))
    tracker.add_calls(call(CudaOp.STREAM_SYNC, ENQUEUE_AFTER_NS + 2100, 10, stream=7))
    runs = tracker.take(ENQUEUE_AFTER_NS + 10**9)
    by_clock = {run.clock: run for run in runs}
    assert by_clock[ClockKind.ENQUEUE].ops["seq"].tolist() == [1]
    assert by_clock[ClockKind.ENQUEUE].ops["inside_ns"].tolist() == [UNKNOWN_NS]
    assert by_clock[ClockKind.SYNC].ops["seq"].tolist() == [2, 3]
    assert tracker.n_unsynced == 1


@pytest.mark.parametrize("unknown", [{"comm": 0}, {"rank": -1}, {"comm": 0, "seq": 0}])
def test_collective_whose_communicator_was_made_before_the_probes_is_counted_and_left_out(unknown):
    tracker, runs = take([collective(1000, **{"seq": 1, **unknown})])
    assert (runs, tracker.n_unknown) == ([], 1)


def test_a_process_whose_communicators_nobody_knows_is_named_once_and_again_when_its_number_is_another_s():
    tracker, _ = take([collective(1000, 0, comm=0), collective(2000, 0, comm=0)])
    assert (tracker.take_unknown(), tracker.take_unknown()) == ([42], [])
    tracker.forget(42)
    take([collective(3000, 0, comm=0)], tracker=tracker)
    assert tracker.take_unknown() == [42]


def test_a_process_with_several_ranks_of_a_communicator_speaks_as_the_lowest():
    tracker, first = take(
        [collective(1000 + rank, 1, rank=rank, stream=rank) for rank in (4, 5, 6)],
        [call(CudaOp.DEVICE_SYNC, 1100, 400)],
    )
    _, second = take(
        [collective(3000 - rank, 2, rank=rank, stream=rank) for rank in (4, 5, 6)],
        [call(CudaOp.DEVICE_SYNC, 3100, 400)],
        at_ns=2 * LATER,
        tracker=tracker,
    )
    for seq, (run,) in ((1, first), (2, second)):
        assert (run.comm_rank, run.n_ranks, run.ops["seq"].tolist()) == (4, 4, [seq])
    assert second[0].ops["own_ns"].tolist() == [2994 - 1500]
    assert tracker.positions(42)[f"{COMM:016x}"].comm_rank == 4


def test_ranks_of_one_process_are_one_although_they_are_read_in_turns():
    tracker = CollectiveTracker()
    seqs = []
    for entry_ns, seq, rank in ((1000, 1, 5), (1001, 1, 4), (2000, 2, 4), (2001, 2, 5)):
        _, runs = take(
            [collective(entry_ns, seq, rank=rank)],
            [call(CudaOp.STREAM_SYNC, entry_ns + 10, 10, stream=7)],
            tracker=tracker,
        )
        seqs += [seq for run in runs for seq in run.ops["seq"].tolist()]
    assert seqs == [1, 2]
    assert tracker.positions(42)[f"{COMM:016x}"].comm_rank == 4


def test_a_group_of_gloo_that_was_not_met_yet_is_counted_and_nobody_is_named():
    record = collective(1000, 5, comm=0)
    record["source"] = Source.GLOO
    tracker, runs = take([record])
    assert (runs, tracker.n_unknown, tracker.take_unknown()) == ([], 1, [])


def test_point_to_point_has_no_sequence_and_is_left_out():
    tracker, runs = take([collective(1000, 0, op=NcclOp.SEND)])
    assert (runs, tracker.n_unknown, tracker.positions(42)) == ([], 0, {})


def test_communicator_calls_that_are_no_operations_are_left_out():
    tracker, runs = take([collective(1000, 0, op=NcclOp.COMM_INIT)])
    assert (runs, tracker.n_unknown, tracker.pids) == ([], 0, ())


@pytest.mark.parametrize(
    "untold", [{"seq": 9, "comm": 0xCD, "rank": -1}, {"seq": 0, "op": NcclOp.RECV}]
)
def test_waiting_in_an_operation_that_is_not_told_is_nobodys_own_time(untold):
    _, (run,) = take(
        [collective(1000, 1), collective(2000, **untold), collective(3000, 2)],
        [call(CudaOp.STREAM_SYNC, at, 400 if at == 1010 else 890, stream=7) for at in (1010, 2010)]
        + [call(CudaOp.STREAM_SYNC, 3010, 190, stream=7)],
    )
    assert run.ops["seq"].tolist() == [1, 2]
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 100]


def gloo(entry_ns, seq, call_ns, **others):
    record = collective(entry_ns, seq, call_ns=call_ns, **others)
    record["source"] = Source.GLOO
    return record


def test_a_collective_of_gloo_is_over_when_its_call_is():
    _, (run,) = take([gloo(1000, 1, 300), gloo(2000, 2, 50)])
    assert run.clock is ClockKind.SYNC
    assert run.ops["inside_ns"].tolist() == [300, 50]
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 700]


def test_what_is_entered_while_another_thread_is_inside_had_no_time_of_its_own():
    _, (run,) = take([gloo(1000, 1, 300), gloo(1100, 2, 900), gloo(2500, 3, 10)])
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 0, 500]


def test_two_jobs_whose_groups_have_one_name_are_two_communicators():
    tracker = CollectiveTracker()
    tracker.note_job(42, 0xF000)
    _, (run,) = take([gloo(1000, 1, 300)], tracker=tracker)
    assert run.comm == f"{COMM ^ 0xF000:016x}"
    _, (nccl,) = take(
        [collective(1000, 1)], [call(CudaOp.STREAM_SYNC, 1010, 5, stream=7)], tracker=tracker
    )
    assert nccl.comm == f"{COMM:016x}"


def test_a_collective_of_gloo_that_has_not_returned_was_entered():
    tracker = CollectiveTracker()
    tracker.note_job(42, 0xF000)
    take([gloo(1000, 1, 300)], tracker=tracker)
    frames = np.zeros(1, [("pid", "<u4"), ("frame", get_dtype("frame"))])
    frames["pid"], frame = 42, frames["frame"]
    frame["source"], frame["seq"], frame["comm_hash"] = Source.GLOO, 2, COMM
    frame["entry_ns"] = 5000
    tracker.note_inside(frames)
    place = tracker.positions(42)[f"{COMM ^ 0xF000:016x}"]
    assert (place.entered, place.left, place.entry_ns) == (2, 1, 5000)
    for seq in range(2, 6):
        frame["seq"], frame["entry_ns"] = seq, 1000 + 4000 * (seq - 1)
        tracker.note_inside(frames)
        take([gloo(1000 + 4000 * (seq - 1), seq, 300)], tracker=tracker)
    place = tracker.positions(42)[f"{COMM ^ 0xF000:016x}"]
    assert place.pace.period_ns == 4000, "the same operation is no second one"


def test_a_collective_of_gloo_whose_size_is_not_known_has_none():
    records = [gloo(1000, 1, 5, op=NcclOp.ALL_GATHER), gloo(2000, 2, 5, op=NcclOp.BARRIER)]
    for record in records:
        record["bytes"] = 0
    _, (run,) = take([*records, gloo(3000, 3, 5)])
    assert run.ops["n_bytes"].tolist() == [UNKNOWN_NS, 0, 4096]


def test_a_collective_that_another_one_made_is_no_second_one():
    inner = collective(1001, 1, call_ns=3)
    inner["flags"] = Flag.NESTED
    _, (run,) = take([inner, collective(1000, 1)], [call(CudaOp.STREAM_SYNC, 1010, 490, stream=7)])
    assert run.ops["seq"].tolist() == [1]
    assert run.ops["inside_ns"].tolist() == [500]


IN_PROGRESS, SYSTEM_ERROR = 7, 2


def test_a_collective_of_a_communicator_that_does_not_block_is_one_and_a_failed_one_is_none():
    records = [collective(1000, 1), collective(2000, 2), collective(3000, 3)]
    records[1]["rc"] = IN_PROGRESS
    records[2]["rc"], records[2]["flags"] = SYSTEM_ERROR, Flag.ERROR
    _, (run,) = take(records, [call(CudaOp.STREAM_SYNC, 4000, 500, stream=7)])
    assert run.ops["seq"].tolist() == [1, 2]
