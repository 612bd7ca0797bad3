"""Answers Fleet's question why a worker of this node is slow, or stands, on a thread of its own, one at a time.

Bounds. Only a question about a process that we follow is looked into, `MAX_AN_HOUR` times an hour for one process; all
others are declined with a reason. A finished answer that Fleet did not take is kept and sent again when it asks again.

What a process shows of itself may be what nobody foresaw: a look that fails of it is declined, noted and counted.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Final

from ingero.agent.diagnosis.code_lines import SampleLines, sample_lines
from ingero.agent.diagnosis.comparison import WorkComparison
from ingero.agent.diagnosis.connections import LookAtTraffic, look_at_traffic
from ingero.agent.diagnosis.history import CounterHistory
from ingero.agent.diagnosis.rdma import LookAtPorts, look_at_ports
from ingero.agent.diagnosis.switches import IsEnough, SwitchTimes, WatchSwitches
from ingero.agent.health.collective_counts import CollectiveCounts
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.transport import PushReply, PushTransport
from ingero.errors import IngeroError
from ingero.faults import FaultPlace, find_place
from ingero.model.collectives import Rank
from ingero.model.counters import CodeLines, WorkRates
from ingero.model.diagnosis import Diagnosis, DiagnosisRequest, PeerWork, Subject
from ingero.otlp.codec import Export
from ingero.recording.causal.conclusions import ExcessCauses
from ingero.recording.causal.excess import (
    describe_wait,
    find_excess_causes,
    find_hang_causes,
)
from ingero.recording.causal.transfers import find_link_causes
from ingero.recording.causal.uneven import WatchedOps, find_uneven_causes
from ingero.recording.causal.work_rates import find_median, find_rates
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import build_diagnosis
from ingero.wire.peer_work import build_peer_work

WATCH_NS: Final = 5 * NS_PER_S
"""Of a process that is slower than its peers, at most."""
MIN_WATCH_NS: Final = 2 * NS_PER_S
"""Of one whose first cause is known from the kernel's counters: what is seen of switches seldom changes it."""
SETTLE_S: Final = 0.5
"""After watching, at most, until the operations that ended in it are known."""
_SETTLE_POLL_S: Final = 0.05
UNEVEN_WATCH_NS: Final = 8 * NS_PER_S
"""Of a process that is slow in turns, once every switch is seen: its turns have to come."""
HANG_LOOK_S: Final = 2.0
"""At a process that others wait for."""
PEERS_WAIT_S: Final = 5.0
"""For the work of peers on other nodes, after a look that itself takes about as long."""
MAX_AN_HOUR: Final = 3
MAX_TRIES: Final = 3
FAULTS: Final = (
    IngeroError, OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError,
    struct.error,
)  # fmt: skip
"""What reading and comparing raise of what they did not expect. Of others, such as of memory, the thread ends."""
_MAX_NOTED: Final = 16
"""Places of faults that are written; faults of others are counted alone."""
_HOUR_NS: Final = 3600 * NS_PER_S
_MAX_KNOWN: Final = 64


@dataclass(slots=True)
class DiagnosisCounts:
    """What became of Fleet's questions since the start.

    Attributes:
        n_asked: Different questions.
        n_sent: Answers that Fleet took, those that decline included.
        n_declined: Questions that were not looked into.
        n_failed: Requests with an answer that Fleet did not take; it is sent again when Fleet asks again.
        n_faulted: Questions at which a fault of the agent ended the look or the sending.
    """

    n_asked: int = 0
    n_sent: int = 0
    n_declined: int = 0
    n_failed: int = 0
    n_faulted: int = 0


@dataclass(frozen=True, slots=True)
class AskedTransport:
    """A transport that hands on what the answers ask.

    Attributes:
        transport: Sends.
        ask: Takes questions; never blocks.
    """

    transport: PushTransport
    ask: Callable[[DiagnosisRequest], None]

    def send(self, export: Export, wall_ns: int) -> PushReply:
        """Send once and wait for the answer, at most the timeout. Does not raise for what the network does."""
        reply = self.transport.send(export, wall_ns)
        if reply.question is not None:
            self.ask(reply.question)
        return reply

    def close(self) -> None:
        """Release connections."""
        self.transport.close()


