"""What Fleet does not take waits on the agent's disk, and is delivered whole, in order and once."""

import pytest
from tests.agent.collectives.traced_rank import Job, seqs

from ingero.agent.collectives.run_queue import DRAIN_SPEED
from ingero.agent.health.spill import Spill, SpillSettings
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.health import iter_collective_series
from ingero.testing.clock import ManualClock
from ingero.testing.open_files import no_more_files
from ingero.units import NS_PER_S
from ingero.wire.collectives import read_collectives


@pytest.fixture
def spilling(tmp_path):
    """A job whose agent keeps on disk what Fleet does not take; called again it is the next agent on that disk."""
    clock, spills = ManualClock(), []

    def start(**settings):
        for earlier in spills:
            earlier.close()  # as its process's end does
        spills.append(Spill(SpillSettings(tmp_path / "spill", **settings), clock))
        return Job(spills[-1], clock)

    yield start
    for one in spills:
        one.close()


def is_ready(job, *, is_there):
    job.ear.is_taking = job.ear.is_there = is_there
    return job


def drain(job):
    while job.pusher.count_outcomes().spill_batches:
        job.stand(1)


def test_half_an_hour_without_fleet_is_delivered_whole_in_order_and_once_by_the_agents_that_follow(
    spilling,
):
    job = is_ready(spilling(), is_there=False)
    job.run(900, own_ns=NS_PER_S)
    n_first = job.seq
    assert job.pusher.count_outcomes().spill_batches > 120
    following = is_ready(spilling(), is_there=False)  # kill -9: nothing is said, nothing flushed
    following.seq = n_first
    following.run(900, own_ns=NS_PER_S)
    assert job.pusher.count_outcomes().dropped == following.pusher.count_outcomes().dropped == 0
    is_ready(following, is_there=True)
    following.ear.exports.clear()
    drain(following)
    following.run(6, own_ns=NS_PER_S)
    runs, _ = following.ear.take()
    delivered = seqs(runs)
    before = [seq for seq in delivered if seq <= n_first]
    assert n_first - len(before) < 15, "of the killed agent only what was not due yet"
    assert delivered == [*range(1, len(before) + 1), *range(n_first + 1, delivered[-1] + 1)]
    assert following.seq - delivered[-1] < 10, "the newest wait for the next push"
    assert following.pusher.count_outcomes().taken_late > 1700


def test_a_fleet_that_is_back_gets_late_batches_at_a_bounded_pace_and_with_how_late_they_are(
    spilling,
):
    job = is_ready(spilling(), is_there=False)
    job.run(600, own_ns=NS_PER_S)
    is_ready(job, is_there=True)
    job.stand(7)  # until the next try
    job.ear.exports.clear()
    job.stand(3)
    exports = list(job.ear.exports)
    reads = [read_collectives(export) for export in exports]
    late_s = [ns / NS_PER_S for read in reads for ns in read.late_ns]
    assert len(late_s) <= 3 * DRAIN_SPEED / 5 + 8
    assert late_s
    assert max(late_s) < 611
    assert min(late_s) > 300
    drain(job)
    job.ear.exports.clear()
    job.run(6, own_ns=NS_PER_S)
    (read,) = [read_collectives(export) for export in job.ear.exports if export.n_items][-1:]
    assert read.late_ns == [0]


def test_new_operations_wait_behind_those_on_disk(spilling):
    job = is_ready(spilling(), is_there=False)
    job.run(60, own_ns=NS_PER_S)
    is_ready(job, is_there=True)
    job.ear.exports.clear()
    job.run(60, own_ns=NS_PER_S)
    runs, _ = job.ear.take()
    assert seqs(runs) == list(range(1, len(seqs(runs)) + 1))
    assert job.pusher.count_outcomes().spill_batches == 0


def test_nothing_overtakes_batches_on_disk_that_cannot_be_read_for_now(spilling):
    job = is_ready(spilling(), is_there=False)
    job.run(60, own_ns=NS_PER_S)
    is_ready(job, is_there=True)
    job.ear.exports.clear()
    with no_more_files():
        job.run(60, own_ns=NS_PER_S)
    early = seqs(job.ear.take()[0])
    assert len(early) < 10, "only the batch that had been read before"
    outcomes = job.pusher.count_outcomes()
    assert outcomes.spill_failed > 0
    assert "Too many open files" in outcomes.spill_problem
    drain(job)
    job.run(6, own_ns=NS_PER_S)
    delivered = early + seqs(job.ear.take()[0])
    assert delivered == list(range(1, len(delivered) + 1))
    assert len(delivered) > 110
    assert job.pusher.count_outcomes().spill_damaged == 0


@pytest.mark.parametrize("reply", [{"is_retryable": True}, {"retry_after_ns": NS_PER_S}])
def test_a_proxy_that_says_fleet_is_away_for_long_costs_nothing(spilling, reply):
    job = is_ready(spilling(), is_there=False)
    job.ear.is_there, job.ear.reply = True, reply
    job.run(120, own_ns=NS_PER_S)
    job.ear.reply = {}
    is_ready(job, is_there=True)
    job.ear.exports.clear()
    drain(job)
    assert job.pusher.count_outcomes().dropped == 0
    assert seqs(job.ear.take()[0])[0] == 1


def test_what_is_refused_for_good_is_dropped_from_disk_and_counted(spilling):
    job = is_ready(spilling(), is_there=True)
    job.ear.is_taking = False
    job.run(60, own_ns=NS_PER_S)
    outcomes = job.pusher.count_outcomes()
    assert outcomes.dropped > 0
    job.ear.is_taking = True
    job.ear.exports.clear()
    drain(job)
    assert seqs(job.ear.take()[0])[0] == outcomes.dropped + 1


def test_what_the_disk_gives_up_is_counted_with_what_is_dropped_and_told(spilling):
    job = is_ready(spilling(max_bytes=1 << 16), is_there=False)
    job.run(300, own_ns=NS_PER_S)
    outcomes = job.pusher.count_outcomes()
    assert outcomes.dropped > 0
    assert outcomes.spill_bytes <= 1 << 16
    assert f"{outcomes.dropped} collectives not sent" in outcomes.describe_loss()
    assert (
        f"{outcomes.spill_batches} batches of collectives wait on disk" in outcomes.describe_loss()
    )
    page = PrometheusPage()
    page.take(tuple(iter_collective_series(outcomes)), 0)
    lines = page.render().splitlines()
    assert f"ingero_agent_spill_size {outcomes.spill_bytes}" in lines
    assert 'ingero_agent_spill_faults_total{outcome="failed"} 0' in lines


def test_what_lies_on_disk_and_is_no_batch_is_set_aside_and_the_next_is_sent(spilling):
    job = is_ready(spilling(), is_there=False)
    spill = job.pusher._queue.spill
    spill.put(b"no protobuf", 1)
    job.run(12, own_ns=NS_PER_S)
    is_ready(job, is_there=True)
    job.ear.exports.clear()
    drain(job)
    assert seqs(job.ear.take()[0])[0] == 1
    outcomes = job.pusher.count_outcomes()
    assert outcomes.spill_damaged == 1
    assert "set aside" in outcomes.describe_loss()
