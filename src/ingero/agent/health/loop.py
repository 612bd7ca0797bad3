"""The health loop: sample the node, score it, compare it with the threshold, push.

A *sample* is taken every ``sample_interval``; a *tick* comes every ``push_interval``, spread by a tenth. Ticks drive
the state machine, the baseline and the regular push. A sample in between is pushed early when the state, the verdict or
the score moved.

Nothing here blocks: requests go to the push queue, messages to the local socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.episodes import EpisodeOutcome
from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.open_episodes import NodeEpisodes
from ingero.agent.health.push_body import NodeIdentity, PushStatus, build_event, build_push
from ingero.agent.health.push_queue import PushQueue
from ingero.agent.health.signals.baseline import Baseline, SavedBaseline
from ingero.agent.health.signals.machine import (
    State,
    StateMachine,
    Step,
    advance,
    is_waking,
    reject_future,
)
from ingero.agent.health.signals.reading import (
    Anomaly,
    Interval,
    Reading,
    Signals,
    SignalSource,
    drop_non_finite,
)
from ingero.agent.health.signals.score import clamp_share
from ingero.agent.health.straggler import Comparison, StragglerDetector
from ingero.agent.health.threshold_choice import AppliedThreshold
from ingero.otlp.codec.export import Export
from ingero.telemetry.clock import Clock
from ingero.wire.names import DominantSignal
from ingero.wire.uds import KnownMessage

TICK_SPREAD: Final = 0.1


class Stream(Protocol):
    """Where messages for local readers go."""

    def publish(self, message: KnownMessage) -> None:
        """Hand one message on; never blocks."""
        ...


class SpanQueue(Protocol):
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
        cache: The last threshold from Fleet.
        queue: Sends pushes to Fleet.
        episodes: The open episodes.
        stream: Local readers; None without ``--remediate``.
        span_queue: Sends spans; None when detections are not traced.
        spread: A number in [-1, 1] each call, to spread the ticks of many agents.
    """

    source: SignalSource
    clock: Clock
    cache: ThresholdCache
    queue: PushQueue
    episodes: NodeEpisodes
    spread: Callable[[], float]
    stream: Stream | None = None
    span_queue: SpanQueue | None = None


class HealthSample(NamedTuple):
    """What one sample of the node showed, and what was done with it.

    Attributes:
        wall_ns: When.
        state: The node's state.
        score: 0..1; None when nothing could be read.
        shares: The four signals as shares.
        applied: Mode and threshold.
        is_straggler: The last verdict; a latched one while nothing can be judged.
        event_id: Of the open episode; empty without one.
        dominant: What lost most against the node's own past.
        is_degraded: The degradation warning.
        is_tick: A regular tick.
        is_pushed: A push was handed to the queue.
        is_early: The push was not a regular one.
        anomalies: Signals that were not numbers.
    """

    wall_ns: int
    state: State
    score: float | None
    shares: Signals
    applied: AppliedThreshold
    is_straggler: bool
    event_id: str
    dominant: DominantSignal
    is_degraded: bool
    is_tick: bool
    is_pushed: bool
    is_early: bool
    anomalies: tuple[Anomaly, ...]


class _LastPush(NamedTuple):
    mono_ns: int
    state: State
    score: float
    is_straggler: bool
    is_suspect: bool


class _Observation(NamedTuple):
    """One sample before it is compared with the threshold."""

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


_NO_SIGNALS: Final = Signals(None, None, None, None)


