"""What is said of ranks that stand still, and of processes that ended."""

import subprocess

import numpy as np
import pytest
from tests.agent.collectives.traced_rank import PID, STEP_NS, Job, seqs
from tests.support.holders import HOLDERS

from ingero.agent.capture.discover.processes import is_stopped
from ingero.agent.collectives.push import STILL_NS, STILL_PERIODS
from ingero.fleet.processors.collectives.progress import FRESH_NS
from ingero.model.collectives import UNKNOWN_NS, ClockKind
from ingero.model.progress import Ending
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S


def step_through(job, gaps_s):
    """Operations with so many seconds after each."""
    for gap_s in gaps_s:
        job.enter()
        job.leave(NS_PER_MS)
        job.stand(gap_s)


def test_rank_that_waits_in_a_collective_tells_what_it_entered_and_left(job):
    job.run(6)
    job.ear.take()
    job.enter()
    job.stand(STILL_NS / NS_PER_S + 2)
    runs, standings = job.ear.take()
    assert standings
    last = standings[-1]
    assert (last.entered, last.left, last.is_gone) == (job.seq, job.seq - 1, False)
    assert (last.rank.rank, last.comm_rank, last.n_ranks) == (3, 1, 4)
    assert seqs(runs)[-1] == job.seq - 1, "what it did before is pushed with it"
    gaps = np.diff([one.still_ns for one in standings])
    assert (gaps >= NS_PER_S).all()


def test_what_is_said_of_a_rank_that_stands_is_repeated_before_fleet_forgets_it():
    """Also where one of these is lost, and whatever the push interval is."""
    job = Job(interval_s=60)
    job.run(6)
    job.enter()
    job.stand(300)
    _, standings = job.ear.take()
    still_ns = np.array([one.still_ns for one in standings])
    assert still_ns[-1] > 290 * NS_PER_S
    assert (2 * np.diff(still_ns) < FRESH_NS).all()
    assert len(still_ns) < 120, "less often after a minute"


def test_processes_that_end_beside_it_keep_nothing_back_of_a_rank_that_stands():
    job = Job(interval_s=60)
    job.run(6)
    job.enter()
    job.stand(90)
    job.ear.take()
    for number in range(1, 16):
        job.pusher.note_process(PID + number, 3 + number)
        job.enter(PID + number)
        job.pusher.note_exit(PID + number)
        job.stand(3)
    _, standings = job.ear.take()
    still_ns = [one.still_ns for one in standings if not one.is_gone]
    assert len({one.rank.rank for one in standings if one.is_gone}) > 10
    assert len(still_ns) >= 8
    assert (2 * np.diff(still_ns) < FRESH_NS).all()


def test_rank_that_stopped_outside_collectives_tells_that_nothing_is_in_flight(job):
    job.run(6)
    job.ear.take()
    job.stand(STILL_NS / NS_PER_S + 1)
    _, standings = job.ear.take()
    assert (standings[-1].entered, standings[-1].left) == (job.seq, job.seq)


def test_moving_rank_tells_no_standing_and_a_recovered_one_stops_telling(job):
    job.run(6)
    job.stand(6)
    job.ear.take()
    job.run(6)
    _, standings = job.ear.take()
    assert standings == []


def test_a_communicator_that_is_seldom_used_does_not_hide_that_its_process_stands(job):
    for _ in range(2):
        job.enter(comm=0xCC)
        job.leave(NS_PER_MS)
        job.stand(1)
        job.clock.advance(300 * NS_PER_S)
    job.run(6)
    job.ear.take()
    job.enter()
    job.stand(STILL_NS / NS_PER_S + 2)
    _, standings = job.ear.take()
    assert {one.comm for one in standings} == {f"{0xAB:016x}", f"{0xCC:016x}"}


def test_a_process_that_steps_slowly_stands_after_ten_periods_of_its_busiest_communicator(job):
    for number in range(8):
        job.enter(comm=0xCC if number % 4 == 0 else 0xAB)
        job.leave(NS_PER_MS)
        job.stand(1)
        job.clock.advance(19 * NS_PER_S)
    job.stand(150)
    assert job.ear.take()[1] == []
    job.stand(150)
    assert job.ear.take()[1]


@pytest.mark.parametrize("n_before", [0, 1, 5, 60])
@pytest.mark.parametrize("n_after", [0, 1, 8])
def test_a_pause_of_the_job_does_not_hide_that_its_process_stands_soon_afterwards(
    job, n_before, n_after
):
    """A checkpoint, or what is compiled after the first operation of a communicator."""
    step_through(job, [1] * (n_before + 1))
    job.clock.advance(600 * NS_PER_S)
    step_through(job, [1] * n_after)
    job.ear.take()
    job.enter()
    job.stand(STILL_PERIODS + 2)
    assert job.ear.take()[1]


def test_a_process_whose_steps_become_slower_soon_does_not_stand_any_more(job):
    step_through(job, [1] * 60 + [20] * 6)
    job.ear.take()
    step_through(job, [20] * 10)
    assert job.ear.take()[1] == []


