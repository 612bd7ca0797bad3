"""A process that is slow in turns is watched for longer, and gives way to every other question."""

import threading

import numpy as np
from tests.agent.diagnosis.test_examiner import PID, RANK, Node

from ingero.agent.diagnosis.examiner import MAX_AN_HOUR
from ingero.model.collectives import COLLECTIVE_OP
from ingero.model.counters import OFF_SPAN
from ingero.model.diagnosis import DiagnosisRequest, Subject
from ingero.model.events import OffCpuReason
from ingero.units import NS_PER_MS, NS_PER_S


def test_a_process_that_is_slow_in_turns_is_compared_with_itself_while_it_is_watched():
    node = Node(n_ops=800)
    is_long = np.random.default_rng(3).random(40) < 0.3
    spans = np.zeros(40, OFF_SPAN)
    spans["start_ns"] = np.arange(40) * 100 * NS_PER_MS + 100 * NS_PER_S + 25 * NS_PER_MS
    spans["off_ns"] = np.where(is_long, 40, 1) * NS_PER_MS
    spans["wait_ns"], spans["reason"] = spans["off_ns"], OffCpuReason.PREEMPTED
    ops = np.zeros(40, COLLECTIVE_OP)
    ops["own_ns"] = 20 * NS_PER_MS + spans["off_ns"]
    ops["entry_ns"] = spans["start_ns"] + spans["off_ns"] + 5 * NS_PER_MS
    node.history.add_ops(PID, RANK, ops[::-1])
    node.spans = spans
    node.answer(DiagnosisRequest("66" * 8, 2, "", 0.0, 0, Subject.UNEVEN))
    (diagnosis,) = node.transport.sent
    assert [(cause.kind, cause.share) for cause in diagnosis.causes] == [("cpu-contention", 1.0)]
    assert diagnosis.excess_ns == is_long.sum() * 39 * NS_PER_MS
    assert (diagnosis.window_ns, diagnosis.n_ops) == (4 * NS_PER_S, 40)
    assert (node.watched, node.sampled) == ([(PID, PID)], [PID])


def test_where_no_switch_can_be_seen_uneven_work_is_declined():
    node = Node()
    node.look_by(None)
    node.examiner.close()
    diagnosis = node.examiner._find_answer(
        DiagnosisRequest("66" * 8, 2, "", 0.0, 0, Subject.UNEVEN), node.stop
    )
    assert diagnosis.declined == "its switches cannot be seen here, as without root"


def test_looks_at_uneven_work_leave_those_at_a_culprit_their_number():
    node = Node()
    for number in range(MAX_AN_HOUR + 1):
        node.answer(DiagnosisRequest(f"{number:016x}", 2, "", 0.0, 0, Subject.UNEVEN))
    assert node.transport.sent[-1].declined == "it was looked at 3 times within an hour"
    node.answer()
    assert not node.transport.sent[-1].declined


def test_a_look_at_uneven_work_is_given_up_for_a_culprit_and_may_be_asked_again():
    node, looking, ends = Node(), threading.Event(), []
    uneven = DiagnosisRequest("66" * 8, 2, "", 0.0, 0, Subject.UNEVEN)

    def watch(pid, tid, stop, is_enough):
        if not ends:
            looking.set()
            ends.append(stop.wait(120))
        return node._watch(pid, tid, stop, is_enough)

    node.look_by(watch)
    thread = threading.Thread(target=node.examiner.run, args=(node.stop,))
    thread.start()
    node.examiner.ask(uneven)
    assert looking.wait(120)
    node.examiner.ask(node.request)
    while not node.transport.sent:
        thread.join(0.01)
    assert ends == [True]
    assert [one.id for one in node.transport.sent] == [node.request.id]
    while len(node.transport.sent) < 2:
        node.examiner.ask(uneven)
        thread.join(0.01)
    node.stop.set()
    node.examiner.close()
    thread.join(120)
    assert not thread.is_alive()
    assert [one.id for one in node.transport.sent] == [node.request.id, uneven.id]
    assert node.examiner.counts.n_asked == 2


def test_a_look_at_uneven_work_ends_at_once_with_the_agent():
    node, looking = Node(), threading.Event()

    def watch(pid, tid, stop, is_enough):
        looking.set()
        assert stop.wait(120)

    node.look_by(watch)
    thread = threading.Thread(target=node.examiner.run, args=(node.stop,))
    thread.start()
    node.examiner.ask(DiagnosisRequest("66" * 8, 2, "", 0.0, 0, Subject.UNEVEN))
    assert looking.wait(120)
    node.stop.set()
    node.examiner.close()
    thread.join(120)
    assert not thread.is_alive()
    assert node.transport.sent == []
