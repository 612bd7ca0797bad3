"""What a culprit's node is asked, what becomes of the answer, and what a stranger cannot do."""

import logging
from dataclasses import replace

import pytest
from tests.fleet.processors.collectives.asked import WORK, answer, as_logs, count, question
from tests.fleet.processors.collectives.judged import Judged, job, judge_after

from ingero.fleet.processors.collectives.diagnoses import AGAIN_NS, ASK_NS, REOPEN_NS
from ingero.model.collectives import Rank
from ingero.model.diagnosis import DiagnosedCause, PeerWork, Subject
from ingero.units import NS_PER_S
from ingero.wire.peer_work import build_peer_work


def accused(**more):
    judged = Judged()
    for run in job(slow=3, **more):
        judged.push([run])
    return judge_after(judged)


def shown(judged, rank=3):
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    (found,) = [one["diagnosis"] for one in page["verdicts"] if one["rank"]["rank"] == rank]
    return found


def tell_work(judged, request, rank, **more):
    rates = replace(WORK, **more)
    answered = PeerWork(request.id, Rank("c", f"node{rank}", rank), rates)
    return judged.send(*as_logs(build_peer_work(answered, judged.host.clock.wall_ns()))).push


def peers_asked(judged):
    asked = {n: question(judged, f"node{n}") for n in range(8) if n != 3}
    return {n: one for n, one in asked.items() if one is not None}


def test_the_culprits_node_is_asked_and_three_others_what_an_operation_takes_them():
    judged = accused()
    request = question(judged)
    assert (request.rank, request.about, request.is_work_asked) == (3, Subject.SLOW, True)
    assert request.excess_share == pytest.approx(1 / 3, abs=0.03)
    asked = peers_asked(judged)
    assert [(one.about, one.id, one.rank) for one in asked.values()] == [
        (Subject.WORK, request.id, n) for n in asked
    ]
    assert len(asked) == 3
    assert question(judged, cluster="other") is None
    assert count(judged, "asked") == 1


def test_what_peers_answer_stands_in_the_culprits_question_and_ends_with_its_answer():
    judged = accused()
    request = question(judged)
    first, second, third = peers_asked(judged)
    assert tell_work(judged, request, first, computing_ns=4e6).n_rejected == 0
    assert question(judged).peers_work == replace(WORK, computing_ns=4e6)
    assert not question(judged).is_work_asked
    assert list(peers_asked(judged)) == [second, third]
    tell_work(judged, request, second, computing_ns=5e6)
    tell_work(judged, request, third, computing_ns=9e6)
    assert question(judged).peers_work == WORK
    assert peers_asked(judged) == {}
    answer(judged, request)
    assert question(judged) is None


def test_peers_are_not_asked_any_more_once_the_culprit_is_explained():
    judged = accused()
    answer(judged, question(judged))
    assert peers_asked(judged) == {}


@pytest.mark.parametrize("forged", [{"rank": 3}, {"id": "00" * 8}, {"rank": 77}])
def test_work_that_nobody_asked_for_is_refused_and_counted(forged):
    judged = accused()
    request = question(judged)
    rank = forged.pop("rank", next(iter(peers_asked(judged))))
    push = tell_work(judged, replace(request, **forged), rank)
    assert push.n_rejected == 1
    assert "nobody asked for" in push.rejected_why
    assert question(judged) == request
    assert count(judged, "refused") == 1


def test_peers_of_the_same_node_are_told_to_its_agent_and_nobody_else_is_asked():
    judged = Judged()
    for run in job(slow=3):
        judged.push([replace(run, rank=replace(run.rank, node_id="node3"))])
    judge_after(judged)
    request = question(judged)
    assert (request.rank, len(request.peers), 3 in request.peers) == (3, 3, False)
    assert (request.peers_work, request.is_work_asked) == (None, False)


def test_the_question_stays_the_same_until_it_is_answered():
    judged = accused()
    first = question(judged)
    judged.round()
    assert question(judged) == first
    assert answer(judged, first) == 0
    assert question(judged) is None
    judged.round()
    assert question(judged) is None
    assert (count(judged, "asked"), count(judged, "answered")) == (1, 1)


def test_the_answer_stands_beside_the_verdict_in_the_log_and_in_the_series(caplog):
    judged = accused()
    assert shown(judged) is None
    answer(judged, question(judged))
    with caplog.at_level(logging.INFO):
        judged.round()
    assert shown(judged)["cause"] == "cpu-quota"
    assert shown(judged, rank=2) is None
    (line,) = [record for record in caplog.records if record.message == "verdict explained"]
    assert line.fields["cause"] == "cpu-quota"
    (point,) = judged.points("ingero_fleet_cause_share")
    assert (point.value, point.attributes["cause"]) == (0.75, "cpu-quota")
    assert point.attributes["rank"] == "3"


