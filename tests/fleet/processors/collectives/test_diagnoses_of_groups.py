"""Whom Fleet asks why where no single rank is slow: links, peers that are slow in turns, stages, and ranks that others wait for."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from tests.fleet.processors.collectives.asked import CAUSE, WORK, answer, count, question
from tests.fleet.processors.collectives.judged import Judged, judge_after
from tests.fleet.processors.collectives.test_hangs import hung
from tests.fleet.processors.collectives.test_progress import N, standing
from tests.support.synthetic_jobs import (
    JobShape,
    build_work,
    normal_noise,
    rotate_heavy_sequences,
    run_job,
)

from ingero.fleet.processors.collectives.diagnoses import SETTLED_NS, DiagnosisTracker
from ingero.job_traces.convert import build_job_trace
from ingero.model.collectives import Rank
from ingero.model.diagnosis import DiagnosedCause, Diagnosis, PeerWork, Subject
from ingero.model.hang import HangCause
from ingero.model.verdicts import Judgement, Verdict, VerdictKind
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import parse_request

DELAY = DiagnosedCause("network-delay", "packets take long on their way", 0.98)


def slow_link():
    """A pipeline of four replicas of three stages, of which one link is slow."""
    shape = JobShape(n_dp=4, n_stages=3, n_microbatches=12, n_steps=8)
    links = np.ones((4, 2))
    links[1, 1] = 30
    work = build_work(shape, normal_noise(0.02), np.random.default_rng(0))
    judged = Judged()
    for runs in build_job_trace(run_job(shape, work, links), "c").runs:
        judged.push(runs)
    return judge_after(judged)


def test_both_ends_of_a_slow_link_are_asked_about_it_and_nobody_else(caplog):
    judged = slow_link()
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    ends = [one["rank"] for one in page["verdicts"] if one["verdict"] == "network"]
    requests = {end["node_id"]: question(judged, end["node_id"]) for end in ends}
    assert len(requests) == 2
    assert {one.about for one in requests.values()} == {Subject.LINK}
    others = {one["rank"]["node_id"] for one in page["verdicts"]} - requests.keys()
    assert {question(judged, node) for node in others} == {None}
    asked, end = requests[ends[0]["node_id"]], ends[0]
    rank = Rank("c", end["node_id"], end["rank"], end["n_gpus"], tuple(end["labels"].items()))
    assert answer(judged, asked, rank=rank, causes=(DELAY,)) == 0
    assert question(judged, end["node_id"]) is None
    assert question(judged, ends[1]["node_id"]) is not None
    with caplog.at_level(logging.INFO):
        judged.round()
    (line,) = [record for record in caplog.records if record.message == "verdict explained"]
    assert line.fields["cause"] == "network-delay"
    (point,) = judged.points("ingero_fleet_cause_share")
    assert (point.value, point.attributes["cause"]) == (0.98, "network-delay")
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    (found,) = [one["diagnosis"] for one in page["verdicts"] if one["rank"] == end]
    assert found["cause"] == "network-delay"


def uneven_job(seed=0):
    """A pipeline of four replicas of three stages whose sequences are of uneven length."""
    rng = np.random.default_rng(seed)
    shape = JobShape(n_dp=4, n_stages=3, n_microbatches=12, n_steps=8)
    work = rotate_heavy_sequences(build_work(shape, normal_noise(0.02), rng), 0.5, rng)
    judged = Judged()
    for runs in build_job_trace(run_job(shape, work), "c").runs:
        judged.push(runs)
    return judge_after(judged)


def ask_all(judged):
    """Who is asked what, by node."""
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    assert {one["verdict"] for one in page["verdicts"]} == {"imbalance:data"}
    found = {one["rank"]["node_id"]: one["rank"] for one in page["verdicts"]}
    asked = {node: question(judged, node) for node in found}
    return {node: (found[node], one) for node, one in asked.items() if one is not None}


def test_of_peers_that_are_slow_in_turns_one_is_asked_and_stays_the_one(caplog):
    judged = uneven_job()
    assert ask_all(judged) == {}, "a job that starts is uneven for some seconds"
    judged.host.clock.advance(SETTLED_NS)
    judged.round()
    asked = ask_all(judged)
    assert {one.about for _, one in asked.values()} == {Subject.UNEVEN}
    assert {one.excess_share for _, one in asked.values()} == {0.0}
    assert len(asked) == 3, "one of each stage"
    assert {node[-1] for node in asked} == {"0", "1", "2"}
    for _ in range(3):
        judged.round()
    assert ask_all(judged) == asked
    assert count(judged, "asked") == 3
    (node, (end, request)), *_ = asked.items()
    rank = Rank("c", node, end["rank"], end["n_gpus"], tuple(end["labels"].items()))
    computing = DiagnosedCause("more-computing", "computing on the host", 0.9)
    assert answer(judged, request, rank=rank, causes=(computing,)) == 0
    assert question(judged, node) is None
    with caplog.at_level(logging.INFO):
        judged.round()
    (line,) = [record for record in caplog.records if record.message == "verdict explained"]
    assert (line.levelno, line.fields["cause"]) == (logging.INFO, "more-computing")
    (page,) = judged.page("verdicts", cluster_id="c")["clusters"]
    known = {one["rank"]["node_id"]: one["diagnosis"] for one in page["verdicts"]}
    assert known[node]["cause"] == "more-computing"
    assert sum(one is not None for one in known.values()) == 1
    assert ask_all(judged).keys() == asked.keys() - {node}, "nobody else of its stage is asked"


def test_another_peer_that_works_longer_later_is_not_asked_too():
    tracker = DiagnosisTracker(MeterRegistry())
    peers = tuple(Rank("c", f"node{n}", n) for n in range(3))

    def ask(*own_ns):
        verdicts = [
            Verdict(rank, VerdictKind.IMBALANCE_DATA, peers=peers, own_ns=spent)
            for rank, spent in zip(peers, own_ns, strict=True)
        ]
        said = SimpleNamespace(judgement=Judgement("c", tuple(verdicts)))
        tracker.note({"c": said}, {}, now_ns)
        return [n for n in range(3) if tracker.find_question("c", f"node{n}")]

    now_ns = NS_PER_S
    assert ask(1, 1, 2) == []
    now_ns += SETTLED_NS
    assert ask(5, 9, 7) == [1]
    assert ask(15, 12, 13) == [1]


def test_why_a_culprit_is_slow_is_asked_before_why_peers_of_its_node_are_uneven():
    tracker = DiagnosisTracker(MeterRegistry())
    peers = tuple(Rank("c", "node", n) for n in range(3))
    uneven = tuple(Verdict(rank, VerdictKind.IMBALANCE_DATA, peers=peers) for rank in peers)
    slow = Verdict(Rank("c", "node", 9), VerdictKind.CULPRIT)

    def ask(now_ns, *verdicts):
        tracker.note({"c": SimpleNamespace(judgement=Judgement("c", verdicts))}, {}, now_ns)
        question = parse_request(tracker.find_question("c", "node"))
        return None if question is None else question.about

    assert ask(0, *uneven) is None
    assert ask(SETTLED_NS, *uneven) is Subject.UNEVEN
    assert ask(SETTLED_NS, *uneven, slow) is Subject.SLOW
    assert ask(SETTLED_NS, slow) is Subject.SLOW


def ask_of_stage(tracker, now_ns, *verdicts):
    tracker.note({"c": SimpleNamespace(judgement=Judgement("c", verdicts))}, {}, now_ns)
    asked = {n: parse_request(tracker.find_question("c", f"node{n}")) for n in range(7)}
    return {n: one for n, one in asked.items() if one is not None}


def stage_verdicts():
    """Three members of a slow stage on nodes 0 to 2, three of another on nodes 3 to 5, and one that nobody judged."""
    ranks = [Rank("c", f"node{n}", n) for n in range(7)]
    slow, ordinary = tuple(ranks[:3]), tuple(ranks[3:6])
    stage = [
        Verdict(
            rank,
            VerdictKind.IMBALANCE_STAGE,
            peers=slow,
            own_ns=130 + n,
            excess_ns=30,
            since_onset_ns=120,
        )
        for n, rank in enumerate(slow)
    ]
    others = [Verdict(rank, VerdictKind.ORDINARY, peers=ordinary) for rank in ordinary]
    return *stage, *others, Verdict(ranks[6], VerdictKind.UNKNOWN)


def test_of_a_stage_that_works_longer_one_is_asked_why_and_the_other_stages_what_theirs_takes():
    tracker = DiagnosisTracker(MeterRegistry())
    verdicts = stage_verdicts()
    assert ask_of_stage(tracker, 0, *verdicts) == {}, "a job that starts is uneven for some seconds"
    asked = ask_of_stage(tracker, SETTLED_NS, *verdicts)
    request = asked.pop(2)
    assert (request.rank, request.about, request.excess_share) == (2, Subject.SLOW, 0.25)
    assert request.is_work_asked
    assert {n: (one.about, one.id) for n, one in asked.items()} == dict.fromkeys(
        (3, 4, 5), (Subject.WORK, request.id)
    )
    answers = [PeerWork(request.id, Rank("c", f"node{n}", n), WORK) for n in (3, 4, 5)]
    assert tracker.take_work(answers) == (0, "")
    assert ask_of_stage(tracker, SETTLED_NS, *verdicts)[2].peers_work == WORK
    diagnosis = Diagnosis(id=request.id, rank=verdicts[2].rank, causes=(CAUSE,))
    assert tracker.take([diagnosis]) == (0, "")
    assert ask_of_stage(tracker, SETTLED_NS, *verdicts) == {}
    assert tracker.find_of(verdicts) == {verdicts[2].rank.worker: diagnosis}


def test_why_a_member_is_slower_than_its_slow_stage_is_another_question():
    tracker = DiagnosisTracker(MeterRegistry())
    first, second, third, *others = stage_verdicts()
    ask_of_stage(tracker, 0, first, second, third, *others)
    asked = ask_of_stage(tracker, SETTLED_NS, first, second, third, *others)[2]
    diagnosis = Diagnosis(id=asked.id, rank=third.rank, causes=(CAUSE,))
    tracker.take([diagnosis])
    culprit = replace(third, kind=VerdictKind.CULPRIT)
    again = ask_of_stage(tracker, SETTLED_NS, first, second, culprit, *others)[2]
    assert again.id != asked.id
    assert tracker.find_of([culprit]) == {}, "what the stage was slow for says nothing of it"


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
    assert (request.about, request.rank, request.excess_share) == (Subject.HANG, 2, 0.0)
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
    assert question(judged, node_of(2).node_id).about is Subject.HANG
