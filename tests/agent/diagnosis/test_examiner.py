"""Fleet's question, and what the agent does about it: looks once, answers, sends again what was not taken."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.agent.diagnosis.asked_node import PID, RANK, Listed, Node

from ingero.agent.diagnosis.examiner import (
    MAX_AN_HOUR,
    MAX_TRIES,
    AskedTransport,
)
from ingero.agent.diagnosis.history import CounterHistory
from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.health.transport import HttpTransport, TransportSettings
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.health import iter_collective_series
from ingero.model.collectives import COLLECTIVE_OP
from ingero.model.counters import (
    CodeLines,
    CudaWait,
    ProcessCounters,
    TaskTimes,
    Traffic,
)
from ingero.model.diagnosis import DiagnosisRequest, Subject
from ingero.model.ports import RdmaTraffic
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.diagnosis import (
    build_diagnosis,
    write_request,
)
from ingero.wire.names import Header


def test_answer_explains_the_excess_by_counters_of_before_and_since():
    node = Node()
    node.answer()
    (diagnosis,) = node.transport.sent
    assert diagnosis.rank == RANK
    assert [(cause.kind, cause.share) for cause in diagnosis.causes] == [("cpu-contention", 1.0)]
    assert diagnosis.n_ops == 140
    assert diagnosis.window_ns == 14 * NS_PER_S
    assert diagnosis.excess_ns == 7 * NS_PER_S
    assert node.watched == [(PID, PID)]


@pytest.mark.parametrize("step_s", [-3600, -5, 5, 3600])
def test_a_step_of_the_wall_clock_moves_no_onset(step_s):
    """Fleet knows times of operations, which keep the wall clock of the agent's start."""
    node = Node()
    node.clock.step_wall(step_s * NS_PER_S)
    node.answer()
    (diagnosis,) = node.transport.sent
    assert [(cause.kind, cause.share) for cause in diagnosis.causes] == [("cpu-contention", 1.0)]
    assert diagnosis.window_ns == 14 * NS_PER_S


@pytest.mark.parametrize(
    ("first_s", "about", "seconds"),
    [(30, Subject.SLOW, 2), (91, Subject.SLOW, 5), (30, Subject.UNEVEN, 8)],
)
def test_a_process_is_watched_until_its_first_cause_cannot_change(first_s, about, seconds):
    node, took_ns = Node(first_s=first_s), []

    def watch(pid, tid, stop, is_enough):
        start_ns = node.clock.mono_ns()
        while not is_enough(start_ns, node.clock.mono_ns()):
            node.clock.advance(100 * NS_PER_MS)
        took_ns.append(node.clock.mono_ns() - start_ns)

    node.look_by(watch)
    node.stop.set()
    node.answer(replace(node.request, about=about))
    assert took_ns == [seconds * NS_PER_S]


def test_lines_of_its_program_are_looked_at_meanwhile():
    node = Node(stopped_ns=NS_PER_MS)
    node.answer()
    assert node.sampled == [PID]
    ruled_out = {one.name: one.why for one in node.transport.sent[0].ruled_out}
    assert ruled_out["computing on the host"].endswith("no line of its program: this is a test")


def test_a_rank_that_others_wait_for_is_looked_at_and_its_switches_are_not(monkeypatch):
    monkeypatch.setattr("ingero.agent.diagnosis.examiner.HANG_LOOK_S", 0.0)
    node = Node()
    node.look_ns = 2 * NS_PER_S
    node.seen = CodeLines(100, {}, {"train.py:5 load": 100}, states={"S": 100})
    node.answer(DiagnosisRequest("44" * 8, 2, "", 0.0, 0, Subject.HANG))
    (diagnosis,) = node.transport.sent
    assert [(cause.kind, cause.share) for cause in diagnosis.causes] == [("asleep", 1.0)]
    assert diagnosis.causes[0].evidence == ("waiting, of 100 looks: train.py:5 load (100%)",)
    assert (node.sampled, node.watched) == ([PID], [])


def test_a_rank_that_others_wait_for_in_a_call_of_cuda_waits_for_its_gpu(monkeypatch):
    monkeypatch.setattr("ingero.agent.diagnosis.examiner.HANG_LOOK_S", 0.0)
    for began_before, cause in ((True, "gpu-computing"), (False, "more-computing")):
        node = Node()
        node.look_ns = 2 * NS_PER_S
        node.seen = CodeLines(100, {"train.py:5 sync": 100}, states={"R": 100})
        now_ns = node.clock.mono_ns()
        since_ns = now_ns - 9 * NS_PER_S if began_before else now_ns + 1
        node.history.note_open_calls({PID: CudaWait("cudaDeviceSync", since_ns)})
        node.answer(DiagnosisRequest("44" * 8, 2, "", 0.0, 0, Subject.HANG))
        (diagnosis,) = node.transport.sent
        assert [one.kind for one in diagnosis.causes] == [cause]
        assert (diagnosis.causes[0].evidence[0] == "in cudaDeviceSync for 11 s") is began_before


