"""When batches go out, whose they are and what they cost."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tests.agent.collectives.traced_rank import PID, STEP_NS, Job, seqs

from ingero.agent.collectives.newest import MAX_COMMUNICATORS
from ingero.agent.collectives.push import STILL_NS, UsualTimes
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.health import iter_collective_series
from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import read_trace
from ingero.model.collectives import COLLECTIVE_OP
from ingero.units import NS_PER_MS, NS_PER_S


def test_even_job_is_pushed_at_the_interval_and_every_operation_once(job):
    job.run(21)
    runs, standings = job.ear.take()
    assert len(runs) == 4
    assert seqs(runs) == list(range(1, len(seqs(runs)) + 1))
    assert standings == []
    assert {run.rank.rank for run in runs} == {3}
    assert job.pusher.counts.n_early == 0


@pytest.mark.parametrize(
    "change",
    [{"own_ns": round(1.3 * STEP_NS)}, {"inside_ns": 17 * NS_PER_MS}],
    ids=["slow", "waits"],
)
def test_change_of_own_time_or_of_time_inside_is_pushed_within_a_second(job, change):
    job.run(11)
    job.ear.take()
    job.run(2, **change)
    runs, _ = job.ear.take()
    assert len(runs) >= 2
    assert job.pusher.counts.n_early >= 2


def test_what_fleet_did_not_take_while_it_was_away_is_sent_again_whole_and_in_order(job):
    job.ear.is_taking = job.ear.is_there = False
    job.run(61)
    refused, _ = job.ear.take()
    job.ear.is_taking = job.ear.is_there = True
    job.run(6)
    runs, _ = job.ear.take()
    assert refused
    assert seqs(runs) == list(range(1, len(seqs(runs)) + 1))
    assert job.pusher.counts.n_failed == len(refused)


def test_what_fleet_refuses_again_and_again_is_dropped_and_counted_and_the_next_is_sent(job):
    job.ear.is_taking = False
    job.run(26)
    n_dropped = job.pusher.counts.n_dropped
    assert n_dropped > 0
    job.ear.take()
    job.ear.is_taking = True
    job.run(6)
    runs, _ = job.ear.take()
    assert seqs(runs)[0] == n_dropped + 1


def test_what_fleet_refuses_of_a_request_that_it_takes_is_no_operation_that_it_took(job):
    job.ear.n_rejected = 1  # of the one record that each request has
    job.run(6)
    n_pushed = len(seqs(job.ear.take()[0]))
    counts = job.pusher.counts
    assert n_pushed > 0
    assert (counts.n_ops, counts.n_dropped) == (0, n_pushed)
    job.ear.n_rejected = 0
    job.run(6)
    assert (counts.n_ops, counts.n_dropped) == (len(seqs(job.ear.take()[0])), n_pushed)


def test_what_fleet_will_never_hear_of_is_in_the_account_the_series_and_the_line(job):
    assert job.pusher.count_outcomes().describe_loss() == ""
    job.ear.is_taking = False
    job.run(26)
    job.enter_unknown()
    collective_counts = job.pusher.count_outcomes()
    assert collective_counts.dropped == job.pusher.counts.n_dropped > 0
    assert collective_counts.waiting > 0
    assert (collective_counts.taken, collective_counts.unknown_communicator) == (0, 1)
    assert collective_counts.requests_failed == len(job.ear.exports)
    assert (
        collective_counts.describe_loss()
        == f"; {collective_counts.dropped + 1} collectives not sent"
    )
    assert collective_counts.build_record()["dropped"] == collective_counts.dropped
    page = PrometheusPage()
    page.take(tuple(iter_collective_series(collective_counts)), 0)
    lines = page.render().splitlines()
    assert (
        f'ingero_agent_collectives_total{{outcome="dropped"}} {collective_counts.dropped}' in lines
    )
    assert 'ingero_agent_collectives_total{outcome="unknown_communicator"} 1' in lines
    assert f"ingero_agent_collectives_waiting {collective_counts.waiting}" in lines
    failed = 'ingero_agent_collective_pushes_total{outcome="failed"}'
    assert f"{failed} {collective_counts.requests_failed}" in lines


def test_rank_that_no_launcher_told_is_its_place_on_the_widest_communicator(job):
    job.pusher.note_process(PID, -1)
    job.run(6)
    runs, _ = job.ear.take()
    assert {run.rank.rank for run in runs} == {1}


def workers(runs):
    return {(run.rank.rank, run.rank.job) for run in runs}


@pytest.mark.parametrize(("job_id", "told"), [("", str(PID + 1)), ("a", f"a/{PID + 1}")])
def test_two_live_processes_of_one_rank_are_two_workers(job, job_id, told):
    for pid in (PID, PID + 1):
        job.pusher.note_process(pid, 3, job_id)
        job.run(6, pid=pid)
    job.run(6)
    assert workers(job.ear.take()[0]) == {(3, job_id), (3, told)}


def test_a_launcher_with_the_rank_of_its_child_does_not_take_its_name(job):
    job.pusher.note_process(
        PID, 2, "7"
    )  # torchrun under srun: it has SLURM_PROCID, and no collectives
    job.pusher.note_process(PID + 1, 2, "7")
    job.run(6, pid=PID + 1)
    assert workers(job.ear.take()[0]) == {(2, "7")}


def test_ranks_of_jobs_that_their_launcher_named_are_two_workers(job):
    for pid, name in ((PID, "a"), (PID + 1, "b")):
        job.pusher.note_process(pid, 3, name)
        job.run(6, pid=pid)
    assert workers(job.ear.take()[0]) == {(3, "a"), (3, "b")}


def test_a_process_in_the_place_of_one_that_ended_is_the_same_worker(job):
    job.run(6)
    job.pusher.note_exit(PID)
    job.pusher.note_process(PID + 1, 3)
    job.run(6, pid=PID + 1)
    runs, gone = job.ear.take()
    assert workers(runs) == {(3, "")}
    assert {(one.rank.job, one.is_gone) for one in gone} == {("", True)}
    job.pusher.note_process(PID + 2, 3)
    job.run(6, pid=PID + 2)
    assert (3, str(PID + 2)) in workers(job.ear.take()[0])


def test_wall_clock_that_steps_does_not_disorder_entries(job):
    job.run(6)
    job.clock.step_wall(-3600 * NS_PER_S)
    job.run(6)
    runs, _ = job.ear.take()
    entries = np.concatenate([run.ops["entry_ns"] for run in runs])
    assert (np.diff(entries) > 0).all()


def test_usual_is_not_said_to_move_by_jitter():
    ops = np.zeros(400, COLLECTIVE_OP)
    ops["own_ns"] = STEP_NS + np.random.default_rng(0).normal(0, STEP_NS / 100, 400)
    ops["inside_ns"] = NS_PER_MS
    usual = UsualTimes()
    moves = [usual.add(part) for part in np.split(ops, 100)]
    assert not any(moves)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_first_bucket_of_a_step_moves_what_is_usual_on_a_gpu(rank):
    """Rank 2 gets twice the work, and rank 0 waits for it, in one of four operations; the three others stay as they are."""
    path = Path(__file__).parents[2] / "data" / "gpu_jobs" / "ddp.uneven-2-2x.first.parquet"
    onset_ns = read_labels(path)["onset_s"] * NS_PER_S
    runs = [run for of in read_trace(path).runs for run in of if run.rank.rank == rank]
    ops = max(runs, key=lambda run: len(run.ops)).ops
    usual = UsualTimes()
    rounds = np.flatnonzero(np.diff(ops["entry_ns"] // (NS_PER_S // 5))) + 1
    moved_ns = [int(part["entry_ns"][0]) for part in np.split(ops, rounds) if usual.add(part)]
    steady = [at for at in moved_ns if 15 * NS_PER_S < at < onset_ns]
    assert steady == []
    # The program's host runs ahead of its GPU by a second or so: the fault begins later than it was asked for.
    assert min(at for at in moved_ns if at > onset_ns) - onset_ns < 3 * NS_PER_S


def test_a_job_that_makes_groups_for_days_costs_no_more_memory_and_no_more_reports_each_day(job):
    job.use_groups(2 * MAX_COMMUNICATORS, first=1)
    tracemalloc.start()
    job.use_groups(2 * MAX_COMMUNICATORS, first=10_000)
    n_bytes, _ = tracemalloc.get_traced_memory()
    job.use_groups(4 * MAX_COMMUNICATORS, first=20_000)
    n_bytes_after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes_after < 1.2 * n_bytes
    job.ear.take()
    job.stand(STILL_NS // NS_PER_S)
    job.ear.take()
    job.stand(1)
    _, standings = job.ear.take()
    newest = 20_000 + 4 * MAX_COMMUNICATORS
    assert {int(one.comm, 16) for one in standings} == set(
        range(newest - MAX_COMMUNICATORS, newest)
    )
    assert len(standings) == MAX_COMMUNICATORS


def test_a_communicator_that_is_used_again_and_again_outlives_all_that_were_made_meanwhile(job):
    job.run(2)
    seq = job.seq
    for first in range(1000, 3000, 100):
        job.use_groups(100, first)
        seq += 1
        job.seq = seq - 1
        job.enter()
        job.leave(NS_PER_MS)
    job.clock.advance(1000 * NS_PER_S)
    job.stand(1)
    _, standings = job.ear.take()
    assert {one.entered for one in standings if int(one.comm, 16) == 0xAB} == {seq}


def test_operations_go_out_with_the_use_of_the_cpu_limit_at_their_time():
    job = Job()
    used = iter([700, 900])
    job.pusher.on_finished = lambda _pid, _rank, _ops: next(used, 0)
    for _ in range(2):
        job.enter()
        job.leave(NS_PER_MS)
        job.clock.advance(5 * NS_PER_S)
        job.pusher.push_due()
    runs, _ = job.ear.take()
    assert [run.ops["limit_use"].tolist() for run in runs] == [[700], [900]]
