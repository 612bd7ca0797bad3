"""A standing job's conclusion as log records: once when it begins, once when it ends."""

import logging
from dataclasses import replace

from tests.fleet.processors.collectives.judged import Judged
from tests.fleet.processors.collectives.test_progress import COMM, N, moving, standing

from ingero.fleet.component import Learner
from ingero.fleet.processors.collectives.progress import FRESH_NS
from ingero.fleet.processors.collectives.reported import describe_hangs
from ingero.model.collectives import Rank
from ingero.otlp.codec import decode_protobuf, encode_protobuf
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S
from ingero.wire.hangs import HANG_EVENT
from ingero.wire.progress import build_progress


def stand(judged, *standings):
    export = build_progress(standings, judged.host.clock.wall_ns())
    judged.send(Signal.LOGS, decode_protobuf(encode_protobuf(export), Signal.LOGS))


def told(judged):
    """The hang records of one round."""
    return judged.round().records(HANG_EVENT)


def hung():
    judged = Judged()
    judged.push([moving(n, 9) for n in range(N)])
    assert told(judged) == []
    stand(judged, *[standing(n, 10, 9) for n in (0, 1, 3)], standing(2, 9, 9))
    return judged


def test_a_rank_that_others_wait_for_is_told_once_with_what_it_blocks():
    judged = hung()
    (record,) = told(judged)
    attributes = record.attributes
    assert attributes["ingero.hang.state"] == "began"
    assert attributes["ingero.rank"] == 2
    assert attributes["ingero.collective.comm"] == COMM
    assert attributes["ingero.hang.cause"] == "absent"
    assert attributes["ingero.hang.missing_seq"] == 10
    assert attributes["ingero.hang.last_finished_seq"] == 9
    assert attributes["ingero.hang.blocks"] == ["0", "1", "3"]
    assert attributes["ingero.hang.standing_s"] >= 7.0
    assert attributes["ingero.cluster.id"] == "c"
    stand(judged, *[standing(n, 10, 9) for n in (0, 1, 3)], standing(2, 9, 9))
    assert told(judged) == []


def test_the_end_is_told_when_the_rank_arrives_and_a_second_hang_anew():
    judged = hung()
    told(judged)
    judged.push([moving(n, 11) for n in range(N)])
    (record,) = told(judged)
    assert record.attributes["ingero.hang.state"] == "ended"
    assert record.attributes["ingero.rank"] == 2
    assert "ingero.hang.standing_s" not in record.attributes
    assert told(judged) == []
    stand(judged, *[standing(n, 12, 11) for n in (0, 1, 2)], standing(3, 11, 11))
    assert [one.attributes["ingero.rank"] for one in told(judged)] == [3]


def test_another_root_ends_the_first_in_the_same_round():
    judged = hung()
    told(judged)
    judged.push([moving(2, 10)])
    stand(judged, *[standing(n, 11, 10) for n in (0, 1, 2)], standing(3, 10, 10))
    states = {
        one.attributes["ingero.rank"]: one.attributes["ingero.hang.state"] for one in told(judged)
    }
    assert states == {2: "ended", 3: "began"}


def test_a_cluster_that_falls_silent_or_is_forgotten_has_no_open_hang():
    judged = hung()
    told(judged)
    judged.host.clock.advance(FRESH_NS + 1)
    (record,) = told(judged)
    assert record.attributes["ingero.hang.state"] == "ended"
    judged.host.clock.advance(3600 * NS_PER_S)
    assert told(judged) == []


def test_page_has_what_the_last_round_found_with_how_long_it_stands_by_now():
    judged = hung()
    judged.round()
    before = judged.page("hang", cluster_id="c")
    assert [root["rank"] for root in before["roots"]] == [2]
    judged.host.clock.advance(3 * NS_PER_S)
    judged.push([moving(n, 11) for n in range(N)])
    after = judged.page("hang", cluster_id="c")
    assert after == before | {"standing_s": before["standing_s"] + 3}, (
        "found in rounds, off the loop"
    )
    over = judged.round().page("hang", cluster_id="c")
    assert (over["roots"], over["standing_s"]) == ([], 0.0)