def test_ended_process_is_told_at_once_and_once(job):
    job.run(6)
    job.ear.take()
    job.pusher.note_exit(PID)
    job.stand(0.4)
    runs, standings = job.ear.take()
    assert [one.is_gone for one in standings] == [True]
    assert seqs(runs)[-1] == job.seq, "its last operations are not lost"
    job.stand(8)
    assert job.ear.take()[1] == []


def test_operations_that_nobody_waited_for_before_the_process_ended_go_out_without_an_end(job):
    job.run(6)
    job.ear.take()
    job.enter()
    job.clock.advance(STEP_NS)
    job.enter()
    job.pusher.note_exit(PID)
    job.stand(0.4)
    runs, _ = job.ear.take()
    assert seqs(runs)[-2:] == [job.seq - 1, job.seq]
    last = runs[-1]
    assert (last.clock, last.ops["inside_ns"].tolist()) == (ClockKind.ENQUEUE, [UNKNOWN_NS] * 2)
    assert job.pusher.count_outcomes().without_end == 2


def test_what_was_entered_right_before_the_agent_ends_is_sent(job):
    job.run(6)
    job.enter()
    job.leave(NS_PER_MS)
    job.enter()
    job.pusher.finish()
    runs, _ = job.ear.take()
    assert seqs(runs) == list(range(1, job.seq + 1))


def test_how_a_process_ended_is_told_with_how_long_ago_that_was(job):
    job.run(6)
    job.ear.take()
    job.pusher.note_exit(PID, Ending(job.clock.mono_ns(), signal=9))
    job.stand(0.4)
    (told,) = job.ear.take()[1]
    assert told.ending == Ending(200 * NS_PER_MS, signal=9)


@pytest.mark.parametrize(
    "reply", [{"is_cut_off": True}, {"is_retryable": True}, {"retry_after_ns": 1}]
)
def test_how_a_process_ended_is_told_again_until_fleet_takes_it(job, reply):
    job.run(6)
    job.pusher.note_exit(PID, Ending(job.clock.mono_ns(), signal=9))
    job.ear.is_taking, job.ear.reply = False, reply
    job.ear.take()
    job.stand(5)
    told = job.ear.take()[1]
    assert len(told) == 5, "every second"
    job.ear.is_taking = True
    job.stand(3)
    (told,) = job.ear.take()[1]
    assert told.ending is not None
    assert told.ending.signal == 9
    assert 5 * NS_PER_S <= told.ending.at_ns <= 7 * NS_PER_S


def test_how_a_process_ended_is_not_told_again_when_fleet_refused_it_or_could_not_use_it(job):
    job.run(6)
    job.pusher.note_exit(PID, Ending(job.clock.mono_ns(), signal=9))
    job.ear.is_taking = False
    job.stand(5)
    assert len(job.ear.take()[1]) == 1
    job.run(6)
    job.pusher.note_exit(PID, Ending(job.clock.mono_ns(), signal=9))
    job.ear.is_there = False
    job.stand(70)
    job.ear.take()
    job.ear.is_taking = job.ear.is_there = True
    job.stand(3)
    assert job.ear.take()[1] == []


def test_how_a_process_ended_is_not_told_any_more_once_another_one_runs_in_its_place(job):
    job.run(6)
    job.pusher.note_exit(PID, Ending(job.clock.mono_ns(), signal=9))
    job.ear.is_taking = job.ear.is_there = False
    job.stand(2)
    job.pusher.note_process(PID + 1, 3)
    job.run(2, pid=PID + 1)
    job.ear.take()
    job.ear.is_taking = job.ear.is_there = True
    job.run(8, pid=PID + 1)
    runs, told = job.ear.take()
    assert {run.rank.rank for run in runs} == {3}
    assert told == []


def test_a_rank_is_not_said_to_be_inside_of_a_communicator_that_it_destroyed(job):
    job.run(5)
    job.enter()  # nobody waits for this one
    job.destroy()
    job.stand(10)
    _, standings = job.ear.take()
    assert {(one.entered, one.left) for one in standings} == {(job.seq, job.seq)}


def test_agent_that_ends_with_its_process_still_tells_how_that_ended(job):
    job.run(6)
    job.ear.take()
    job.pusher.note_exit(PID, Ending(job.clock.mono_ns(), signal=9))
    job.pusher.finish()
    assert [one.ending for one in job.ear.take()[1]] == [Ending(0, signal=9)]


@pytest.mark.parametrize("holder", HOLDERS)
def test_rank_whose_process_is_stopped_says_so_while_it_stands(job, holder):
    with subprocess.Popen(["sleep", "600"]) as process, holder(process) as (hold, _):
        job.run(6, pid=process.pid)
        job.ear.take()
        job.stand(STILL_NS / NS_PER_S + 1)
        runs_on = job.ear.take()[1][-1]
        hold()
        wait_until(lambda: is_stopped(process.pid))
        job.stand(2)
        stopped = job.ear.take()[1][-1]
    assert (runs_on.is_stopped, stopped.is_stopped) == (False, True)
