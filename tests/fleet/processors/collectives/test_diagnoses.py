"""What a culprit's node is asked, what becomes of the answer, and what a stranger cannot do."""

import logging
from dataclasses import replace

import pytest
from tests.fleet.processors.collectives.test_collectives_processor import Judged, job, judge_after
from tests.fleet.processors.collectives.test_hangs import hung
from tests.fleet.processors.collectives.test_progress import N, standing

from ingero.fleet.component import QuestionSource
from ingero.fleet.processors.collectives.diagnoses import ASK_NS, REOPEN_NS
from ingero.model.collectives import Rank
from ingero.model.diagnosis import DiagnosedCause, Diagnosis
from ingero.model.hang import HangCause
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import build_diagnosis, parse_request

CAUSE = DiagnosedCause("cpu-quota", "out of CPU quota (cgroup)", 0.75)


def accused(**more):
    judged = Judged()
    for run in job(slow=3, **more):
        judged.push([run])
    return judge_after(judged)


def question(judged, node="node3", cluster="c"):
    (source,) = judged.host.find(QuestionSource)
    return parse_request(source.find_question(cluster, node))


def answer(judged, request, **more):
    rank = more.pop("rank", Rank("c", "node3", 3))
    given = {"id": request.id, "rank": rank, "causes": (CAUSE,), **more}
    batch = judged.send(*_logs(build_diagnosis(Diagnosis(**given), judged.host.clock.wall_ns())))
    return batch.push.n_rejected


def _logs(export):
    return export.signal, export


def count(judged, outcome):
    return judged.host.read("ingero_fleet_nccl_diagnoses_total", outcome=outcome) or 0


def shown(judged, rank=3):
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    (found,) = [one["diagnosis"] for one in page["verdicts"] if one["rank"]["rank"] == rank]
    return found


def test_the_culprits_node_is_asked_and_no_other():
    judged = accused()
    request = question(judged)
    assert request.rank == 3
    assert request.excess_share == pytest.approx(1 / 3, abs=0.03)
    assert [question(judged, f"node{n}") for n in range(8) if n != 3] == [None] * 7
    assert question(judged, cluster="other") is None
    assert count(judged, "asked") == 1


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


def test_an_agent_that_declines_is_not_asked_again():
    judged = accused()
    assert answer(judged, question(judged), causes=(), declined="busy") == 0
    assert question(judged) is None
    assert count(judged, "declined") == 1
    assert shown(judged)["declined"] == "busy"


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


ASLEEP = DiagnosedCause("asleep", "asleep", 1.0, ("waiting, of 100 looks: train.py:5 load (100%)",))


def explained(judged):
    """What the page says of each rank that others wait for."""
    return {
        root["rank"]: root["diagnosis"] for root in judged.page("hang", cluster_id="c")["roots"]
    }


def node_of(number):
    return standing(number, 9, 9).rank


def test_a_rank_that_others_wait_for_is_asked_and_the_answer_stands_on_the_page(caplog):
    judged = hung()
    judged.round()
    request = question(judged, node_of(2).node_id)
    assert (request.is_hang, request.rank, request.excess_share) == (True, 2, 0.0)
    assert [question(judged, node_of(n).node_id) for n in range(N) if n != 2] == [None] * (N - 1)
    assert explained(judged) == {2: None}
    assert answer(judged, request, rank=node_of(2), causes=(ASLEEP,)) == 0
    assert question(judged, node_of(2).node_id) is None
    with caplog.at_level(logging.INFO):
        judged.round()
    assert explained(judged)[2]["cause"] == "asleep"
    (line,) = [record for record in caplog.records if record.message == "hang explained"]
    assert (line.fields["cause"], line.fields["rank"]) == ("asleep", 2)
    assert judged.points("ingero_fleet_cause_share") == [], "that is of a culprit's excess"


@pytest.mark.parametrize(
    "changes", [{"cause": HangCause.ENDED}, {"node_id": ""}], ids=["it ended", "no node is known"]
)
def test_a_rank_at_which_nobody_can_look_is_not_asked(changes):
    judged = hung()
    report, standing_s = judged.pipe._state.progress.find_hang("c", judged.host.clock.mono_ns())
    (root,) = report.roots
    gone = replace(report, roots=(replace(root, **changes),))
    judged.pipe._state.diagnoses.note({}, {"c": (gone, standing_s)}, 0)
    assert question(judged, node_of(2).node_id) is None
    judged.pipe._state.diagnoses.note({}, {"c": (report, standing_s)}, 0)
    assert question(judged, node_of(2).node_id).is_hang
