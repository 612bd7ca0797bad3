"""Whom a standing job waits for, from what its agents say."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from tests.fleet.processors.collectives.judged import Judged

from ingero.fleet.processors.collectives import progress
from ingero.fleet.processors.collectives.progress import (
    ENDED_NS,
    FRESH_NS,
    MAX_COMMS,
    PATIENCE_NS,
    SILENT_NS,
    ProgressTracker,
)
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank
from ingero.model.hang import HangCause
from ingero.model.progress import Ending, RankProgress
from ingero.units import NS_PER_S

COMM = "00000000000000ab"
N = 4


def rank_of(number):
    return Rank("c", f"n{number}", number)


def moving(number, last_seq):
    ops = np.zeros(1, COLLECTIVE_OP)
    ops["seq"] = last_seq
    return CollectiveRun(rank_of(number), COMM, number, N, ClockKind.SYNC, ops)


def standing(number, entered, left, **changes):
    told = RankProgress(
        rank_of(number), COMM, number, N, entered, left, CollectiveOp.ALL_REDUCE, 7 * NS_PER_S
    )
    return replace(told, **changes)


@pytest.fixture
def tracker():
    tracker = ProgressTracker(900 * NS_PER_S)
    tracker.note_moving([moving(number, 9) for number in range(N)], 0)
    return tracker


def test_rank_that_did_not_enter_is_named_and_blocks_all_others(tracker):
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)] + [standing(2, 9, 9)], NS_PER_S)
    report, standing_s = tracker.find_hang("c", 2 * NS_PER_S)
    (root,) = report.roots
    assert (root.rank, root.cause, root.blocks) == (2, HangCause.ABSENT, (0, 1, 3))
    assert (root.missing_seq, root.last_left) == (10, 9)
    assert standing_s == pytest.approx(8.0)


def test_a_rank_whose_process_runs_is_named_when_others_have_waited_for_it_for_long(tracker):
    lately = PATIENCE_NS - 2 * NS_PER_S
    waiting = [standing(n, 10, 9, still_ns=lately) for n in (0, 1, 3)]
    tracker.add([*waiting, standing(2, 9, 9)], NS_PER_S)
    report, standing_s = tracker.find_hang("c", NS_PER_S)
    assert (report.roots, len(report.waits)) == ((), 3)
    assert standing_s == pytest.approx(lately / NS_PER_S)
    assert tracker.find_hang("c", 3 * NS_PER_S - 1)[0].roots == ()
    assert tracker.find_hang("c", 3 * NS_PER_S)[0].missing_ranks == (2,)


def test_a_stopped_rank_is_named_at_once(tracker):
    waiting = [standing(n, 10, 9, still_ns=NS_PER_S) for n in (0, 1, 3)]
    tracker.add([*waiting, standing(2, 9, 9, still_ns=NS_PER_S, is_stopped=True)], NS_PER_S)
    (root,) = tracker.find_hang("c", NS_PER_S)[0].roots
    assert (root.rank, root.cause) == (2, HangCause.STOPPED)


def test_nobody_is_named_while_a_members_agent_may_be_about_to_speak(tracker):
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)], NS_PER_S)
    assert tracker.find_hang("c", 2 * NS_PER_S)[0].roots == ()


def test_member_that_fell_silent_is_named_after_a_while(tracker):
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)], SILENT_NS)
    (root,) = tracker.find_hang("c", SILENT_NS)[0].roots
    assert (root.rank, root.cause) == (2, HangCause.SILENT)


def test_member_whose_process_ended_is_named_at_once(tracker):
    tracker.add([standing(2, 9, 9, is_gone=True)], NS_PER_S)
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)], NS_PER_S)
    (root,) = tracker.find_hang("c", NS_PER_S)[0].roots
    assert (root.rank, root.cause) == (2, HangCause.SILENT)


@pytest.mark.parametrize(("last_seq", "late_ns"), [(9, 0), (9, NS_PER_S), (12, NS_PER_S)])
def test_what_a_process_did_before_its_end_does_not_bring_it_back(tracker, last_seq, late_ns):
    tracker.add([standing(2, 9, 9, is_gone=True)], NS_PER_S)
    tracker.note_moving([moving(2, last_seq)], NS_PER_S, [late_ns])
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)], NS_PER_S)
    (root,) = tracker.find_hang("c", NS_PER_S)[0].roots
    assert (root.rank, root.cause) == (2, HangCause.SILENT)


def test_job_that_ended_as_a_whole_is_no_hang(tracker):
    tracker.add([standing(n, 9, 9, is_gone=True) for n in range(N)], NS_PER_S)
    report, _ = tracker.find_hang("c", NS_PER_S)
    assert (report.roots, report.waits) == ((), ())


def test_job_that_pauses_outside_collectives_is_no_hang(tracker):
    tracker.add([standing(n, 9, 9) for n in range(N)], NS_PER_S)
    report, standing_s = tracker.find_hang("c", NS_PER_S)
    assert (report.roots, standing_s) == ((), 0.0)


def test_ranks_whose_waits_were_not_seen_are_no_hang(tracker):
    tracker.add([standing(n, 10, None) for n in (0, 1, 3)] + [standing(2, 9, None)], NS_PER_S)
    assert tracker.find_hang("c", NS_PER_S)[0].roots == ()


def test_what_is_known_of_a_rank_is_forgotten_when_the_rank_moves_on_or_time_does(tracker):
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)] + [standing(2, 9, 9)], NS_PER_S)
    tracker.note_moving([moving(n, 11) for n in range(N)], 2 * NS_PER_S)
    assert tracker.find_hang("c", 2 * NS_PER_S)[0].roots == ()
    tracker.add([standing(n, 12, 11) for n in range(N)], 3 * NS_PER_S)
    assert tracker.find_hang("c", 4 * NS_PER_S + FRESH_NS)[0].waits == ()


def test_two_jobs_whose_ranks_have_the_same_numbers_are_judged_apart(tracker):
    def other(one):
        rank = replace(one.rank, node_id="n0", job="7")
        return replace(one, rank=rank, comm="00000000000000cd")

    tracker.note_moving([other(moving(n, 9)) for n in range(N)], 0)
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)] + [standing(2, 9, 9)], NS_PER_S)
    alone, _ = tracker.find_hang("c", 2 * NS_PER_S)
    assert [(r.rank, r.node_id, r.job, r.blocks) for r in alone.roots] == [(2, "n2", "", (0, 1, 3))]
    tracker.add(
        [other(standing(n, 10, 9)) for n in (0, 2, 3)] + [other(standing(1, 9, 9))], NS_PER_S
    )
    both, _ = tracker.find_hang("c", 2 * NS_PER_S)
    assert [(r.rank, r.node_id, r.job, r.blocks) for r in both.roots] == [
        (1, "n0", "7", (0, 2, 3)),
        (2, "n2", "", (0, 1, 3)),
    ]


def test_unknown_cluster_is_an_error(tracker):
    with pytest.raises(KeyError):
        tracker.find_hang("other", 0)


def ended(number, ago_s, *, signal=0, status=0):
    ending = Ending(int(ago_s * NS_PER_S), signal, status)
    return standing(number, 9, 9, is_gone=True, ending=ending)


def roots_of(tracker, now_ns=4 * NS_PER_S):
    return [(r.rank, r.cause, r.blocks) for r in tracker.find_hang("c", now_ns)[0].roots]


def test_rank_that_was_killed_is_named_and_not_those_that_ended_of_it(tracker):
    tracker.add([ended(1, 0.9, signal=9)], NS_PER_S)
    tracker.add([ended(n, 0.6, status=1) for n in (0, 2, 3)], NS_PER_S)
    assert roots_of(tracker) == [(1, HangCause.ENDED, (0, 2, 3))]
    (root,) = tracker.find_hang("c", 4 * NS_PER_S)[0].roots
    assert (root.missing_seq, root.last_left, root.node_id) == (10, 9, "n1")


def test_what_ended_of_it_is_not_named_while_one_still_waits(tracker):
    tracker.add([ended(1, 0.9, signal=9), ended(0, 0.6, status=1)], NS_PER_S)
    tracker.add([standing(n, 10, 9) for n in (2, 3)], 3 * NS_PER_S)
    assert roots_of(tracker) == [(1, HangCause.ENDED, (0, 2, 3))]


def test_rank_that_failed_well_before_its_launcher_ended_the_others_is_named(tracker):
    tracker.add([ended(3, 1.6, status=1)], 2 * NS_PER_S)
    tracker.add([ended(n, 1.0, signal=15) for n in (0, 1, 2)], 2 * NS_PER_S)
    assert roots_of(tracker) == [(3, HangCause.ENDED, (0, 1, 2))]


def test_nobody_is_named_where_all_end_at_once(tracker):
    tracker.add([ended(n, 1.0 + n / 10, signal=15) for n in range(N)], 2 * NS_PER_S)
    assert roots_of(tracker) == []


def test_nobody_is_named_of_a_job_that_ended_well(tracker):
    tracker.add([ended(n, 1.0 + n) for n in range(N)], 2 * NS_PER_S)
    assert roots_of(tracker) == []


def test_one_failure_of_a_job_whose_others_ended_well_names_nobody(tracker):
    tracker.add([ended(0, 1.0, status=1), *(ended(n, 1.5) for n in (1, 2, 3))], 2 * NS_PER_S)
    assert roots_of(tracker) == []


def test_nobody_is_named_while_ranks_end_one_after_the_other_although_one_waits(tracker):
    tracker.add([ended(1, 1.9, signal=9), ended(0, 0.1, status=1)], 3 * NS_PER_S)
    tracker.add([standing(n, 10, 9) for n in (2, 3)], 3 * NS_PER_S)
    assert roots_of(tracker) == []
    assert roots_of(tracker, 5 * NS_PER_S) == [(1, HangCause.ENDED, (0, 2, 3))]


def test_rank_that_ends_slowly_of_one_that_was_killed_is_not_named(tracker):
    tracker.add([ended(1, 4, signal=9)], 5 * NS_PER_S)
    on_its_way = standing(0, 9, 9, still_ns=5 * NS_PER_S)  # what it entered last failed
    tracker.add([on_its_way, *(standing(n, 10, 9) for n in (2, 3))], 5 * NS_PER_S)
    assert roots_of(tracker, 5 * NS_PER_S) == [(1, HangCause.ENDED, (0, 2, 3))]


def test_rank_that_stood_long_before_another_was_killed_is_named_too(tracker):
    tracker.add([ended(1, 4, signal=9)], 40 * NS_PER_S)
    hung = standing(0, 9, 9, still_ns=30 * NS_PER_S)
    tracker.add([hung, *(standing(n, 10, 9) for n in (2, 3))], 40 * NS_PER_S)
    assert [rank for rank, _, _ in roots_of(tracker, 40 * NS_PER_S)] == [0, 1]


def test_nobody_is_named_until_every_agent_has_told_and_a_new_process_clears_it(tracker):
    tracker.add([ended(1, 0.9, signal=9)], NS_PER_S)
    tracker.add([ended(n, 0.1, status=1) for n in (0, 2, 3)], NS_PER_S)
    assert roots_of(tracker, 2 * NS_PER_S) == []
    assert roots_of(tracker, 3 * NS_PER_S) == [(1, HangCause.ENDED, (0, 2, 3))]
    tracker.note_moving([moving(number, 1) for number in range(N)], 3 * NS_PER_S)
    assert roots_of(tracker) == []


def test_who_ended_first_is_forgotten_after_a_minute(tracker):
    tracker.add([ended(1, 0.9, signal=9), ended(0, 0.1, status=1)], NS_PER_S)
    assert roots_of(tracker, NS_PER_S + ENDED_NS) == []


def test_stopped_rank_is_named_where_all_are_in_the_same_operation(tracker):
    tracker.add([standing(n, 10, 9, is_stopped=n == 2) for n in range(N)], NS_PER_S)
    assert roots_of(tracker) == [(2, HangCause.STOPPED, (0, 1, 3))]


IDLE_NS = 900 * NS_PER_S


def comm_of(number):
    return f"{number + 1000:016x}"


def of_job(one, number):
    """The same of another job, on a communicator of its own."""
    rank = replace(one.rank, job=f"job {number}")
    return replace(one, rank=rank, comm=comm_of(number))


def hang_names(tracker, now_ns):
    return [(root.rank, root.job) for root in tracker.find_hang("c", now_ns)[0].roots]


def test_hang_is_found_after_more_jobs_than_communicators_fit_have_come_and_gone(tracker):
    now_ns = 0
    for number in range(MAX_COMMS + 10):
        now_ns += 20 * NS_PER_S
        tracker.note_moving([of_job(moving(0, 1), number)], now_ns)
    tracker.note_moving([of_job(moving(n, 9), MAX_COMMS + 10) for n in range(N)], now_ns)
    stopped = [standing(n, 10, 9) for n in (0, 1, 3)] + [standing(2, 9, 9)]
    now_ns += NS_PER_S
    tracker.add([of_job(one, MAX_COMMS + 10) for one in stopped], now_ns)
    assert hang_names(tracker, now_ns) == [(2, f"job {MAX_COMMS + 10}")]
    cluster = tracker._clusters["c"]
    assert len(cluster.members) == len(cluster.comm_seen_ns) < 50, "silent for the idle timeout"
    assert tracker.take_refused() == 0


def test_hang_of_hours_stays_reported_while_other_jobs_come_and_go(tracker):
    stopped = [standing(n, 10, 9) for n in (0, 1, 3)] + [standing(2, 9, 9)]
    for at_s in range(0, 3 * 3600, 10):
        tracker.add(stopped, at_s * NS_PER_S)
        tracker.note_moving([of_job(moving(0, 1), at_s)], at_s * NS_PER_S)
        assert hang_names(tracker, at_s * NS_PER_S) == [(2, "")]


def test_at_the_cap_the_longest_silent_communicator_makes_room_and_never_one_where_somebody_stands(
    tracker, monkeypatch
):
    monkeypatch.setattr(progress, "MAX_COMMS", 3)
    tracker.add([standing(n, 10, 9) for n in (0, 1, 3)] + [standing(2, 9, 9)], NS_PER_S)
    for number in range(5):
        tracker.note_moving([of_job(moving(0, 1), number)], (2 + number) * NS_PER_S)
    assert list(tracker._clusters["c"].members) == [COMM, comm_of(3), comm_of(4)]
    assert hang_names(tracker, 7 * NS_PER_S) == [(2, "")]
    assert (tracker.take_refused(), tracker.take_cap_changes(7 * NS_PER_S)) == (0, [])


def test_what_finds_no_room_is_counted_and_logged_when_it_begins_and_ends(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="ingero.fleet.processors.nccl")
    monkeypatch.setattr(progress, "MAX_RANKS", 2)
    judged = Judged()
    judged.push([moving(number, 9) for number in range(N)])
    judged.round().push([moving(number, 10) for number in range(N)])
    judged.round().host.clock.advance(60 * NS_PER_S)
    judged.round()
    refused = judged.host.read("ingero_fleet_nccl_refused_total", reason="standing_cap")
    assert refused == 4
    lines = [line for line in caplog.records if line.fields.get("cap") == "standing_cap"]
    assert [line.fields.get("refused") for line in lines] == [None, 4]


def test_what_says_nothing_any_more_is_dropped_while_the_cluster_reports(tracker):
    tracker.add([standing(0, 10, 9), ended(1, 0.5, signal=9)], NS_PER_S)
    tracker.note_moving([of_job(moving(0, 1), 1)], 2 * ENDED_NS)
    cluster = tracker._clusters["c"]
    assert (cluster.stalls, cluster.ended, len(cluster.reported_ns)) == ({}, {}, 1)
    tracker.note_moving([of_job(moving(0, 1), 1)], 2 * ENDED_NS + IDLE_NS)
    assert list(cluster.members) == [comm_of(1)]


def test_ranks_that_a_job_has_no_more_are_not_missed_where_it_meets_under_its_old_name(tracker):
    tracker.note_moving([replace(moving(n, 5), n_ranks=3) for n in range(3)], 100 * NS_PER_S)
    stand = [replace(standing(n, 10, 9), n_ranks=3) for n in (0, 1)]
    tracker.add([*stand, replace(standing(2, 9, 9), n_ranks=3)], 101 * NS_PER_S)
    report, _ = tracker.find_hang("c", 102 * NS_PER_S)
    assert [(root.rank, root.blocks) for root in report.roots] == [(2, (0, 1))]
    assert report.ranks_known == (0, 1, 2)


def test_a_hang_after_a_restart_on_other_nodes_is_named_beside_what_ended_before_it(tracker):
    """The rank behind the one that was killed moved up by one node, and the spare's never arrives."""
    before, after = ["n0", "n1", "n2", "n3"], ["n0", "n2", "n3", "spare"]
    again = "00000000000000cd"

    def on(one, nodes, comm):
        node = nodes[one.rank.rank]
        return replace(one, rank=replace(one.rank, node_id=node, job="j"), comm=comm)

    tracker.note_moving([on(moving(n, 9), before, COMM) for n in range(N)], 0)
    tracker.add([on(ended(1, 0.5, signal=9), before, COMM)], NS_PER_S)
    tracker.add([on(ended(n, 0.5, signal=15), before, COMM) for n in (0, 2, 3)], 4 * NS_PER_S)
    tracker.note_moving([on(moving(n, 2), after, again) for n in range(N)], 25 * NS_PER_S)
    stand = [standing(n, 3, 2) for n in (0, 1, 2)] + [standing(3, 2, 2)]
    tracker.add([on(one, after, again) for one in stand], 30 * NS_PER_S)
    report, _ = tracker.find_hang("c", 31 * NS_PER_S)
    assert [(root.rank, root.node_id, root.cause, root.blocks) for root in report.roots] == [
        (1, "n1", HangCause.ENDED, (2, 3)),
        (3, "spare", HangCause.ABSENT, (0, 1, 2)),
    ]
