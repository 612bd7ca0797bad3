"""A node with one rank, whose counters and switches a test says, and what it sends."""

import threading
from dataclasses import dataclass, field

import numpy as np

from ingero.agent.diagnosis.examiner import (
    Examiner,
    Looks,
)
from ingero.agent.diagnosis.history import CounterHistory
from ingero.agent.diagnosis.switches import SwitchTimes
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.transport import PushReply
from ingero.model.collectives import COLLECTIVE_OP, Rank
from ingero.model.counters import (
    OFF_SPAN,
    CodeLines,
    OffCpuTimes,
    ProcessCounters,
    TaskTimes,
)
from ingero.model.diagnosis import DiagnosisRequest
from ingero.otlp.codec import read_log_entries
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.diagnosis import (
    DIAGNOSIS_EVENT,
    build_diagnosis_read,
)
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
