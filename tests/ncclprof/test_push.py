"""What the pusher sends of a process with the plug-in. A transport of the test's own hears the exports."""

import fcntl
import mmap
import os
import time

import numpy as np
import pytest

from ingero.agent.collectives.device import DeviceCollectives
from ingero.agent.collectives.host import CollectiveTracker
from ingero.agent.collectives.plugin_ring import HEADER, MAGIC, MAX_RINGS, PLACE, RECORD, VERSION
from ingero.agent.collectives.push import CollectivePusher, PushPace
from ingero.agent.collectives.run_queue import RunQueue
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.transport import PushReply
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.health import iter_collective_series
from ingero.model.collectives import ClockKind, CollectiveOp
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import read_collectives
from ingero.wire.progress import read_progress

PID = os.getpid()


class Ear:
    def __init__(self):
        self.exports = []

    def send(self, export, wall_ns):
        self.exports.append(export)
        return PushReply(is_taken=True, detail="")

    def close(self):
        pass

    @property
    def runs(self):
        return [run for export in self.exports for run in read_collectives(export).runs]

    @property
    def standings(self):
        return [one for export in self.exports for one in read_progress(export).found]


@pytest.fixture
def clock():
    clock = ManualClock()
    clock.advance(time.monotonic_ns() - clock.mono_ns())  # the plug-in's clock is the real one
    return clock


@pytest.fixture
def ear():
    return Ear()


@pytest.fixture
def pusher(rings, clock, ear):
    pusher = CollectivePusher(
        NodeIdentity(cluster_id="c", node_id="n", workload_type="training"),
        RunQueue(ear, clock),
        CollectiveTracker(),
        clock,
        PushPace(interval_ns=5 * NS_PER_S, early_gap_ns=NS_PER_S),
        DeviceCollectives(rings),
    )
    yield pusher
    pusher.finish()