@dataclass(slots=True)
class _Known:
    """Questions that were asked.

    Attributes:
        waiting: The one to be answered next, or that is being answered, as it was asked last.
        urgent: One for which a look at uneven work is given up; it is answered next.
        ready: An answer that Fleet has not taken.
        done: Those that are answered, newest last, each with its rank.
        examined_ns: When each process was looked at, apart from that whether it was for work that is uneven, which is
            nobody's fault.
        noted: Places of faults that were written.
    """

    waiting: DiagnosisRequest | None = None
    urgent: DiagnosisRequest | None = None
    ready: Diagnosis | PeerWork | None = None
    done: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_MAX_KNOWN))
    examined_ns: dict[tuple[int, bool], deque[int]] = field(default_factory=dict)
    noted: set[FaultPlace] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Looks:
    """How a process is looked at for some seconds.

    Attributes:
        watch: Sees every switch of a thread; None where nothing can be probed.
        sample: Sees which lines of Python it is at.
        look_at_traffic: Sees what becomes of what it sends over TCP.
        look_at_ports: Sees what the RDMA ports count that it has open.
    """

    watch: WatchSwitches | None = None
    sample: SampleLines = sample_lines
    look_at_traffic: LookAtTraffic = look_at_traffic
    look_at_ports: LookAtPorts = look_at_ports