def test_connections_and_ports_of_a_links_end_are_looked_at_and_nothing_else():
    node = Node()
    asked, asked_ports = [], []

    def look(pid, stop):
        asked.append(pid)
        node.clock.advance(5 * NS_PER_S)
        return Traffic(reason="its connections cannot be read: Operation not permitted")

    def look_at_ports(pid, stop):
        asked_ports.append(pid)
        return RdmaTraffic(reason="its open files cannot be read: Permission denied")

    node.look_by(node._watch, look, look_at_ports)
    node.answer(DiagnosisRequest("55" * 8, 2, "", 0.0, 0, Subject.LINK))
    (diagnosis,) = node.transport.sent
    assert [(cause.kind, cause.share) for cause in diagnosis.causes] == [("unexplained", 1.0)]
    assert diagnosis.causes[0].evidence == (
        "its connections cannot be read: Operation not permitted",
        "its open files cannot be read: Permission denied",
    )
    assert diagnosis.window_ns == 5 * NS_PER_S
    assert (asked, asked_ports, node.sampled, node.watched) == ([PID], [PID], [], [])


def test_lines_are_those_of_the_worker_that_is_busier_than_its_process():
    def reading(second, own, **children):
        took = {int(name[1:]): TaskTimes(spent, 0) for name, spent in children.items()}
        return ProcessCounters(second, {PID: TaskTimes(own, 0)}, children=took)

    history = CounterHistory(0, Listed([reading(1, 10, c7=50, c8=5), reading(2, 20, c7=55, c8=20)]))
    history.add_ops(PID, RANK, np.zeros(1, COLLECTIVE_OP))
    assert history.find_worker(PID) is None, "nothing was read yet"
    history.read(1)
    history.read(2)
    assert history.find_worker(PID) == 8
    history = CounterHistory(0, Listed([reading(1, 10, c7=50), reading(2, 20, c7=59)]))
    history.add_ops(PID, RANK, np.zeros(1, COLLECTIVE_OP))
    history.read(1)
    history.read(2)
    assert history.find_worker(PID) is None


def test_a_start_with_few_and_long_operations_is_no_reference():
    node = Node(first_s=0, start_s=15)
    since_ns = node.request.since_ns - 10 * NS_PER_S
    node.answer(DiagnosisRequest("33" * 8, 2, "", 0.25, since_ns))
    (diagnosis,) = node.transport.sent
    assert [cause.kind for cause in diagnosis.causes] == ["cpu-contention"]


def test_onset_that_leaves_nothing_before_it_is_moved_to_where_own_time_rose():
    node = Node(first_s=60)
    early = DiagnosisRequest("22" * 8, 2, "", 0.3, node.request.since_ns - 60 * NS_PER_S)
    node.answer(early)
    (diagnosis,) = node.transport.sent
    assert [cause.kind for cause in diagnosis.causes] == ["cpu-contention"]
    assert diagnosis.window_ns == 13 * NS_PER_S


def test_what_was_watched_is_scaled_by_the_operations_of_that_time():
    node = Node(stopped_ns=NS_PER_S)
    node.answer()
    stopped = {cause.kind: cause.share for cause in node.transport.sent[0].causes}["stopped"]
    assert stopped == pytest.approx(1 / 3, abs=0.01)


def test_same_question_is_looked_into_once_and_an_answer_that_was_lost_is_sent_again():
    node = Node()
    node.transport.replies = [False] * MAX_TRIES
    node.answer()
    assert node.examiner.counts.n_failed == MAX_TRIES
    assert node.examiner.counts.n_sent == 0
    node.answer()
    assert len(node.watched) == 1
    assert len(set(node.transport.sent)) == 1
    assert (node.examiner.counts.n_asked, node.examiner.counts.n_sent) == (1, 1)


def test_question_that_was_answered_is_not_taken_again():
    node = Node()
    node.answer()
    node.examiner.ask(node.request)
    assert node.examiner._known.waiting is None


