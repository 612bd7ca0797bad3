"""The loop: look at the node, score it, judge it, tell.

A *look* happens every ``sample_interval``; a *tick* every ``push_interval``, spread by a tenth. Ticks drive the state
machine, the baseline and the regular push. A look in between pushes early when the state, the verdict or the score moved.

Nothing here blocks: requests go to the lane, messages to the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from ingero.agent.health.body import NodeIdentity, PushStatus, build_event, build_push
from ingero.agent.health.book import NodeEpisodes
from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.episodes import EpisodeOutcome
from ingero.agent.health.lane import PushLane
from ingero.agent.health.mode import Bar, ModeSettings, Outlook, choose_bar
from ingero.agent.health.signals.baseline import Baseline, BaselineSettings
from ingero.agent.health.signals.classify import Classifier, ClassifierSettings
from ingero.agent.health.signals.facts import hash_cgroup_path
from ingero.agent.health.signals.interval import Interval
from ingero.agent.health.signals.machine import (
    MachineSettings,
    State,
    StateMachine,
    Step,
    advance,
    is_waking,
    reject_future,
)
from ingero.agent.health.signals.reading import (
    Anomaly,
    Reading,
    Signals,
    SignalSource,
    drop_non_finite,
)
from ingero.agent.health.signals.score import ScoreSettings, clamp_share, compute_score
from ingero.otlp.codec.export import Export
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.names import DetectionMode, DominantSignal
from ingero.wire.uds import KnownMessage

TICK_SPREAD: Final = 0.1
_FLEET_MODES: Final = frozenset({DetectionMode.FLEET, DetectionMode.FLEET_CACHED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How often, and how judged.

    Attributes:
        push_interval_ns: Between regular pushes.
        sample_interval_ns: Between looks; no longer than the push interval.
        early_push_delta: A score that moved by more than this is pushed at once; 1 or more never.
        early_push_gap_ns: Least time between an early push and the push before it.
        peers_wait_ns: How long a node is under Fleet's bar before it asks Fleet once more and then calls itself a
            straggler: peers that fell with it are heard meanwhile, and Fleet takes the bar back. Local bars do not wait.
    """

    push_interval_ns: int = 10 * NS_PER_S
    sample_interval_ns: int = NS_PER_S
    early_push_delta: float = 0.05
    early_push_gap_ns: int = NS_PER_S
    peers_wait_ns: int = 0
    machine: MachineSettings = field(default_factory=MachineSettings)
    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    score: ScoreSettings = field(default_factory=ScoreSettings)
    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    mode: ModeSettings = field(default_factory=ModeSettings)


class Stream(Protocol):
    """Where messages for local readers go."""

    def publish(self, message: KnownMessage) -> None:
        """Hand one message on; never blocks."""
        ...