def test_what_was_answered_stands_beside_no_later_verdict_that_it_does_not_explain():
    judged = accused()
    answer(judged, question(judged))
    assert shown(judged) is not None
    healthy = job(n_ops=3000, seed=2)
    for run in healthy:
        run.ops["seq"] += 200
        run.ops["entry_ns"] += 100 * NS_PER_S
    judged.push(healthy)
    judge_after(judged)
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    assert {one["verdict"] for one in page["verdicts"]} == {"ordinary"}
    assert shown(judged) is None
    (page,) = judged.page("verdicts", cluster_id="c", history="true")["clusters"]
    (culprit,) = [one for one in page["verdicts"] if one["verdict"] == "culprit"]
    assert culprit["diagnosis"] is not None, "it is still known, of the alarm that has cleared"


def test_an_agent_that_declines_is_not_asked_again_at_once():
    judged = accused()
    assert answer(judged, question(judged), causes=(), declined="busy") == 0
    assert question(judged) is None
    assert count(judged, "declined") == 1
    assert shown(judged)["declined"] == "busy"


def test_an_agent_that_declined_is_asked_again_while_the_verdict_lasts():
    """It had just begun, say, and followed the rank from its next operation on."""
    judged = accused()
    first = question(judged)
    answer(judged, first, causes=(), declined="no such rank is followed here")
    state, now_ns = judged.pipe._state, judged.host.clock.mono_ns()
    state.diagnoses.note(state.engine.conclusions(), {}, now_ns + AGAIN_NS - 10 * NS_PER_S)
    assert question(judged) is None
    state.diagnoses.note(state.engine.conclusions(), {}, now_ns + AGAIN_NS)
    again = question(judged)
    assert again == replace(first, id=again.id)
    assert again.id != first.id, "which its agent has answered"
    assert shown(judged)["declined"]
    assert answer(judged, again) == 0
    assert question(judged) is None
    assert shown(judged)["cause"] == "cpu-quota"
    outcomes = ("asked", "declined", "answered", "unanswered")
    assert [count(judged, one) for one in outcomes] == [2, 1, 1, 0]


def test_an_answer_that_comes_twice_counts_once():
    judged = accused()
    request = question(judged)
    answer(judged, request)
    other = DiagnosedCause("stopped", "stopped by a signal", 1.0)
    assert answer(judged, request, causes=(other,)) == 0
    assert count(judged, "repeated") == 1
    assert shown(judged)["cause"] == "cpu-quota"


@pytest.mark.parametrize(
    "forged",
    [
        {"id": "00" * 8},
        {"rank": Rank("c", "node2", 3)},
        {"rank": Rank("c", "node3", 2)},
        {"rank": Rank("other", "node3", 3)},
    ],
)
def test_an_answer_that_nobody_asked_for_is_refused_and_counted(forged):
    judged = accused()
    request = question(judged)
    asked = replace(request, id=forged.pop("id", request.id))
    assert answer(judged, asked, **forged) == 1
    assert count(judged, "refused") == 1
    assert question(judged) == request
    assert shown(judged) is None


def test_a_question_without_an_answer_is_given_up_and_counted():
    judged = accused()
    judged.host.clock.advance(ASK_NS)
    judged.round()
    assert question(judged) is None
    assert count(judged, "unanswered") == 1


def test_a_healthy_job_is_asked_nothing():
    judged = Judged()
    for run in job():
        judged.push([run])
    judge_after(judged)
    assert [question(judged, f"node{n}") for n in range(8)] == [None] * 8
    assert count(judged, "asked") == 0


def test_an_episode_that_is_over_is_forgotten():
    judged = accused()
    request = question(judged)
    desk = judged.pipe._state.diagnoses
    conclusions = judged.pipe._state.engine.conclusions()
    quiet = {
        name: replace(one, judgement=replace(one.judgement, verdicts=()))
        for name, one in conclusions.items()
    }
    desk.note(quiet, {}, judged.host.clock.mono_ns() + REOPEN_NS - NS_PER_S)
    assert question(judged) == request
    desk.note(quiet, {}, judged.host.clock.mono_ns() + REOPEN_NS)
    assert question(judged) is None
    assert answer(judged, request) == 1
