"""A rank that was slow from the start is compared with what its peers do."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.agent.diagnosis.asked_node import PID, Node

from ingero.agent.diagnosis.examiner import (
    MAX_TRIES,
    Examiner,
    Looks,
)
from ingero.agent.diagnosis.history import CounterHistory
from ingero.agent.health.push_body import NodeIdentity
from ingero.model.collectives import COLLECTIVE_OP, Rank
from ingero.model.counters import (
    ProcessCounters,
    TaskTimes,
    WorkRates,
)
from ingero.model.diagnosis import DiagnosisRequest, Subject
from ingero.units import NS_PER_MS, NS_PER_S


class SlowFromTheStart(Node):
    """A node whose rank was twice as slow as its peers with its first operation; rank 5 of it is not."""

    def __init__(self):
        super().__init__()
        offset_ns = self.clock.wall_ns() - self.clock.mono_ns()
        self.history = CounterHistory(offset_ns, Computing({PID: 2.0, PID + 1: 1.0}))
        for pid, rank, own_ms in ((PID, 2, 80), (PID + 1, 5, 40)):
            ops = np.zeros(900, COLLECTIVE_OP)
            ops["entry_ns"] = np.arange(900) * 100 * NS_PER_MS + 20 * NS_PER_S
            ops["own_ns"] = own_ms * NS_PER_MS
            self.history.add_ops(pid, Rank("c", "n", rank), ops)
        for second in range(20, 105):
            self.history.read(second * NS_PER_S)
        self.examiner = Examiner(
            NodeIdentity(cluster_id="c", node_id="n"),
            self.history,
            self.transport,
            self.clock,
            Looks(self._watch, self._sample),
        )


class Computing:
    """Counters of processes that use a part of a processor each, in units of 0.4."""

    def __init__(self, rates):
        self._rates = rates

    def read(self, pid, mono_ns, before=None):
        ran_ns = round(0.4 * self._rates[pid] * mono_ns)
        return ProcessCounters(mono_ns, {pid: TaskTimes(ran_ns, 0)})


def causes_of(node):
    (diagnosis,) = node.transport.sent
    return {cause.kind: cause for cause in diagnosis.causes}


def test_one_that_was_slow_from_the_start_is_not_compared_with_itself():
    node = SlowFromTheStart()
    node.answer()
    (cause,) = causes_of(node).values()
    assert cause.kind == "unexplained"
    assert cause.evidence[0] == "no reading from before it was slow, and none of a peer"


def test_one_that_was_slow_from_the_start_is_compared_with_a_peer_of_its_node():
    node = SlowFromTheStart()
    node.answer(replace(node.request, peers=(4, 5)))
    (cause,) = causes_of(node).values()
    assert (cause.kind, cause.share) == ("more-computing", 1.0)
    assert cause.evidence[0] == "on a processor 80 ms an operation, its peers 40 ms"


def test_or_with_what_fleet_heard_of_peers_on_other_nodes_even_after_the_look():
    node = SlowFromTheStart()
    asked = replace(node.request, is_work_asked=True)
    rates = WorkRates(50, 100e6, 40e6, 30e6, 0, is_of_peers=True)
    thread = threading.Thread(target=node.examiner.run, args=(node.stop,))
    thread.start()
    node.examiner.ask(asked)
    node.examiner.ask(replace(asked, id="11" * 8))
    node.examiner.ask(replace(asked, is_work_asked=False, peers_work=rates))
    while not node.transport.sent:
        thread.join(0.01)
    node.stop.set()
    node.examiner.close()
    thread.join(120)
    (cause,) = causes_of(node).values()
    assert cause.evidence[0] == "on a processor 80 ms an operation, its peers 30 ms"


def test_a_peers_work_is_told_at_once_and_again_where_it_was_not_taken():
    node = SlowFromTheStart()
    node.transport.replies = [False] * MAX_TRIES
    request = DiagnosisRequest("55" * 8, 5, "", 0.0, 0, Subject.WORK)
    node.answer(request)
    node.answer(request)
    answers = node.transport.sent
    assert len(answers) == MAX_TRIES + 1
    assert {(one.id, one.rank.rank) for one in answers} == {("55" * 8, 5)}
    assert answers[0].rates.computing_ns == pytest.approx(40e6, rel=0.01)
    assert node.watched == [], "nobody looks at it"
    node.examiner.ask(request)
    assert node.examiner._known.waiting is None


def test_work_of_a_rank_that_is_not_here_is_declined_once():
    node = SlowFromTheStart()
    request = DiagnosisRequest("66" * 8, 7, "", 0.0, 0, Subject.WORK)
    node.answer(request)
    assert (node.transport.sent, node.examiner.counts.n_declined) == ([], 1)
    node.examiner.ask(request)
    assert node.examiner._known.waiting is None
