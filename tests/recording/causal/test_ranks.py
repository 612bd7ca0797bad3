"""What several ranks' rows say: who is late, whether the way is slow, who is missing."""

import pytest
from tests.recording.scenarios.ranks import (
    Meeting,
    collective_hang,
    collective_of_other_size,
    late_rank_async,
    rank_skew,
    slow_link,
    slow_link_from_the_start,
    tcp_retransmits,
)

from ingero.model.events import EventFlag, HostOp, NcclOp, Source
from ingero.recording.causal.engine import explain
from ingero.recording.scenarios.builder import START_NS, RecordingBuilder
from ingero.recording.scenarios.loop import SYNC

MS = 1_000_000


def only(built):
    (incident,) = explain(built.build()).incidents
    return incident


def evidence(incident):
    return " ".join(incident.causes[0].evidence)


def test_late_rank_is_seen_behind_calls_that_only_enqueue():
    incident = only(late_rank_async())
    assert (incident.rule, incident.pid) == ("late_rank", 6002)
    assert incident.lost_ns == pytest.approx(60 * 8 * MS, rel=0.02)


def test_ranks_that_take_turns_in_being_last_are_not_one_late_rank():
    incident = only(rank_skew())
    assert incident.rule == "rank_skew"
    assert "last to arrive: rank 0 in 19, rank 1 in 19, rank 2 in 9, rank 3 in 13" in evidence(
        incident
    )
    assert incident.ruled_out[0].share == pytest.approx(19 / 60, abs=0.001)


def test_link_that_turns_slow_is_measured_against_its_own_past():
    incident = only(slow_link())
    assert (incident.rule, incident.n_cases) == ("slow_link", 40)
    assert incident.lost_ns == pytest.approx(40 * 8 * MS, rel=0.05)
    assert "40 of 60 operations, 6.71 GB/s instead of 33.55 GB/s" in evidence(incident)
    assert {r.name: r.share for r in incident.ruled_out}["TCP retransmits"] == 0


def test_link_that_was_always_slow_is_measured_against_the_other_communicators():
    incident = only(slow_link_from_the_start())
    assert (incident.rule, incident.n_cases) == ("slow_link", 60)
    assert "in the other communicators" in incident.title


def test_slow_transfer_and_late_rank_are_told_apart():
    both = Meeting(
        late_ms=lambda _seq, rank: 8.0 * (rank == 2),
        transfer_ms=lambda seq, _comm: 10.0 if seq >= 20 else 2.0,
    ).build()
    told = {i.rule: i.lost_ns for i in explain(both.build()).incidents}
    assert told.keys() == {"late_rank", "slow_link"}
    assert told["slow_link"] == pytest.approx(40 * 8 * MS, rel=0.05)
    assert told["late_rank"] == pytest.approx(60 * 8 * MS, rel=0.05)


def test_retransmits_are_named_where_the_hit_collectives_are_the_slow_ones():
    incident = only(tcp_retransmits())
    assert (incident.rule, incident.n_cases) == ("tcp_retransmits", 20)
    assert "80 segments sent again during 20 collectives, to 10.0.0.2" in evidence(incident)
    assert incident.causes[0].share > 0.95
    assert incident.lost_ns == pytest.approx(20 * 10 * MS, rel=0.05)


def test_ranks_that_bring_different_sizes_disagree():
    incident = only(collective_of_other_size())
    assert (incident.rule, incident.n_cases) == ("collective_disagreement", 1)
    assert "rank 0 ncclAllReduce of 64 MiB, rank 1 ncclAllReduce of 32 MiB" in evidence(incident)


def test_hang_names_the_rank_that_is_missing_and_not_those_that_wait():
    incident = only(collective_hang())
    assert (incident.rule, incident.severity, incident.pid) == ("collective_hang", "HIGH", 6002)
    assert "rank 2 did not enter ncclAllReduce number 40; ranks 0, 1, 3" in incident.title
    assert incident.lost_ns / 1e9 == pytest.approx(39, abs=0.1)


def stand_still(*communicators):
    """Communicators that stop: of each its operation and how many of them each rank entered."""
    built = RecordingBuilder()
    for at, (op, n_entered) in enumerate(communicators):
        for place, (rank, n_ops) in enumerate(n_entered.items()):
            for seq in range(n_ops):
                built.call(
                    (Source.NCCL, op), (seq * 40 + at * 10) * MS + rank * 1000, 2 * MS, 6000 + rank, gpu_id=rank,
                    arg0=1 << 20, arg1=0xA + at, arg2=seq, arg3=place << 32 | len(n_entered),
                )  # fmt: skip
    for second in range(40):
        built.call((Source.HOST, HostOp.EXEC), 41 * 40 * MS + second * 1000 * MS, 0, 77)
    return built


def test_a_rank_that_is_missed_because_it_waits_elsewhere_is_not_named():
    """Ranks 0 and 1 wait for rank 2, which waits for rank 3 in a communicator of these two."""
    first = (NcclOp.ALL_REDUCE, {0: 40, 1: 40, 2: 39})
    incident = only(stand_still(first, (NcclOp.ALL_GATHER, {2: 40, 3: 39})))
    assert (incident.rule, incident.pid) == ("collective_hang", 6003)
    assert "rank 1 did not enter ncclAllGather number 39; rank 0" in incident.title
    assert "2 processes of other communicators wait for them" in evidence(incident)


def test_ranks_that_wait_for_each_other_in_a_circle_are_both_named():
    circle = stand_still((NcclOp.ALL_REDUCE, {0: 40, 1: 39}), (NcclOp.ALL_GATHER, {0: 39, 1: 40}))
    assert {incident.pid for incident in explain(circle.build()).incidents} == {6000, 6001}


def test_ranks_that_wait_in_a_hang_are_no_problem_of_their_own():
    built = collective_hang()
    hang = only(built)
    begun_ns = hang.start_ns - START_NS
    for rank in (0, 1, 3):
        built.call(
            SYNC, begun_ns + MS, 39_000 * MS, 6000 + rank, gpu_id=rank, flags=EventFlag.IN_FLIGHT
        )
    assert only(built).id == hang.id
    built.call(SYNC, begun_ns - 5_000 * MS, 44_000 * MS, 6002, tid=7, flags=EventFlag.IN_FLIGHT)
    found = {incident.rule: incident.pid for incident in explain(built.build()).incidents}
    assert found == {"collective_hang": 6002, "call_in_flight": 6002}