def test_page_finds_a_hang_itself_where_no_round_did_lately():
    judged = hung()
    judged.host.clock.advance(FRESH_NS + NS_PER_S)
    stand(judged, *[standing(n, 10, 9) for n in (0, 1, 3)], standing(2, 9, 9))
    assert judged.page("hang", cluster_id="c")["missing_ranks"] == [2]


OTHER_COMM = "00000000000000cd"


def stand_in_a_circle(judged):
    """Rank 0 waits in one communicator for rank 1, which waits in another one for rank 0."""
    for comm, waits, other in ((COMM, 0, 1), (OTHER_COMM, 1, 0)):
        stand(
            judged,
            standing(waits, 10, 9, comm=comm, n_ranks=2),
            standing(other, 9, 9, comm=comm, n_ranks=2),
        )


def test_ranks_that_wait_for_each_other_are_counted_logged_and_on_the_page(caplog):
    caplog.set_level(logging.INFO, logger="ingero.fleet.processors.nccl")
    judged = Judged()
    stand_in_a_circle(judged)
    page = judged.round().page("hang", cluster_id="c")
    assert (page["roots"], page["deadlocks"]) == ([], [[0, 1]])
    assert judged.host.read("ingero_fleet_nccl_missing_ranks", cluster_id="c") == 0
    assert judged.host.read("ingero_fleet_nccl_deadlocked_ranks", cluster_id="c") == 2
    judged.round()
    judged.push([moving(n, 11) for n in range(2)])
    stand(judged, standing(1, 10, 10, comm=OTHER_COMM, n_ranks=2))
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_deadlocked_ranks", cluster_id="c") == 0
    began, ended = caplog.records
    assert began.message == "deadlock began: ranks wait for each other"
    assert began.fields["ranks"] == "0,1"
    assert began.fields["standing_s"] >= 7.0
    assert ended.message == "deadlock ended"
    judged.host.clock.advance(3600 * NS_PER_S)
    judged.push([replace(moving(0, 1), rank=Rank("other", "n0", 0))])
    judged.round()
    assert judged.host.read("ingero_fleet_nccl_deadlocked_ranks", cluster_id="c") is None


def take_over(judged):
    """A Fleet that has just taken over what this one said, and has no push of it."""
    report, _ = judged.pipe._state.progress.find_hang("c", judged.host.clock.mono_ns())
    roots = [replace(root, job="j") for root in report.roots]
    other = Judged()
    (learner,) = other.host.find(Learner)
    learner.begin_replay("c", {})
    learner.end_replay("c", describe_hangs(roots, ()))
    return other


def test_a_hang_of_which_another_fleet_told_ends_where_nobody_is_met_that_waits():
    judged = hung()
    (began,) = told(judged)
    other = take_over(judged)
    assert told(other) == [], "the agents of those that wait may be about to tell"
    other.host.clock.advance(FRESH_NS)
    (ended,) = told(other)
    assert ended.attributes["ingero.hang.state"] == "ended"
    for name in ("rank", "collective.comm", "hang.missing_seq", "hang.cause", "node.id"):
        assert ended.attributes[f"ingero.{name}"] == began.attributes[f"ingero.{name}"]
    assert ended.attributes["ingero.rank.job"] == "j"
    assert told(other) == []


def test_a_hang_that_goes_on_under_another_fleet_is_told_once():
    other = take_over(hung())
    other.push([moving(n, 9) for n in range(N)])
    stand(other, *[standing(n, 10, 9) for n in (0, 1, 3)], standing(2, 9, 9))
    assert told(other) == []
    other.host.clock.advance(FRESH_NS)
    other.push([moving(n, 11) for n in range(N)])
    assert [one.attributes["ingero.hang.state"] for one in told(other)] == ["ended"]


def test_a_fleet_that_another_one_took_over_from_tells_no_end():
    judged = hung()
    told(judged)
    (learner,) = judged.host.find(Learner)
    learner.begin_replay("c", {})
    assert told(judged) == []
