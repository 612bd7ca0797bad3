"""A Fleet that was away is given hours of evidence at once: what it says meanwhile, and afterwards."""

import pytest
from tests.fleet.processors.collectives.judged import Judged, job

from ingero.errors import RetryableError
from ingero.fleet.processors.collectives.lateness import (
    MAX_CATCHING_UP_NS,
    MIN_LATE_NS,
    RECENT_NS,
    Lateness,
)
from ingero.model.collectives import CollectiveOp, Worker
from ingero.model.progress import RankProgress
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S
from ingero.wire.collectives import build_collectives, read_collectives
from ingero.wire.progress import build_progress

HOUR_NS = 3600 * NS_PER_S
WORKERS = [Worker(f"n{at}", "", at) for at in range(10)]


def push_late(judged, runs, late_ns=HOUR_NS):
    export = build_collectives(runs, judged.host.clock.wall_ns(), late_ns=late_ns)
    return judged.send(Signal.LOGS, decode_protobuf(encode_protobuf(export), Signal.LOGS))


def settle(judged, seconds=6):
    judged.round()
    judged.host.clock.advance(seconds * NS_PER_S)
    judged.round()


def named(judged):
    return {
        (row.attributes["ingero.rank"], row.attributes["ingero.verdict.kind"])
        for row in judged.records()
    }


def verdicts_of(judged):
    return judged.pipe._state.engine.conclusions()["c"].judgement.verdicts


def cut(runs, at, upto):
    return [
        type(run)(run.rank, run.comm, run.comm_rank, run.n_ranks, run.clock, run.ops[at:upto])
        for run in runs
    ]


def test_a_culprit_of_an_hour_ago_is_not_named_while_what_came_since_is_still_on_its_way():
    judged = Judged()
    runs = job(slow=3)
    push_late(judged, cut(runs, 0, 150))
    settle(judged)
    assert judged.records() == []
    assert judged.page("verdicts") == {"clusters": []}
    assert judged.host.read("ingero_fleet_nccl_late_seconds", cluster_id="c") == 3600
    assert judged.host.read("ingero_fleet_nccl_late_ops_total") == 8 * 150
    judged.push(cut(runs, 150, 200))
    judged.round()
    assert judged.records(), "it is slow to this day, so it is named as soon as that is known"
    assert judged.host.read("ingero_fleet_nccl_late_seconds", cluster_id="c") is None


def test_what_was_concluded_is_the_same_as_if_nothing_had_been_late():
    late, live = Judged(), Judged()
    runs = job(slow=3)
    push_late(late, cut(runs, 0, 100))
    settle(late)
    late.push(cut(runs, 100, 200))
    settle(late)
    live.push(runs)
    settle(live)
    assert verdicts_of(late) == verdicts_of(live)


def test_verdicts_from_before_stay_and_their_changes_are_not_told_again():
    judged = Judged()
    runs = job(slow=3, n_ops=300)
    judged.push(cut(runs, 0, 200))
    settle(judged)
    assert judged.records()
    push_late(judged, cut(runs, 200, 210))
    for at in range(9):
        judged.host.clock.advance(10 * NS_PER_S)
        push_late(judged, cut(runs, 210 + at, 211 + at))
        judged.round()
        assert judged.records() == []


def test_one_node_that_was_cut_off_holds_up_nobody():
    judged = Judged()
    runs = job(slow=3)
    judged.push(runs[:-1])
    push_late(judged, runs[-1:])
    settle(judged)
    assert {rank for rank, _ in named(judged)} >= {3}


def test_what_is_less_than_a_minute_late_is_judged_as_ever():
    judged = Judged()
    push_late(judged, job(slow=3), late_ns=MIN_LATE_NS - 1)
    settle(judged)
    assert judged.records()


def test_late_operations_do_not_make_a_job_move_that_stands_still_now():
    judged = Judged()
    runs = job()
    stands = [
        RankProgress(
            run.rank, run.comm, run.comm_rank, run.n_ranks, entered=100 - (run.comm_rank == 2),
            left=99, op=CollectiveOp.ALL_REDUCE, still_ns=300 * NS_PER_S,
        )
        for run in runs
    ]  # fmt: skip
    export = build_progress(stands, judged.host.clock.wall_ns())
    judged.send(Signal.LOGS, decode_protobuf(encode_protobuf(export), Signal.LOGS))
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_missing_ranks", cluster_id="c") == 1
    push_late(judged, runs)
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_missing_ranks", cluster_id="c") == 1
    judged.push(runs)
    judged.round()
    assert not judged.host.read("ingero_fleet_nccl_missing_ranks", cluster_id="c")


def test_late_evidence_is_asked_to_come_again_while_much_waits_and_that_of_now_is_not():
    judged = Judged(max_pending_ops=2000)
    runs = job(n_ops=200)
    push_late(judged, cut(runs, 0, 150))
    with pytest.raises(RetryableError) as refused:
        push_late(judged, cut(runs, 150, 160))
    assert refused.value.retry_after_ns
    judged.push(cut(runs, 150, 155))
    judged.round()
    push_late(judged, cut(runs, 155, 160))
    assert judged.host.read("ingero_fleet_nccl_refused_total", reason="pending_cap") in {None, 0}


def note(lateness, late, live, now_ns):
    for worker in WORKERS[:late]:
        lateness.note(worker, HOUR_NS, now_ns)
    for worker in WORKERS[late : late + live]:
        lateness.note(worker, 0, now_ns)


@pytest.mark.parametrize(("late", "live", "is_late"), [(6, 4, True), (5, 5, False), (1, 0, True)])
def test_most_of_those_that_report_decide(late, live, is_late):
    lateness = Lateness()
    note(lateness, late, live, 0)
    assert bool(lateness.find_late_ns(NS_PER_S)) is is_late


def test_who_fell_silent_does_not_count():
    lateness = Lateness()
    note(lateness, 6, 0, 0)
    for worker in WORKERS[6:9]:
        lateness.note(worker, 0, RECENT_NS)
    assert lateness.find_late_ns(RECENT_NS) == HOUR_NS
    assert lateness.find_late_ns(RECENT_NS + 1) == 0


def test_nobody_keeps_a_cluster_from_being_judged_for_ever():
    lateness = Lateness()
    note(lateness, 6, 0, 0)
    assert lateness.find_late_ns(0) == HOUR_NS
    note(lateness, 6, 0, MAX_CATCHING_UP_NS)
    assert lateness.find_late_ns(MAX_CATCHING_UP_NS) == HOUR_NS
    note(lateness, 6, 0, MAX_CATCHING_UP_NS + 1)
    assert lateness.find_late_ns(MAX_CATCHING_UP_NS + 1) == 0


def test_how_late_a_batch_is_goes_over_the_wire_and_what_makes_no_sense_is_refused():
    (run, *_) = job()
    export = build_collectives([run], 5, late_ns=7)
    assert read_collectives(decode_protobuf(encode_protobuf(export), Signal.LOGS)).late_ns == [7]
    read = read_collectives(build_collectives([run], 5, late_ns=-7))
    assert (read.n_refused, read.runs, read.late_ns) == (1, [], [])
    assert "late_ns" in read.first_problem