@pytest.mark.parametrize(("rank", "job"), [(3, ""), (2, "other")])
def test_question_about_a_process_that_is_not_followed_is_declined(rank, job):
    node = Node()
    node.answer(DiagnosisRequest("11" * 8, rank, job, 0.5, 0))
    (diagnosis,) = node.transport.sent
    assert diagnosis.declined == "no such rank is followed here"
    assert (diagnosis.rank.rank, diagnosis.rank.job) == (rank, job)
    assert node.watched == []
    assert node.examiner.counts.n_declined == 1


def test_one_process_is_looked_at_so_many_times_an_hour():
    node = Node()
    for number in range(MAX_AN_HOUR + 1):
        node.answer(DiagnosisRequest(f"{number:016x}", 2, "", 0.5, node.request.since_ns))
    assert len(node.watched) == MAX_AN_HOUR
    assert node.transport.sent[-1].declined == "it was looked at 3 times within an hour"
    node.clock.advance(3600 * NS_PER_S)
    node.answer(DiagnosisRequest("ff" * 8, 2, "", 0.5, node.request.since_ns))
    assert len(node.watched) == MAX_AN_HOUR + 1


def test_thread_answers_what_it_is_asked_and_ends():
    node = Node()
    thread = threading.Thread(target=node.examiner.run, args=(node.stop,))
    thread.start()
    node.examiner.ask(node.request)
    while not node.transport.sent:
        thread.join(0.01)
    node.stop.set()
    node.examiner.close()
    thread.join(120)
    assert not thread.is_alive()


def test_a_look_that_fails_is_declined_and_counted_and_the_next_question_is_answered():
    node, notes, asked = Node(), [], []

    def fail(pid, tid, stop, is_enough):
        asked.append(pid)
        if len(asked) < 3:
            raise ValueError("a stat that nobody foresaw")
        return node._watch(pid, tid, stop, is_enough)

    node.look_by(fail)
    node.examiner.notify = notes.append
    thread = threading.Thread(target=node.examiner.run, args=(node.stop,), daemon=True)
    thread.start()
    for at in range(3):
        node.examiner.ask(replace(node.request, id=f"{at:02x}" * 8))
        wait_until(lambda n=at: len(node.transport.sent) > n)
        wait_until(lambda: node.examiner._known.waiting is None)
    node.stop.set()
    node.examiner.close()
    thread.join(120)
    first, second, third = node.transport.sent
    assert first.declined == second.declined == "the look failed; the agent's log says how"
    assert not third.declined
    (note,) = notes
    assert note.startswith("a look for a diagnosis failed: ValueError('a stat that nobody")
    counts = node.examiner.add_outcomes(CollectiveCounts())
    assert (counts.diagnoses_faulted, counts.diagnoses_sent) == (2, 3)
    page = PrometheusPage()
    page.take(tuple(iter_collective_series(counts)), 0)
    assert 'ingero_agent_diagnoses_total{outcome="faulted"} 2' in page.render().splitlines()


def test_an_answer_that_cannot_be_built_ends_no_thread():
    node, notes = Node(), []
    node.examiner.notify = notes.append
    send, node.transport.send = node.transport.send, None
    thread = threading.Thread(target=node.examiner.run, args=(node.stop,), daemon=True)
    thread.start()
    node.examiner.ask(node.request)
    wait_until(lambda: notes)
    node.transport.send = send
    node.examiner.ask(replace(node.request, id="01" * 8))
    wait_until(lambda: node.transport.sent)
    node.stop.set()
    node.examiner.close()
    thread.join(120)
    assert [one.id for one in node.transport.sent] == ["01" * 8]
    assert node.examiner.counts.n_faulted == 1


@pytest.mark.parametrize(("text", "is_asked"), [(None, False), ("rank=2", False), ("", True)])
def test_question_in_an_answer_is_handed_on(collector, text, is_asked):
    node = Node()
    if text is not None:
        collector.headers = {str(Header.DIAGNOSE): text or write_request(node.request)}
    settings = TransportSettings(
        endpoint=parse_endpoint(collector.url, is_insecure=True, option="test"),
        timeout_ns=5 * NS_PER_S,
    )
    asked = []
    transport = AskedTransport(HttpTransport(settings), asked.append)
    node.answer()
    reply = transport.send(build_diagnosis(node.transport.sent[0], 1), 1)
    transport.close()
    assert reply.is_taken
    assert asked == ([node.request] if is_asked else [])


def test_what_a_program_does_to_start_is_no_part_of_its_work():
    node = Node(first_s=0)  # its first operation is entered after 20 s
    work = node.history.find_work(PID, 0, 60 * NS_PER_S)
    assert (work.first.mono_ns, work.last.mono_ns) == (20 * NS_PER_S, 60 * NS_PER_S)
    assert node.history.find_work(PID, 0, 20 * NS_PER_S) is None
