"""Rows with the device's clock from what the plug-in told, and the host rows that they replace."""

import os
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.agent.capture.discover.processes import iter_open_files
from ingero.agent.collectives import device as device_module
from ingero.agent.collectives.device import HOLD_NS, SCAN_NS, DeviceCollectives, match_starts
from ingero.agent.collectives.host import SETTLE_NS, Finished
from ingero.agent.collectives.plugin_ring import HEADER, PLACE, RECORD
from ingero.model.collectives import COLLECTIVE_OP, UNKNOWN_NS, ClockKind, CollectiveOp
from ingero.units import NS_PER_MS, NS_PER_S

PID = os.getpid()
GPU_NS = 1_700_000_000 * NS_PER_S
"""The device's timer need have nothing in common with the host's clock."""
LATER_NS = 10 * NS_PER_S


@pytest.fixture
def device(rings):
    collectives = DeviceCollectives(rings)
    collectives.note_process(PID)
    yield collectives
    collectives.close()


def take(device, finished=(), after_ns=2 * SETTLE_NS):
    now_ns = time.monotonic_ns() + after_ns
    device.read(now_ns)
    return device.take(list(finished), now_ns)


def host_rows(entries_ns, op=CollectiveOp.ALL_REDUCE, rank=1, n_ranks=4, clock=ClockKind.SYNC):
    ops = np.zeros(len(entries_ns), COLLECTIVE_OP)
    ops["entry_ns"], ops["op"] = entries_ns, op
    ops["seq"] = np.arange(len(entries_ns)) + 1
    return Finished(PID, "00000000000000ee", rank, n_ranks, clock, ops)


def test_times_are_the_devices_and_entries_lie_on_the_hosts_clock(join, device):
    comm = join(comm=0xAB, rank=2, n_ranks=8)
    for i in range(3):
        start_ns = GPU_NS + i * 50 * NS_PER_MS
        comm.play(start_ns, start_ns + 2 * NS_PER_MS, func=b"AllGather")
    (run,) = take(device)
    assert (run.pid, run.comm, run.comm_rank, run.n_ranks) == (PID, "00000000000000ab", 2, 8)
    assert run.clock is ClockKind.DEVICE
    assert run.ops["seq"].tolist() == [1, 2, 3]
    assert run.ops["inside_ns"].tolist() == [2 * NS_PER_MS] * 3
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, 48 * NS_PER_MS, 48 * NS_PER_MS]
    assert run.ops["op"].tolist() == [CollectiveOp.ALL_GATHER] * 3
    assert run.ops["n_bytes"].tolist() == [4000] * 3
    assert np.diff(run.ops["entry_ns"]).tolist() == [50 * NS_PER_MS] * 2
    # The third one ended just now, as far as the host can know.
    left_ns = int(run.ops["entry_ns"][2]) + 2 * NS_PER_MS
    assert abs(time.monotonic_ns() - left_ns) < LATER_NS
    assert device.counts.n_ops == 3


def test_own_time_is_counted_from_the_last_collective_of_any_communicator(join, device):
    wide, narrow = join(comm=1), join(comm=2, rank=0, n_ranks=2)
    wide.play(GPU_NS, GPU_NS + 100)
    narrow.play(GPU_NS + 300, GPU_NS + 400)
    wide.play(GPU_NS + 1000, GPU_NS + 1100)
    runs = {run.comm: run.ops for run in take(device)}
    assert runs[f"{1:016x}"]["own_ns"].tolist() == [UNKNOWN_NS, 600]
    assert runs[f"{2:016x}"]["own_ns"].tolist() == [200]


def test_own_time_goes_on_from_one_look_to_the_next_and_is_unknown_after_a_loss(join, device):
    comm = join()
    comm.play(GPU_NS, GPU_NS + 100, n_channels=1)
    take(device)
    comm.play(GPU_NS + 500, GPU_NS + 600, n_channels=1)
    (run,) = take(device)
    assert run.ops["own_ns"].tolist() == [400]
    for i in range(1, 4098):
        comm.play(GPU_NS + 1000 * i, GPU_NS + 1000 * i + 100, n_channels=1)
    (run,) = take(device)
    assert run.ops["own_ns"].tolist() == [UNKNOWN_NS, *[900] * 4095]
    assert device.counts.n_lost == 1