class SpanLane(Protocol):
    """Where spans go."""

    def offer(self, regular: Export | None, extras: list[Export]) -> None:
        """Hand spans over; never blocks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """What the loop works with.

    Attributes:
        source: Where readings come from.
        clock: Time.
        cache: Fleet's last word.
        lane: The way to Fleet.
        book: The open episodes.
        stream: Local readers; None without ``--remediate``.
        span_lane: The way for spans; None when detections are not traced.
        spread: A number in [-1, 1] each call, to spread the ticks of many agents.
    """

    source: SignalSource
    clock: Clock
    cache: ThresholdCache
    lane: PushLane
    book: NodeEpisodes
    spread: Callable[[], float]
    stream: Stream | None = None
    span_lane: SpanLane | None = None


class Look(NamedTuple):
    """What one look found and did.

    Attributes:
        wall_ns: When.
        state: Where the node stands.
        score: 0..1; None when nothing could be read.
        shares: The four signals as shares.
        bar: Mode and threshold.
        is_straggler: The verdict; a latched one while nothing can be judged.
        event_id: Of the open episode; empty without one.
        dominant: What lost most against the node's own past.
        is_degraded: The degradation warning.
        is_tick: A regular tick.
        is_pushed: A push was handed to the lane.
        is_early: The push was not a regular one.
        anomalies: Signals that were not numbers.
    """

    wall_ns: int
    state: State
    score: float | None
    shares: Signals
    bar: Bar
    is_straggler: bool
    event_id: str
    dominant: DominantSignal
    is_degraded: bool
    is_tick: bool
    is_pushed: bool
    is_early: bool
    anomalies: tuple[Anomaly, ...]


class _Pushed(NamedTuple):
    mono_ns: int
    state: State
    score: float
    is_straggler: bool
    is_suspect: bool


class _View(NamedTuple):
    """One look before it is judged."""

    now_ns: int
    wall_ns: int
    reading: Reading | None
    seen: Reading | None
    shares: Signals
    step: Step | None
    anomalies: tuple[Anomaly, ...]

    @property
    def is_tick(self) -> bool:
        return self.step is not None

    @property
    def is_due(self) -> bool:
        return self.step is not None and self.step.is_pushed


class _Verdict(NamedTuple):
    """What a look came to; `is_judged` when there was a bar to judge by."""

    score: float | None
    bar: Bar
    dominant: DominantSignal
    is_judged: bool = False
    is_changed: bool = False


_NO_SIGNALS: Final = Signals(None, None, None, None)


class HealthLoop:
    """One node's loop. All state is here; one thread calls `look`.

    Args:
        identity: The node.
        parts: What it works with.
        settings: How often, and how judged.
    """

    def __init__(self, identity: NodeIdentity, parts: LoopParts, settings: LoopSettings) -> None:
        self._identity = identity
        self._parts = parts
        self._settings = settings
        self._machine = StateMachine()
        self._classifier = Classifier(settings.classifier)
        self._interval = Interval()
        self._pushed: _Pushed | None = None
        self._fell_ns: int | None = None
        self.baseline = Baseline(settings.baseline)
        now_ns = parts.clock.mono_ns()
        self._due_ns = self._next_tick(now_ns)
        self._look_ns = now_ns

    def start_warm(self) -> None:
        """Start active: a fresh baseline was restored."""
        self._machine = StateMachine(state=State.ACTIVE)

    @property
    def is_warm(self) -> bool:
        """The baseline has seen as many intervals as calibration takes: worth keeping, and worth judging by."""
        return self.baseline.n_samples >= max(self._settings.machine.warmup, 1)

    @property
    def next_look_ns(self) -> int:
        """Monotonic time of the next look."""
        return min(self._look_ns + self._settings.sample_interval_ns, self._due_ns)

    def look(self) -> Look:
        """Look once, and tick when one is due."""
        view = self._see()
        verdict = self._classify(view)
        self._learn(view)
        book, now_ns, wall_ns = self._parts.book, view.now_ns, view.wall_ns
        is_early = not view.is_tick and self._has_moved(verdict, now_ns)
        if verdict.is_judged and (view.is_tick or is_early or verdict.is_changed):
            book.tell(wall_ns)
        is_paused = self._parts.lane.is_paused(now_ns)
        is_pushed = (view.is_due or is_early) and verdict.score is not None and not is_paused
        if is_pushed:
            self._push(view, verdict)
        self._send_messages()
        self._send_spans()
        return Look(
            wall_ns=wall_ns,
            state=self._machine.state,
            score=verdict.score,
            shares=view.shares,
            bar=verdict.bar,
            is_straggler=self._classifier.is_straggler,
            event_id=book.straggler.event_id if book.straggler else "",
            dominant=verdict.dominant,
            is_degraded=self.baseline.is_degraded(),
            is_tick=view.is_tick,
            is_pushed=is_pushed,
            is_early=is_pushed and is_early,
            anomalies=view.anomalies,
        )

    def finish(self) -> None:
        """The agent ends: hand over what must not be lost."""
        self._parts.book.interrupt(self._parts.clock.wall_ns())
        self._send_spans()

    def _see(self) -> _View:
        now_ns, wall_ns = self._parts.clock.mono_ns(), self._parts.clock.wall_ns()
        self._look_ns = now_ns
        reading = reject_future(self._parts.source.read(wall_ns, now_ns), wall_ns)
        anomalies: tuple[Anomaly, ...] = ()
        is_wake = False
        if reading is not None:
            signals, anomalies = drop_non_finite(reading.signals)
            reading = replace(reading, signals=signals)
            self._interval.add(reading)
            is_wake = is_waking(self._machine, reading)
        is_tick = now_ns >= self._due_ns or is_wake
        seen = self._interval.latest if is_tick else reading
        shares = self._shares(seen)  # against the baseline as it was before this interval
        step = self._tick(now_ns, wall_ns) if is_tick else None
        return _View(now_ns, wall_ns, reading, seen, shares, step, anomalies)

    def _tick(self, now_ns: int, wall_ns: int) -> Step:
        """Advance the machine by one interval."""
        self._due_ns = self._next_tick(now_ns)
        before = self._machine.state
        step = advance(self._machine, self._interval.reading(), self._settings.machine)
        self._machine = step.machine
        if step.is_restart:
            self._forget(EpisodeOutcome.RECALIBRATED, wall_ns)
            self.baseline.reset()
            self._interval = Interval()
        elif step.machine.state is State.IDLE and before is not State.IDLE:
            self._forget(EpisodeOutcome.WENT_IDLE, wall_ns)
        return step

    def _learn(self, view: _View) -> None:
        """Take a look, and at a tick the whole interval, into the baseline; nothing of a straggler or a sleeper."""
        if view.reading is not None and not self._classifier.is_suspect:
            self._interval.accept(view.reading.signals)
        if view.step is None:
            return
        interval, self._interval = self._interval, Interval()
        if self._machine.state in {State.IDLE, State.STALE}:
            return
        normal = interval.normal()
        if normal is not None:
            self.baseline.fold(normal)
        elif interval.latest is not None:
            self.baseline.fold(interval.latest.signals, frozen=True)
        is_degraded = self.baseline.is_degraded()
        self._parts.book.note_degradation(view.wall_ns, is_degraded=is_degraded)

    def _forget(self, outcome: EpisodeOutcome, wall_ns: int) -> None:
        """Drop the verdict: what was judged is no longer there."""
        self._classifier.clear()
        self._fell_ns = None
        self._parts.book.close(outcome, wall_ns)

    def _classify(self, view: _View) -> _Verdict:
        is_scored = view.seen is not None and self._machine.state is not State.STALE
        result = compute_score(view.shares, self._settings.score) if is_scored else None
        bar = self._bar(view.now_ns)
        if result is None or view.seen is None:
            return _Verdict(None, bar, DominantSignal.UNKNOWN)
        score, dominant = result.value, self.baseline.dominant_signal(view.seen.signals)
        if self._machine.state is not State.ACTIVE or bar.threshold is None:
            self._fell_ns = None
            return _Verdict(score, bar, dominant)
        may_accuse = self._is_settled(view.now_ns, bar)
        found = self._classifier.look(score, bar.threshold, may_accuse=may_accuse)
        if not self._classifier.is_suspect:
            self._fell_ns = None
        elif self._fell_ns is None:
            self._fell_ns = view.now_ns
        if found.is_straggler:
            self._parts.book.judge(bar, score, dominant, view.wall_ns)
        elif found.is_changed:
            self._parts.book.close(EpisodeOutcome.RESOLVED, view.wall_ns, score=score)
        return _Verdict(score, bar, dominant, is_judged=True, is_changed=found.is_changed)

    def _is_settled(self, now_ns: int, bar: Bar) -> bool:
        """Whether Fleet, where the bar is its own, answered once more after the node was under it for long enough."""
        wait_ns = self._settings.peers_wait_ns
        if not wait_ns or bar.mode not in _FLEET_MODES or not self._parts.cache.is_reachable:
            return True
        heard_ns = self._parts.cache.heard_ns
        return (
            self._fell_ns is not None
            and heard_ns is not None
            and now_ns >= heard_ns >= self._fell_ns + wait_ns
        )

    def _is_asking(self, last: _Pushed, now_ns: int) -> bool:
        """Whether the node waited long enough and Fleet was not asked since."""
        if self._fell_ns is None or self._classifier.is_straggler:
            return False
        return last.mono_ns < self._fell_ns + self._settings.peers_wait_ns <= now_ns

    def _bar(self, now_ns: int) -> Bar:
        cache = self._parts.cache
        outlook = Outlook(
            cached=cache.cached,
            is_reachable=cache.is_reachable,
            healthy_score=self._healthy_score(),
            mono_ns=now_ns,
            pause_ns=self._parts.lane.pause_ns,
        )
        return choose_bar(outlook, self._settings.mode)

    def _healthy_score(self) -> float | None:
        """The score this node has when it is as usual; None before the baseline is warm."""
        if not self.is_warm:
            return None
        past = self.baseline.fast
        usual = past._replace(throughput=None if past.throughput is None else 1.0)
        result = compute_score(usual, self._settings.score)
        return result.value if result is not None else None

    def _shares(self, reading: Reading | None) -> Signals:
        if reading is None:
            return _NO_SIGNALS
        throughput, *others = reading.signals
        shares = (None if value is None else clamp_share(value) for value in others)
        return Signals(self.baseline.throughput_ratio(throughput), *shares)

    def _has_moved(self, verdict: _Verdict, now_ns: int) -> bool:
        """Something changed since the last push that Fleet should not wait for."""
        last = self._pushed
        if verdict.score is None or last is None:
            return False
        if now_ns - last.mono_ns < self._settings.early_push_gap_ns:
            return False
        return (
            self._machine.state is not last.state
            or self._classifier.is_straggler != last.is_straggler
            or self._classifier.is_suspect != last.is_suspect
            or self._is_asking(last, now_ns)
            or abs(verdict.score - last.score) > self._settings.early_push_delta
        )

    def _push(self, view: _View, verdict: _Verdict) -> None:
        assert view.seen is not None
        assert verdict.score is not None
        path = view.seen.cgroup_path
        status = PushStatus(
            score=verdict.score,
            shares=view.shares,
            state=self._machine.state,
            is_degraded=self.baseline.is_degraded(),
            mode=verdict.bar.mode,
            is_reachable=self._parts.cache.is_reachable,
            cohort=self._identity.cohort if path is None else hash_cgroup_path(path),
            wall_ns=view.wall_ns,
        )
        events = [build_event(self._identity, event) for event in self._parts.book.take_events()]
        self._parts.lane.offer(build_push(self._identity, status), events)
        self._pushed = _Pushed(
            view.now_ns,
            self._machine.state,
            verdict.score,
            self._classifier.is_straggler,
            self._classifier.is_suspect,
        )

    def _send_messages(self) -> None:
        for message in self._parts.book.take_messages():
            if self._parts.stream is not None:
                self._parts.stream.publish(message)

    def _send_spans(self) -> None:
        spans = self._parts.book.take_spans()
        if spans and self._parts.span_lane is not None:
            self._parts.span_lane.offer(None, spans)

    def _next_tick(self, now_ns: int) -> int:
        spread = 1 + TICK_SPREAD * self._parts.spread()
        return now_ns + round(self._settings.push_interval_ns * spread)