class Examiner:
    """Makes diagnoses.

    Args:
        identity: The node.
        history: What its ranks did.
        transport: A way to Fleet of its own.
        clock: Both clocks.
        looks: How a process is looked at.

    Attributes:
        counts: What became of questions.
        notify: Gets a sentence for the first fault of each place.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        history: CounterHistory,
        transport: PushTransport,
        clock: Clock,
        looks: Looks,
    ) -> None:
        self._identity = identity
        self._history = history
        self._comparison = WorkComparison(history, clock)
        self._transport = transport
        self._clock = clock
        self._looks = looks
        self._known = _Known()
        self._wake = threading.Condition()
        self._gives_way = threading.Event()
        self.counts = DiagnosisCounts()
        self.notify: Callable[[str], None] = lambda _text: None

    def ask(self, request: DiagnosisRequest) -> None:
        """Take a question; one that comes while another waits is asked again by Fleet. Any thread, never blocks.

        A look at uneven work, which takes long and is of nobody's fault, is given up for any other question.
        """
        with self._wake:
            waiting = self._known.waiting
            if (request.id, request.rank) in self._known.done:
                return
            if waiting is None or (waiting.id, waiting.rank) == (request.id, request.rank):
                self._known.waiting = request  # asked again, it may tell more of the peers
                self._wake.notify_all()
            elif waiting.about is Subject.UNEVEN and request.about is not Subject.UNEVEN:
                self._known.urgent = request
                self._gives_way.set()

    def run(self, stop: threading.Event) -> None:
        """Answer until asked to stop, which `close` makes known at once."""
        while not stop.is_set():
            with self._wake:
                while self._known.waiting is None and not stop.is_set():
                    self._wake.wait()
                request = self._known.waiting
            if request is not None:
                try:
                    self.answer(request, stop)
                except FAULTS as error:
                    self._note_fault(error)
                    self._known.ready = None
                    self._known.done.append((request.id, request.rank))
                with self._wake:
                    self._known.waiting, self._known.urgent = self._known.urgent, None
                    if not stop.is_set():
                        self._gives_way.clear()

    def close(self) -> None:
        """Let `run` see that it is to stop."""
        self._gives_way.set()
        with self._wake:
            self._wake.notify()

    def answer(self, request: DiagnosisRequest, stop: threading.Event) -> None:
        """Look into a question, unless that was done, and send the answer."""
        answer = self._known.ready
        if answer is None or (answer.id, answer.rank.rank) != (request.id, request.rank):
            answer = self._try_to_answer(request, stop)
            if request.about is Subject.UNEVEN and self._gives_way.is_set():
                return
            self.counts.n_asked += 1
            self._known.ready = answer
        if answer is None:
            self._known.done.append((request.id, request.rank))
            return
        if stop.is_set():
            return
        for _ in range(MAX_TRIES):
            reply = self._transport.send(self._build(answer), self._clock.wall_ns())
            if reply.is_taken:
                self.counts.n_sent += 1
                self._known.done.append((request.id, request.rank))
                self._known.ready = None
                return
            self.counts.n_failed += 1
            pause_ns = reply.retry_after_ns or NS_PER_S
            if stop.wait(min(pause_ns, 10 * NS_PER_S) / NS_PER_S):
                return

    def _note_fault(self, error: Exception) -> None:
        self.counts.n_faulted += 1
        place, noted = find_place(error), self._known.noted
        if place not in noted and len(noted) < _MAX_NOTED:
            noted.add(place)
            self.notify(f"a look for a diagnosis failed: {error!r} in {place}")

    def _try_to_answer(
        self, request: DiagnosisRequest, stop: threading.Event
    ) -> Diagnosis | PeerWork | None:
        """The same as `_find_answer`; a look that fails is declined."""
        try:
            return self._find_answer(request, stop)
        except FAULTS as error:
            self._note_fault(error)
        if request.about is Subject.WORK:
            return None
        self.counts.n_declined += 1
        return _decline(self._identity, request, "the look failed; the agent's log says how")

    def _find_answer(
        self, request: DiagnosisRequest, stop: threading.Event
    ) -> Diagnosis | PeerWork | None:
        """None where there is nothing to tell of a worker's work."""
        if request.about is Subject.WORK:
            found = self._history.find(request.rank, request.job)
            rates = None if found is None else self._comparison.find_recent(found[0])
            if found is None or rates is None:
                self.counts.n_declined += 1
                return None
            return PeerWork(request.id, found[1], rates)
        diagnosis = self._examine(request, stop)
        self.counts.n_declined += bool(diagnosis.declined)
        return diagnosis

    def _build(self, answer: Diagnosis | PeerWork) -> Export:
        wall_ns = self._clock.wall_ns()
        if isinstance(answer, PeerWork):
            return build_peer_work(answer, wall_ns)
        return build_diagnosis(answer, wall_ns)

    def add_outcomes(self, counts: CollectiveCounts) -> CollectiveCounts:
        """These counts with what became of questions."""
        return replace(
            counts,
            diagnoses_asked=self.counts.n_asked,
            diagnoses_sent=self.counts.n_sent,
            diagnoses_declined=self.counts.n_declined,
            diagnoses_failed=self.counts.n_failed,
            diagnoses_faulted=self.counts.n_faulted,
        )

    def _examine(self, request: DiagnosisRequest, stop: threading.Event) -> Diagnosis:
        found = self._history.find(request.rank, request.job)
        if found is None:
            return _decline(self._identity, request, "no such rank is followed here")
        pid, rank = found
        if not self._may_examine(pid, request.about):
            declined = f"it was looked at {MAX_AN_HOUR} times within an hour"
            return Diagnosis(id=request.id, rank=rank, declined=declined)
        examine = {
            Subject.HANG: self._examine_hang,
            Subject.LINK: self._examine_link,
            Subject.UNEVEN: self._examine_uneven,
        }.get(request.about)
        if examine is not None:
            return examine(pid, request.id, rank, stop)
        return self._examine_slow(pid, request, rank, stop)

    def _examine_slow(
        self, pid: int, request: DiagnosisRequest, rank: Rank, stop: threading.Event
    ) -> Diagnosis:
        """A process that is slower than its peers: its counters are compared with those of before, or with theirs."""

        def is_enough(start_ns: int, now_ns: int) -> bool:
            watched_ns = now_ns - start_ns
            if watched_ns < MIN_WATCH_NS:
                return False
            return watched_ns >= WATCH_NS or self._comparison.is_counted(pid, self._latest(request))

        watched, lines = self._look_at(pid, stop, is_enough)
        seen = None if watched is None else watched.times
        after, then = self._comparison.find(pid, request)
        if after is None:
            return Diagnosis(id=request.id, rank=rank, declined="its process has no counters")
        if then is None:
            then = self._find_peers_work(request, stop)
        causes = find_excess_causes(request.excess_share, after, then, seen, lines)
        return _make_diagnosis(
            request.id, rank, causes, after.last.mono_ns - after.first.mono_ns, after.n_ops
        )

    def _examine_hang(self, pid: int, name: str, rank: Rank, stop: threading.Event) -> Diagnosis:
        """A process that stands makes no switches: it is looked at."""
        began_ns, enough = self._clock.mono_ns(), threading.Event()
        with ThreadPoolExecutor(1) as beside:
            lines = beside.submit(self._looks.sample, pid, enough)
            stop.wait(HANG_LOOK_S)
            enough.set()
        now_ns = self._clock.mono_ns()
        window_ns, call = now_ns - began_ns, self._history.find_open_call(pid, began_ns)
        waiting = "" if call is None else describe_wait(call, now_ns)
        found = find_hang_causes(lines.result(), window_ns, waiting)
        return _make_diagnosis(name, rank, found, window_ns)

    def _examine_link(self, pid: int, name: str, rank: Rank, stop: threading.Event) -> Diagnosis:
        """A process whose transfers are slow: its connections and its ports are looked at."""
        began_ns = self._clock.mono_ns()
        with ThreadPoolExecutor(1) as beside:
            rdma = beside.submit(self._looks.look_at_ports, pid, stop)
            traffic = self._looks.look_at_traffic(pid, stop)
        ended_ns = self._clock.mono_ns()
        found = find_link_causes(traffic, rdma.result())
        return _make_diagnosis(
            name, rank, found, ended_ns - began_ns, self._history.count_ops(pid, began_ns, ended_ns)
        )

    def _examine_uneven(self, pid: int, name: str, rank: Rank, _: threading.Event) -> Diagnosis:
        """A process that is slow in turns: each of its operations is laid over every switch of its thread."""
        watched, lines = self._look_at(
            pid, self._gives_way, lambda start_ns, now_ns: now_ns - start_ns >= UNEVEN_WATCH_NS
        )
        if watched is None:
            declined = "its switches cannot be seen here, as without root"
            return Diagnosis(id=name, rank=rank, declined=declined)
        span_ns = (watched.start_ns, watched.end_ns)
        ops = self._history.find_ops(pid, *span_ns)
        work = self._history.find_work(pid, *span_ns)
        rates = None if work is None else find_rates(work)
        throttled_ns = 0 if rates is None else round(rates.throttled_ns * rates.n_ops)
        found = find_uneven_causes(
            WatchedOps(
                ops,
                watched.spans,
                watched.start_ns,
                throttled_ns,
                None if rates is None else rates.n_processors,
                watched.times.n_lost,
                _find_device_share(rates),
            ),
            lines,
        )
        return _make_diagnosis(name, rank, found, watched.end_ns - watched.start_ns, len(ops))

    def _find_peers_work(
        self, request: DiagnosisRequest, stop: threading.Event
    ) -> WorkRates | None:
        """What an operation takes the peers of a worker that was slow from its first one on."""
        followed = [self._history.find(peer, request.job) for peer in request.peers]
        here = [self._comparison.find_recent(one[0]) for one in followed if one is not None]
        if known := [rates for rates in here if rates is not None]:
            return find_median(known)
        with self._wake:
            self._wake.wait_for(
                lambda: stop.is_set() or not self._latest(request).is_work_asked, PEERS_WAIT_S
            )
            return self._latest(request).peers_work

    def _latest(self, request: DiagnosisRequest) -> DiagnosisRequest:
        """A question as it was asked last."""
        waiting = self._known.waiting
        is_same = waiting is not None and (waiting.id, waiting.rank) == (request.id, request.rank)
        return waiting if waiting is not None and is_same else request

    def _may_examine(self, pid: int, about: Subject) -> bool:
        """Whether a process was not looked at too often; notes that it is now."""
        now_ns = self._clock.mono_ns()
        of_what = (pid, about is Subject.UNEVEN)
        examined = self._known.examined_ns.setdefault(of_what, deque(maxlen=MAX_AN_HOUR))
        if len(examined) == MAX_AN_HOUR and now_ns - examined[0] < _HOUR_NS:
            return False
        examined.append(now_ns)
        return True

    def _settle(self, pid: int, stop: threading.Event) -> None:
        """Wait for an operation that was entered after this: those before it are known then."""
        now_ns, waited_s = self._clock.mono_ns(), 0.0
        while waited_s < SETTLE_S and not self._history.has_op_since(pid, now_ns):
            if stop.wait(_SETTLE_POLL_S):
                return
            waited_s += _SETTLE_POLL_S

    def _look_at(
        self, pid: int, stop: threading.Event, is_enough: IsEnough
    ) -> tuple[SwitchTimes | None, CodeLines]:
        """Watch for some seconds; counters are read at both ends. The times have the operations of that time."""
        self._history.read(self._clock.mono_ns())
        tid, watch = self._history.find_busiest(pid), self._looks.watch
        enough = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            source = self._history.find_worker(pid) or pid
            lines = beside.submit(self._looks.sample, source, enough)
            try:
                seen = None if watch is None else watch(pid, tid, stop, is_enough)
                if seen is None:
                    stop.wait(WATCH_NS / NS_PER_S)
            finally:
                enough.set()
        self._history.read(self._clock.mono_ns())
        self._settle(pid, stop)
        if seen is None:
            return None, lines.result()
        n_ops = self._history.count_ops(pid, seen.start_ns, seen.end_ns)
        return replace(seen, times=replace(seen.times, n_ops=n_ops)), lines.result()


def _find_device_share(rates: WorkRates | None) -> float:
    """The part of its own time that a process waited for its GPU."""
    if rates is None or rates.device_ns is None or rates.own_ns <= 0:
        return 0.0
    return rates.device_ns / rates.own_ns


def _make_diagnosis(
    name: str, rank: Rank, found: ExcessCauses, window_ns: int, n_ops: int = 0
) -> Diagnosis:
    """What was found as the answer to a question."""
    return Diagnosis(
        id=name,
        rank=rank,
        causes=found.causes,
        excess_ns=found.excess_ns,
        window_ns=window_ns,
        n_ops=n_ops,
        ruled_out=found.ruled_out,
        todo=found.todo,
    )


def _decline(identity: NodeIdentity, request: DiagnosisRequest, why: str) -> Diagnosis:
    """About a rank of which no more is known than what was asked."""
    rank = Rank(identity.cluster_id, identity.node_id, request.rank, job=request.job)
    return Diagnosis(id=request.id, rank=rank, declined=why)