def test_what_just_ended_waits_for_what_began_before_it(join, device):
    comm = join()
    comm.play(GPU_NS, GPU_NS + 100)
    assert take(device, after_ns=0) == []
    assert len(take(device, after_ns=2 * SETTLE_NS)) == 1


def test_a_ring_that_is_made_later_is_found(join, device):
    assert take(device, after_ns=0) == []
    join().play(GPU_NS, GPU_NS + 100)
    assert take(device, after_ns=SCAN_NS // 2) == []
    assert len(take(device, after_ns=2 * SCAN_NS)) == 1


def test_what_was_lost_before_a_ring_was_found_is_lost_for_those_who_were_there(join, rings):
    with closing(DeviceCollectives(rings, time.monotonic_ns())) as device:
        comm = join()
        for i in range(4100):
            comm.play(GPU_NS + 1000 * i, GPU_NS + 1000 * i + 100, n_channels=1)
        device.note_process(PID)
        (run,) = take(device)
        assert len(run.ops) == 4096
        assert device.counts.n_lost == 4
    with closing(DeviceCollectives(rings, time.monotonic_ns())) as started_later:
        started_later.note_process(PID)
        take(started_later)
        assert started_later.counts.n_lost == 0


def test_what_was_lost_stays_lost_whatever_the_writer_says_later(join, device, rings):
    join().play(GPU_NS, GPU_NS + 100)
    take(device)
    (path,) = rings.glob("*/*.ring")
    kind, at = HEADER.fields["n_crowded"][:2]
    for number, lost in ((7, 7), (0, 7), (7, 7), (9, 9)):
        with path.open("r+b") as file:
            file.seek(at)
            file.write(np.array(number, kind).tobytes())
        take(device)
        assert device.counts.n_lost == lost


def test_communicators_without_a_place_are_counted_once_and_stay_counted(join, device):
    comms = [join(comm=1 + i) for i in range(130)]
    for _ in range(2):
        take(device)
        assert device.counts.n_unplaced == 2
    for comm in comms:
        comm.finalize()
        comm.context = None
    again = [join(comm=1000 + i) for i in range(129)]
    take(device, after_ns=2 * SCAN_NS)
    assert device.counts.n_unplaced == 3
    assert len(again) == 129


def test_a_record_that_was_seen_in_the_future_is_not_kept_until_then(join, device, rings):
    join().play(GPU_NS, GPU_NS + 100, n_channels=1)
    (path,) = rings.glob("*/*.ring")
    at = HEADER.itemsize + 128 * PLACE.itemsize + RECORD.fields["host_seen_ns"][1]
    with path.open("r+b") as file:
        file.seek(at)
        file.write(np.uint64(1 << 61).tobytes())
    device.read(time.monotonic_ns())
    (run,) = device.take([], time.monotonic_ns() + 2 * SETTLE_NS)
    assert run.ops["inside_ns"].tolist() == [100]


def test_ever_new_communicators_of_a_process_are_refused_in_the_end(join, device, monkeypatch):
    monkeypatch.setattr(device_module, "MAX_MEMBERSHIPS", 3)
    comms = [join(comm=1 + i) for i in range(5)]
    for _ in range(2):
        for comm in comms:
            comm.play(GPU_NS, GPU_NS + 100)
    assert [run.comm for run in take(device)] == [f"{1 + i:016x}" for i in range(3)]
    assert (device.counts.n_ops, device.counts.n_refused) == (6, 4)


def test_kinds_of_collectives_that_are_not_called_any_more_are_forgotten(join, device, monkeypatch):
    monkeypatch.setattr(device_module, "_MAX_KINDS", 2)
    entries_ns = []
    for n_ranks in (4, 5, 6):
        entries_ns.append(time.monotonic_ns())
        join(comm=n_ranks, n_ranks=n_ranks).play(GPU_NS, GPU_NS + 100)
    rows = [host_rows([at_ns], n_ranks=n) for at_ns, n in zip(entries_ns, (4, 5, 6), strict=True)]
    take(device)
    take(device, rows)
    assert device.counts.n_superseded == 2
    assert [run.n_ranks for run in take(device, after_ns=2 * HOLD_NS)] == [4]


def test_host_rows_of_what_the_plug_in_told_are_dropped(join, device):
    comm = join()
    entries_ns = []
    for _ in range(3):
        entries_ns.append(time.monotonic_ns())
        comm.play(GPU_NS, GPU_NS + 100)
    runs = take(device, [host_rows(entries_ns)])
    assert [run.clock for run in runs] == [ClockKind.DEVICE]
    assert take(device, after_ns=2 * HOLD_NS) == []
    assert (device.counts.n_ops, device.counts.n_superseded) == (3, 3)


def test_host_rows_that_come_before_the_plug_in_tells_wait_for_it(join, device):
    comm = join()
    entry_ns = time.monotonic_ns()
    take(device)
    assert take(device, [host_rows([entry_ns])]) == []
    comm.play(GPU_NS, GPU_NS + 100)
    assert [run.clock for run in take(device)] == [ClockKind.DEVICE]
    assert device.counts.n_superseded == 1


def test_a_ring_is_looked_for_before_the_first_host_row_of_a_communicator_goes_out(join, device):
    assert (
        take(device, after_ns=0) == []
    )  # no ring yet, and none is looked for in the next two seconds
    comm = join()
    entry_ns = time.monotonic_ns()
    comm.play(GPU_NS, GPU_NS + 100)
    assert take(device, [host_rows([entry_ns])]) == []
    assert [run.clock for run in take(device)] == [ClockKind.DEVICE]
    assert take(device, after_ns=2 * HOLD_NS) == []


def test_what_the_plug_in_tells_nothing_of_keeps_the_hosts_clock(join, device):
    comm = join()
    entries_ns = [time.monotonic_ns()]
    comm.play(GPU_NS, GPU_NS + 100)
    others = [
        host_rows([*entries_ns, time.monotonic_ns()]),  # the second never came
        host_rows(entries_ns, op=CollectiveOp.BROADCAST),
        host_rows(entries_ns, n_ranks=2),
        host_rows(entries_ns, rank=0, clock=ClockKind.ENQUEUE),
    ]
    assert [run.clock for run in take(device, others)] == [ClockKind.DEVICE]
    left = take(device, after_ns=2 * HOLD_NS)
    assert [(run.clock, run.comm_rank, run.n_ranks) for run in left] == [
        (ClockKind.SYNC, 1, 4),
        (ClockKind.SYNC, 1, 4),
        (ClockKind.SYNC, 1, 2),
        (ClockKind.ENQUEUE, 0, 4),
    ]
    assert left[0].ops["seq"].tolist() == [2]
    assert left[1].ops["op"].tolist() == [CollectiveOp.BROADCAST]
    assert device.counts.n_superseded == 1


def test_a_call_after_everything_that_was_told_is_not_taken_for_it(join, device):
    comm = join()
    comm.play(GPU_NS, GPU_NS + 100)
    take(device, [host_rows([time.monotonic_ns()])])
    assert [run.clock for run in take(device, after_ns=2 * HOLD_NS)] == [ClockKind.SYNC]


def test_processes_without_the_plug_in_are_passed_on_at_once(device):
    rows = host_rows([1000])
    assert take(device, [rows]) == [rows]
    assert device.pids == ()


def test_a_process_that_ends_is_waited_for_no_longer(join, device):
    join().play(GPU_NS, GPU_NS + 100)
    take(device, after_ns=0)
    rows = host_rows([time.monotonic_ns()])
    device.note_exit(PID)
    runs = take(device, [rows], after_ns=0)
    assert [run.clock for run in runs] == [ClockKind.SYNC, ClockKind.DEVICE]


def test_a_process_that_is_several_ranks_is_left_to_the_probes(join, device):
    comms = [join(comm=7, rank=rank) for rank in range(2)]
    for comm in comms:
        comm.play(GPU_NS, GPU_NS + 100)
    rows = host_rows([1000])
    assert take(device, [rows]) == [rows]
    assert (device.counts.n_ops, device.counts.n_refused) == (0, 2)


@pytest.mark.parametrize(
    ("start_ns", "stop_ns"),
    [(0, 100), (200, 100), (GPU_NS, 1 << 62), (GPU_NS, 2**64 - 1), (1 << 63, 1 << 63)],
)
def test_times_that_cannot_be_are_refused_and_counted(join, device, start_ns, stop_ns):
    join().play(start_ns, stop_ns, n_channels=1)
    assert take(device) == []
    assert (device.counts.n_ops, device.counts.n_refused) == (0, 1)


def test_where_a_process_is_comes_from_the_plug_in(join, device):
    comm = join(comm=0xC0, rank=3, n_ranks=8)
    assert take(device) == []
    assert device.positions(PID) == {}  # nothing entered yet
    comm.play(GPU_NS, GPU_NS + 100)
    comm.enqueue(func=b"Reduce")
    take(device)
    (name, place), *_ = device.positions(PID).items()
    assert name == f"{0xC0:016x}"
    assert (place.comm_rank, place.n_ranks, place.entered, place.left) == (3, 8, 2, 1)
    assert place.op is CollectiveOp.REDUCE
    assert device.pids == (PID,)


def test_each_call_gets_the_first_start_that_is_left():
    calls, starts = np.array([10, 20, 30, 40]), np.array([5, 12, 21, 22, 50])
    is_given, n_used = match_starts(calls, starts)
    assert is_given.tolist() == [True, True, True, False]  # 22 is too old for the call of 30
    assert n_used == 5
    is_given, n_used = match_starts(
        calls, np.array([35, 36])
    )  # all were started when the group ended
    assert is_given.tolist() == [True, True, False, False]
    assert n_used == 2
    is_given, n_used = match_starts(calls, np.array([1, 2]))
    assert not is_given.any()
    assert n_used == 2
    assert match_starts(np.zeros(0, np.int64), starts)[1] == 0


moments = st.lists(st.integers(0, 40), max_size=12).map(sorted)


@given(moments, moments)
def test_matching_agrees_with_a_queue(calls, starts):
    queue, expected = list(starts), []
    for call in calls:
        while queue and queue[0] < call:
            queue.pop(0)
        expected.append(bool(queue))
        if queue:
            queue.pop(0)
    is_given, n_used = match_starts(np.array(calls, np.int64), np.array(starts, np.int64))
    assert is_given.tolist() == expected
    assert n_used >= sum(expected)


def count_open_rings(rings):
    """Rings in a folder that this process has open, those that were removed too; the plug-in closes its own at once."""
    return sum(path.startswith(f"{rings}/") for path in iter_open_files(PID))


def test_a_ring_that_its_process_removed_is_closed_once_it_is_read(join, device, rings):
    take(device)
    entries_ns = []
    for n_read in range(1, 4):
        comm = join(comm=n_read)
        device.read(
            time.monotonic_ns() + n_read * LATER_NS
        )  # what is written over from now on is lost
        entries_ns.append(time.monotonic_ns())
        for _ in range(4097 if n_read == 1 else 1):
            comm.play(GPU_NS, GPU_NS + 100, n_channels=1)
        device.read(time.monotonic_ns() + n_read * LATER_NS)
        comm.finalize()
        comm.context = None
        take(device, after_ns=n_read * LATER_NS)
        assert count_open_rings(rings) == 0
        assert device.positions(PID) == {}
        assert (device.counts.n_ops, device.counts.n_lost) == (4095 + n_read, 1)
    assert device.pids == (PID,)
    rows = host_rows([entries_ns[-1], time.monotonic_ns()])
    assert (
        take(device, [rows], after_ns=4 * LATER_NS) == []
    )  # the first is superseded, the other held
    (left,) = take(device, after_ns=4 * LATER_NS + 2 * HOLD_NS)
    assert left.ops["seq"].tolist() == [2]


def test_a_removed_ring_that_says_where_its_process_stands_is_kept(join, device, rings):
    comm = join(comm=0xAB)
    comm.enqueue()
    take(device)
    (path,) = rings.glob("*/*.ring")
    path.unlink()  # as the next process does when this one was killed in the collective
    take(device)
    assert device.positions(PID)[f"{0xAB:016x}"].entered == 1
    device.forget(PID)
    assert count_open_rings(rings) == 1  # the plug-in's own
