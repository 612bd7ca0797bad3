"""Fleet's question, and what the agent does about it: looks once, answers, sends again what was not taken."""

import threading
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from ingero.agent.diagnosis.examiner import (
    MAX_AN_HOUR,
    MAX_TRIES,
    AskedTransport,
    Examiner,
    Looks,
)
from ingero.agent.diagnosis.history import MAX_OPS, MAX_READINGS, READ_NS, CounterHistory
from ingero.agent.diagnosis.switches import SwitchTimes
from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.transport import HttpTransport, PushReply, TransportSettings
from ingero.agent.metrics.exporting import PrometheusPage
from ingero.agent.metrics.health import iter_collective_series
from ingero.model.collectives import COLLECTIVE_OP, Rank
from ingero.model.counters import (
    OFF_SPAN,
    CodeLines,
    CudaWait,
    OffCpuTimes,
    ProcessCounters,
    TaskTimes,
    Traffic,
    WorkRates,
)
from ingero.model.diagnosis import DiagnosisRequest, Subject
from ingero.model.ports import RdmaTraffic
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.otlp.codec import read_log_entries
from ingero.recording.causal.work_rates import find_rates
from ingero.testing.clock import ManualClock
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.diagnosis import (
    DIAGNOSIS_EVENT,
    build_diagnosis,
    build_diagnosis_read,
    write_request,
)
from ingero.wire.names import Header
from ingero.wire.peer_work import WORK_EVENT, build_peer_work_read

RANK = Rank("c", "n", 2)
PID = 40


@dataclass
class Transport:
    """Answers what a test tells it to."""

    replies: list = field(default_factory=list)
    sent: list = field(default_factory=list)

    def send(self, export, wall_ns):
        diagnoses, work = build_diagnosis_read(), build_peer_work_read()
        read_log_entries(export, {DIAGNOSIS_EVENT: diagnoses, WORK_EVENT: work})
        self.sent += diagnoses.found + work.found
        is_taken = self.replies.pop(0) if self.replies else True
        return PushReply(is_taken=is_taken, detail="", retry_after_ns=1)

    def close(self):
        pass