@pytest.fixture
def forge(rings):
    """Makes rings of this process with one communicator and any values, as any user can for its own process."""
    files = []

    def make(place, name=f"{PID}-forged.ring"):
        header = np.zeros(1, HEADER)
        header["magic"], header["version"], header["n_records"] = MAGIC, VERSION, 1
        header["record_bytes"], header["n_comms"] = RECORD.itemsize, 1
        row = np.zeros(1, PLACE)
        row["is_live"] = 1
        for key, value in place.items():
            row[key] = value
        folder = rings / f"ingero-nccl-{os.geteuid()}"
        folder.mkdir(exist_ok=True)
        file = (folder / name).open("w+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(header.tobytes() + row.tobytes() + bytes(RECORD.itemsize))
        files.extend((file, mmap.mmap(file.fileno(), 0)))
        return row, lambda: os.pwrite(file.fileno(), row.tobytes(), HEADER.itemsize)

    yield make
    for file in files:
        file.close()


def look(pusher, clock, after_ns):
    clock.advance(after_ns)
    pusher.push_due()


def test_device_rows_go_out_with_the_launchers_rank_and_wall_time(join, pusher, clock, ear):
    pusher.note_process(PID, 11)
    comm = join(comm=0xAB, rank=3, n_ranks=8)
    for i in range(3):
        comm.play(1000 + i * NS_PER_MS, 2000 + i * NS_PER_MS)
    look(pusher, clock, 6 * NS_PER_S)
    (run,) = ear.runs
    assert (run.rank.rank, run.comm, run.comm_rank, run.n_ranks) == (11, f"{0xAB:016x}", 3, 8)
    assert run.clock is ClockKind.DEVICE
    assert run.ops["own_ns"].tolist() == [-1, NS_PER_MS - 1000, NS_PER_MS - 1000]
    assert abs(int(run.ops["entry_ns"][-1]) - clock.wall_ns()) < 10 * NS_PER_S


def test_without_a_launchers_rank_the_widest_communicators_is_taken(join, pusher, clock, ear):
    pusher.note_process(PID, -1)
    for comm in (join(comm=1, rank=0, n_ranks=2), join(comm=2, rank=6, n_ranks=8)):
        comm.play(1000, 2000)
    look(pusher, clock, 6 * NS_PER_S)
    assert {run.rank.rank for run in ear.runs} == {6}


def test_a_rank_that_hangs_is_told_from_the_plug_ins_word_alone(join, pusher, clock, ear):
    pusher.note_process(PID, 2)
    comm = join(comm=0xCC, rank=2, n_ranks=4)
    comm.play(1000, 2000)
    comm.enqueue(func=b"ReduceScatter")
    look(pusher, clock, NS_PER_S)
    assert not ear.standings
    look(pusher, clock, 10 * NS_PER_S)
    (standing,) = ear.standings
    assert (standing.rank.rank, standing.comm) == (2, f"{0xCC:016x}")
    assert (standing.comm_rank, standing.n_ranks) == (2, 4)
    assert (standing.entered, standing.left) == (2, 1)
    assert standing.op is CollectiveOp.REDUCE_SCATTER
    assert standing.still_ns >= 9 * NS_PER_S


def test_what_was_told_last_is_sent_when_the_agent_ends(join, pusher, clock, ear):
    pusher.note_process(PID, 0)
    join().play(1000, 2000)
    pusher.finish()
    assert [run.clock for run in ear.runs] == [ClockKind.DEVICE]


def test_a_process_that_ended_is_asked_no_more(join, pusher, clock, ear, rings):
    pusher.note_process(PID, 0)
    comm = join()
    comm.play(1000, 2000)
    look(pusher, clock, NS_PER_S)
    pusher.note_exit(PID)
    look(pusher, clock, NS_PER_S)
    assert [(one.is_gone, one.entered) for one in ear.standings] == [(True, 1)]
    comm.play(3000, 4000)
    look(pusher, clock, 10 * NS_PER_S)
    assert sum(len(run.ops) for run in ear.runs) == 1


FORGED = {"entered": 1 << 63, "left": 1 << 63, "entry_ns": 1 << 62, "n_ranks": 0, "rank": 1 << 20}


@pytest.mark.parametrize("name", FORGED)
def test_a_place_without_sense_is_refused_once_and_the_others_are_told(
    forge, join, pusher, clock, ear, name
):
    pusher.note_process(PID, 2)
    join(comm=0xCC, rank=2, n_ranks=4).play(1000, 2000)
    forge({"comm": 0xDD, "entered": 5, "entry_ns": 1, "n_ranks": 4} | {name: FORGED[name]})
    look(pusher, clock, 20 * NS_PER_S)
    look(pusher, clock, 20 * NS_PER_S)
    told = {one.comm for one in ear.standings}
    if name == "left":  # read while it was written: the rank left what it entered
        assert told == {f"{0xCC:016x}", f"{0xDD:016x}"}
        assert pusher.count_outcomes().plugin_refused == 0
    else:
        assert told == {f"{0xCC:016x}"}
        assert pusher.count_outcomes().plugin_refused == 1


def test_a_pause_of_the_job_does_not_hide_that_its_process_stands_soon_afterwards(
    forge, pusher, clock, ear
):
    pusher.note_process(PID, 2)
    place, write = forge({"comm": 0xDD, "entered": 1, "entry_ns": clock.mono_ns(), "n_ranks": 4})
    for gap_s in (*[1] * 8, 600, 1):
        look(pusher, clock, gap_s * NS_PER_S)
        place["entered"] += 1
        place["entry_ns"] = clock.mono_ns()
        write()
    pusher.push_due()
    ear.exports.clear()
    look(pusher, clock, 11 * NS_PER_S)
    assert [(one.entered, one.still_ns) for one in ear.standings] == [(11, 11 * NS_PER_S)]


def test_one_process_has_a_bounded_number_of_rings(forge, pusher, clock):
    for number in range(2 * MAX_RINGS):
        forge({"comm": number + 1, "entered": 1, "n_ranks": 2}, name=f"{PID}-{number}.ring")
    pusher.note_process(PID, 2)
    look(pusher, clock, NS_PER_S)
    look(pusher, clock, 20 * NS_PER_S)
    assert len(pusher._device.positions(PID)) == MAX_RINGS


def test_communicators_without_a_place_are_counted_with_the_agents_own_counts(join, pusher):
    for i in range(130):
        join(comm=1 + i)
    pusher.note_process(PID, 1)
    pusher.push_due()
    outcomes = pusher.count_outcomes()
    assert outcomes.build_record()["plugin_unplaced"] == 2
    assert outcomes.describe_loss() == "; 2 communicators on which no hang is seen"
    page = PrometheusPage()
    page.take(tuple(iter_collective_series(outcomes)), 0)
    assert "ingero_agent_plugin_communicators_unplaced_total 2" in page.render().splitlines()