class HealthLoop:
    """One node's loop. One thread calls `take_sample`.

    Args:
        identity: The node.
        parts: What it works with.
        settings: Intervals, and how the node is judged.
    """

    def __init__(self, identity: NodeIdentity, parts: LoopParts, settings: LoopSettings) -> None:
        self._identity = identity
        self._parts = parts
        self._settings = settings
        self._machine = StateMachine()
        self._interval = Interval()
        self._pushed: _LastPush | None = None
        self.baseline = Baseline(settings.baseline)
        self._detector = StragglerDetector(self.baseline, parts.cache, settings)
        now_ns = parts.clock.mono_ns()
        self._due_ns = self._next_tick(now_ns)
        self._sample_ns = now_ns

    def restore(self, saved: SavedBaseline) -> None:
        """Start active with this past; a reading that names another workload starts calibration as always."""
        self.baseline.restore(saved)
        self._machine = StateMachine(state=State.ACTIVE, workload=saved.workload, is_restored=True)

    def save(self) -> SavedBaseline:
        """What a restart needs."""
        return replace(self.baseline.save(), workload=self._machine.workload)

    @property
    def is_idle(self) -> bool:
        """Nothing runs: the averages start again with what comes, so those of before are of no use."""
        return self._machine.state is State.IDLE

    @property
    def is_warm(self) -> bool:
        """The baseline has seen as many intervals as calibration takes: worth keeping."""
        return self._detector.is_warm

    @property
    def next_sample_ns(self) -> int:
        """Monotonic time of the next sample."""
        return min(self._sample_ns + self._settings.sample_interval_ns, self._due_ns)

    def take_sample(self) -> HealthSample:
        """Take one sample; it is a tick when one is due."""
        observation = self._observe()
        found = self._compare(observation)
        self._learn(observation)
        episodes, now_ns, wall_ns = self._parts.episodes, observation.now_ns, observation.wall_ns
        is_early = not observation.is_tick and self._has_moved(found, now_ns)
        if found.is_judged and (observation.is_tick or is_early or found.is_changed):
            episodes.repeat_state(wall_ns)
        is_paused = self._parts.queue.is_paused(now_ns)
        is_pushed = (observation.is_due or is_early) and found.score is not None and not is_paused
        if is_pushed:
            self._push(observation, found)
        self._send_messages()
        self._send_spans()
        return HealthSample(
            wall_ns=wall_ns,
            state=self._machine.state,
            score=found.score,
            shares=observation.shares,
            applied=found.applied,
            is_straggler=self._detector.is_straggler,
            event_id=episodes.straggler.event_id if episodes.straggler else "",
            dominant=found.dominant,
            is_degraded=self.baseline.is_degraded(),
            is_tick=observation.is_tick,
            is_pushed=is_pushed,
            is_early=is_pushed and is_early,
            anomalies=observation.anomalies,
        )

    def finish(self) -> None:
        """The agent ends: hand over what must not be lost."""
        self._parts.episodes.interrupt(self._parts.clock.wall_ns())
        self._send_spans()

    def _observe(self) -> _Observation:
        now_ns, wall_ns = self._parts.clock.mono_ns(), self._parts.clock.wall_ns()
        self._sample_ns = now_ns
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
        return _Observation(now_ns, wall_ns, reading, seen, shares, step, anomalies)

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

    def _learn(self, observation: _Observation) -> None:
        """Fold a sample, at a tick the interval, into the baseline; not while the node is a straggler or idle."""
        if observation.reading is not None and not self._detector.is_suspect:
            self._interval.accept(observation.reading.signals)
        if observation.step is None:
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
        self._parts.episodes.note_degradation(observation.wall_ns, is_degraded=is_degraded)

    def _forget(self, outcome: EpisodeOutcome, wall_ns: int) -> None:
        """Forget the verdict: the workload that was judged is no longer there."""
        self._detector.clear()
        self._parts.episodes.close(outcome, wall_ns)

    def _compare(self, observation: _Observation) -> Comparison:
        """Compare a sample with the threshold, and open, continue or close the straggler's episode."""
        pause_ns = self._parts.queue.pause_ns
        found = self._detector.compare(
            observation.seen,
            observation.shares,
            self._machine.state,
            observation.now_ns,
            pause_ns,
        )
        if not found.is_judged or found.score is None:
            return found
        episodes = self._parts.episodes
        if self._detector.is_straggler:
            episodes.judge(found.applied, found.score, found.dominant, observation.wall_ns)
        elif found.is_changed:
            episodes.close(EpisodeOutcome.RESOLVED, observation.wall_ns, score=found.score)
        return found

    def _shares(self, reading: Reading | None) -> Signals:
        if reading is None:
            return _NO_SIGNALS
        throughput, *others = reading.signals
        shares = (None if value is None else clamp_share(value) for value in others)
        return Signals(self.baseline.throughput_ratio(throughput), *shares)

    def _has_moved(self, found: Comparison, now_ns: int) -> bool:
        """Whether something changed since the last push that Fleet should not wait for."""
        last = self._pushed
        if found.score is None or last is None:
            return False
        if now_ns - last.mono_ns < self._settings.early_push_gap_ns:
            return False
        return (
            self._machine.state is not last.state
            or self._detector.is_straggler != last.is_straggler
            or self._detector.is_suspect != last.is_suspect
            or self._detector.must_ask(last.mono_ns, now_ns)
            or abs(found.score - last.score) > self._settings.early_push_delta
        )

    def _push(self, observation: _Observation, found: Comparison) -> None:
        assert found.score is not None
        status = PushStatus(
            score=found.score,
            shares=observation.shares,
            state=self._machine.state,
            is_degraded=self.baseline.is_degraded(),
            mode=found.applied.mode,
            is_reachable=self._parts.cache.is_reachable,
            cohort=self._identity.cohort,
            wall_ns=observation.wall_ns,
        )
        events = [
            build_event(self._identity, event) for event in self._parts.episodes.take_events()
        ]
        self._parts.queue.offer(build_push(self._identity, status), events)
        self._pushed = _LastPush(
            observation.now_ns,
            self._machine.state,
            found.score,
            self._detector.is_straggler,
            self._detector.is_suspect,
        )

    def _send_messages(self) -> None:
        for message in self._parts.episodes.take_messages():
            if self._parts.stream is not None:
                self._parts.stream.publish(message)

    def _send_spans(self) -> None:
        spans = self._parts.episodes.take_spans()
        if spans and self._parts.span_queue is not None:
            self._parts.span_queue.offer(None, spans)

    def _next_tick(self, now_ns: int) -> int:
        spread = 1 + TICK_SPREAD * self._parts.spread()
        return now_ns + round(self._settings.push_interval_ns * spread)