class Files:
    """Counters of a process of which every operation takes 5 ms, and 15 ms of waiting once it is slow.

    From 20 s on it may start for a while, in which it waits on three threads.
    """

    def __init__(self, clock, slow_ns, start_ns=0):
        self._clock, self._slow_ns, self._start_ns = clock, slow_ns, start_ns

    def read(self, pid, mono_ns, before=None):
        waited_ns = max(mono_ns - self._slow_ns, 0) // 2
        waited_ns += 3 * min(max(mono_ns - 20 * NS_PER_S, 0), self._start_ns)
        return ProcessCounters(mono_ns, {pid: TaskTimes(mono_ns // 4, waited_ns)})


class Listed:
    """Readings as they are given, one after the other."""

    def __init__(self, readings):
        self._readings = list(readings)

    def read(self, pid, mono_ns, before=None):
        return self._readings.pop(0)


class Node:
    """A node whose rank entered ten operations a second; it became slow ten seconds ago."""

    def __init__(self, stopped_ns=0, first_s=30, start_s=0, n_ops=900):
        self.clock = ManualClock(100 * NS_PER_S)
        slow_ns = self.clock.mono_ns() - 10 * NS_PER_S
        self.request = DiagnosisRequest("00" * 8, 2, "", 0.5, self.clock.wall_ns() - 10 * NS_PER_S)
        files = Files(self.clock, slow_ns, start_s * NS_PER_S)
        self.history = CounterHistory(self.clock.wall_ns() - self.clock.mono_ns(), files)
        ops = np.zeros(n_ops, COLLECTIVE_OP)
        ops["entry_ns"] = np.arange(n_ops) * 100 * NS_PER_MS + 20 * NS_PER_S
        ops["own_ns"] = np.where(ops["entry_ns"] > slow_ns, 100, 50) * NS_PER_MS
        ops["own_ns"][: 10 * start_s] *= 20
        self.history.add_ops(PID, RANK, ops)
        for second in range(first_s, 100):
            self.history.read(second * NS_PER_S)
        self.transport = Transport()
        self.stopped_ns = stopped_ns
        self.watched, self.sampled = [], []
        self.look_ns = 0
        self.seen = CodeLines(reason="this is a test")
        self.spans = np.zeros(0, OFF_SPAN)
        self.look_by(self._watch)
        self.stop = threading.Event()

    def look_by(self, watch, *others):
        """Have an examiner that sees switches so."""
        self.examiner = Examiner(
            NodeIdentity(cluster_id="c", node_id="n"),
            self.history,
            self.transport,
            self.clock,
            Looks(watch, self._sample, *others),
        )

    def _watch(self, pid, tid, stop, is_enough):
        self.watched.append((pid, tid))
        start_ns = self.clock.mono_ns()
        self.clock.advance(4 * NS_PER_S)
        return SwitchTimes(
            OffCpuTimes(0, stopped_ns=self.stopped_ns),
            start_ns,
            self.clock.mono_ns(),
            self.spans,
        )

    def _sample(self, pid, stop):
        self.sampled.append(pid)
        assert stop.wait(120), "it is told when to end"
        self.clock.advance(self.look_ns)
        return self.seen

    def answer(self, request=None):
        self.examiner.answer(request or self.request, self.stop)


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


def test_workers_that_a_loader_starts_anew_count_as_the_ones_whose_places_they_take():
    """Each epoch has two of its own, which are always on a processor; the last ones have just begun."""

    def reading(second):
        epoch, since_s = divmod(second, 20)
        times = TaskTimes(since_s * NS_PER_S, 0, 20 * epoch)
        return ProcessCounters(
            second * NS_PER_S,
            {PID: TaskTimes(second * NS_PER_S // 4, 0)},
            children={100 * epoch + 7: times, 100 * epoch + 8: times},
            boot_ticks=second,
        )

    history = CounterHistory(0, Listed(map(reading, range(62))))
    ops = np.zeros(62, COLLECTIVE_OP)
    ops["entry_ns"], ops["own_ns"] = np.arange(62) * NS_PER_S, NS_PER_S // 2
    history.add_ops(PID, RANK, ops)
    for second in range(62):
        history.read(second * NS_PER_S)
    rates = find_rates(history.find_work(PID, 0, 62 * NS_PER_S))
    assert rates.child_pid == 307
    assert rates.computing_ns == pytest.approx(NS_PER_S, rel=0.1)
    assert rates.n_unknown_threads == 0


def build_history_with_calls(calls):
    """Readings at 0, 1, ... 10 s, an operation in each, and times in calls of CUDA by second."""
    seconds = [NS_PER_S * second for second in range(11)]
    readings = [ProcessCounters(at, {PID: TaskTimes(at, 0)}) for at in seconds]
    history = CounterHistory(0, Listed(readings))
    ops = np.zeros(10, COLLECTIVE_OP)
    ops["entry_ns"], ops["own_ns"] = seconds[1:], NS_PER_S // 4
    history.add_ops(PID, RANK, ops)
    for at, took_ns in calls:
        history.add_calls(at, took_ns)
    for at in seconds:
        history.read(at)
    return history


def test_time_in_calls_of_cuda_is_that_between_the_readings():
    calls = [
        (NS_PER_S * second, {PID: NS_PER_S * (0.8 if second > 5 else 0.4), PID + 1: 9e9})
        for second in range(11)
    ]
    history = build_history_with_calls(calls)
    early, late = (
        history.find_work(PID, NS_PER_S * first, NS_PER_S * (first + 5)) for first in (1, 6)
    )
    assert early.cuda_ns == pytest.approx(0.4 * 4 * NS_PER_S + 0.8 * NS_PER_S, rel=0.01)
    assert late.cuda_ns == pytest.approx(0.8 * (late.last.mono_ns - late.first.mono_ns), rel=0.01)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        [(NS_PER_S * second, {PID + 1: 1e9}) for second in range(11)],
        [(NS_PER_S * second, {PID: 1e9}) for second in (0, 1, 2, 3)],
    ],
    ids=["none", "of another process", "of a third of the time"],
)
def test_time_in_calls_of_cuda_is_unknown_where_none_is_seen(calls):
    history = build_history_with_calls(calls)
    assert history.find_work(PID, 0, 11 * NS_PER_S).cuda_ns is None


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


def test_history_keeps_a_bounded_stretch_and_forgets_a_process_that_ended():
    node = Node()
    for second in range(MAX_READINGS + 100):
        node.history.read((100 + second) * NS_PER_S)
    work = node.history.find_work(PID, 0, 10_000 * NS_PER_S)
    assert work.last.mono_ns - work.first.mono_ns == (MAX_READINGS - 1) * NS_PER_S
    ops = np.zeros(MAX_OPS, COLLECTIVE_OP)
    node.history.add_ops(PID, RANK, ops)
    node.history.read_due((100 + MAX_READINGS + 99) * NS_PER_S + READ_NS - 1)
    assert node.history.find_work(PID, 0, 10_000 * NS_PER_S).last == work.last
    assert node.history._followed[PID].n_ops == MAX_OPS
    node.history._files = Listed([None])
    node.history.read((101 + MAX_READINGS + 99) * NS_PER_S)
    assert node.history.find(2, "") is None
    assert node.history.find_work(PID, 0, 10_000 * NS_PER_S) is None


def test_rank_that_begins_again_on_its_node_is_its_new_process():
    """The old one's last operations are delivered after its end."""

    class Alive(Files):
        def read(self, pid, mono_ns, before=None):
            return super().read(pid, mono_ns, before) if pid != PID else None

    clock = ManualClock(100 * NS_PER_S)
    history = CounterHistory(0, Alive(clock, clock.mono_ns()))
    ops = np.ones(3, COLLECTIVE_OP)
    history.add_ops(PID, RANK, ops)
    history.add_ops(PID + 1, RANK, ops)
    history.read(NS_PER_S)
    assert history.find(2, "") == (PID + 1, RANK)


def test_a_process_that_got_the_number_of_another_one_is_not_taken_for_it():
    readings = [
        ProcessCounters(second, {PID: TaskTimes(ran_ns, 0, start_ticks)})
        for second, ran_ns, start_ticks in ((1, 10, 5), (2, 20, 5), (3, 900, 7))
    ]
    history = CounterHistory(0, Listed(readings))
    history.add_ops(PID, RANK, np.ones(1, COLLECTIVE_OP))
    history.read(1)
    history.read(2)
    assert history.find(2, "") == (PID, RANK)
    history.read(3)
    assert history.find(2, "") is None


def test_what_a_program_does_to_start_is_no_part_of_its_work():
    node = Node(first_s=0)  # its first operation is entered after 20 s
    work = node.history.find_work(PID, 0, 60 * NS_PER_S)
    assert (work.first.mono_ns, work.last.mono_ns) == (20 * NS_PER_S, 60 * NS_PER_S)
    assert node.history.find_work(PID, 0, 20 * NS_PER_S) is None
