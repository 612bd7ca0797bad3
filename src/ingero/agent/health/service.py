"""The running agent: the loop with its threads around it, from a start to a clean end.

Three threads beside the loop: the push queue, the poller, the local socket. None of them can stop the loop.
"""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ingero import __version__
from ingero.agent.events.socket import LocalEventServer, open_listener
from ingero.agent.health.cache import ThresholdCache
from ingero.agent.health.episodes import SpanMaker
from ingero.agent.health.failover import FailoverTransport
from ingero.agent.health.loop import HealthLoop, HealthSample, LoopParts
from ingero.agent.health.loop_settings import LoopSettings
from ingero.agent.health.open_episodes import FindLabels, NodeEpisodes
from ingero.agent.health.output import ChangeNotes
from ingero.agent.health.persist import LoadOutcome, load_baseline, save_baseline
from ingero.agent.health.poll import ThresholdPoller
from ingero.agent.health.push_body import NodeIdentity
from ingero.agent.health.push_queue import PushQueue
from ingero.agent.health.signals.reading import SignalSource
from ingero.agent.health.spill import SpillSettings
from ingero.agent.health.transport import (
    GrpcTransport,
    HttpTransport,
    PushTransport,
    TransportSettings,
)
from ingero.errors import StoreError
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S

SAVE_INTERVAL_NS: Final = 60 * NS_PER_S
JOIN_S: Final = 2.0
"""Longest wait for a thread at the end: what it still sends is worth less than a prompt exit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """Settings of a whole agent.

    Attributes:
        identity: The node.
        transport: How it reaches Fleet.
        is_grpc: OTLP/gRPC instead of OTLP/HTTP.
        loop: Intervals, and how the node is judged.
        poll: Where the threshold page is; None never asks.
        poll_interval_ns: Between two questions.
        persist_path: The baseline's file.
        persist_stale_age_ns: Oldest baseline that is restored.
        socket_path: Local event stream; None is off.
        socket_gid: Group that may read it; negative for none.
        spans: Where detections are traced to; None is off.
        spill: Where collectives wait on disk while Fleet is away; None keeps them in memory alone.
    """

    identity: NodeIdentity
    transport: TransportSettings
    is_grpc: bool = False
    loop: LoopSettings = field(default_factory=LoopSettings)
    poll: TransportSettings | None = None
    poll_interval_ns: int = 10 * NS_PER_S
    persist_path: Path
    persist_stale_age_ns: int = 600 * NS_PER_S
    socket_path: Path | None = None
    socket_gid: int = -1
    spans: TransportSettings | None = None
    spill: SpillSettings | None = None


OnSample = Callable[[HealthSample, list[str]], None]
"""Called with each sample and with the notes on what changed."""


class HealthAgent:
    """One node's agent, ready to run. Make one with `open_agent`.

    Attributes:
        cache: The last threshold from Fleet.
        queue: Sends pushes to Fleet; has the counters.
        stream: Local readers; None when off.
        loop: The loop.
        first_notes: What a person should read before the first sample.
    """

    def __init__(self, settings: AgentSettings, parts: LoopParts, stop: threading.Event) -> None:
        self._settings = settings
        self._parts = parts
        self._stop = stop
        self.cache = parts.cache
        self.queue = parts.queue
        self.stream: LocalEventServer | None = None
        self.poller: ThresholdPoller | None = None
        self.loop = HealthLoop(settings.identity, parts, settings.loop)
        self.first_notes: list[str] = []
        self._saved_ns = parts.clock.mono_ns()

    def restore(self) -> None:
        """Continue from the baseline on disk, if it is fresh."""
        settings = self._settings
        loaded = load_baseline(
            settings.persist_path,
            settings.loop.baseline,
            wall_ns=self._parts.clock.wall_ns(),
            stale_age_ns=settings.persist_stale_age_ns,
        )
        if loaded.baseline is not None:
            self.loop.restore(loaded.baseline)
        if loaded.outcome is not LoadOutcome.MISSING:
            detail = f": {loaded.detail}" if loaded.detail else ""
            self.first_notes.append(
                f"baseline {settings.persist_path}: {loaded.outcome.value}{detail}"
            )

    def run(self, on_sample: OnSample) -> None:
        """Take samples until asked to stop or until the source is over."""
        changes = ChangeNotes(self.cache, self.queue, self.poller)
        clock = self._parts.clock
        while not self._stop.is_set() and not self._parts.source.is_over:
            delay_ns = self.loop.next_sample_ns - clock.mono_ns()
            if delay_ns > 0 and self._stop.wait(delay_ns / NS_PER_S):
                break
            sample = self.loop.take_sample()
            mono_ns = clock.mono_ns()
            notes = changes.notes(sample, mono_ns)
            if mono_ns - self._saved_ns >= SAVE_INTERVAL_NS:
                notes += [line for note in self.save() for line in changes.note_once(note, mono_ns)]
            on_sample(sample, notes)

    def save(self) -> list[str]:
        """Write the baseline if it is worth keeping; a failure is a note, never the end.

        That of an idle node is deleted: what runs next is measured from its own start.
        """
        self._saved_ns = self._parts.clock.mono_ns()
        settings = self._settings
        if self.loop.is_idle:
            with suppress(OSError):
                settings.persist_path.unlink()
            return []
        if not self.loop.is_warm:
            return []
        try:
            save_baseline(
                settings.persist_path,
                self.loop.save(),
                settings.loop.baseline,
                wall_ns=self._parts.clock.wall_ns(),
            )
        except StoreError as error:
            return [f"{error.message}; {error.hint}"]
        return []


@contextmanager
def open_agent(
    settings: AgentSettings,
    source: SignalSource,
    clock: Clock,
    stop: threading.Event,
    find_labels: FindLabels | None = None,
) -> Iterator[HealthAgent]:
    """Build an agent and start its threads; at the end save the baseline and stop them.

    Args:
        settings: The whole agent.
        source: Where readings come from.
        clock: Time.
        stop: Ends it; set at the end in any case.
        find_labels: The latest annotations of the node's workload; None without annotations.

    Raises:
        IngeroError: A certificate cannot be used or the local socket cannot be opened.
    """
    random_source = random.SystemRandom()

    def spread() -> float:
        return random_source.uniform(-1, 1)

    def pause(duration_ns: int) -> None:
        stop.wait(duration_ns / NS_PER_S)

    with ExitStack() as stack:
        notes: list[str] = []
        stream = _open_stream(stack, settings, notes)
        cache = ThresholdCache()
        transport = build_transport(settings)
        queue = PushQueue(transport, cache, clock, pause, spread)
        poller = None
        if settings.poll is not None:
            poller = ThresholdPoller(settings.poll, cache, clock, settings.poll_interval_ns, spread)
        span_queue = None
        if settings.spans is not None:
            span_queue = PushQueue(
                HttpTransport(settings.spans), ThresholdCache(), clock, pause, spread
            )
        spans = SpanMaker(settings.identity, __version__, random_source.getrandbits)
        parts = LoopParts(
            source=source,
            clock=clock,
            cache=cache,
            queue=queue,
            episodes=NodeEpisodes(
                settings.identity,
                lambda: str(uuid.uuid4()),
                spans if span_queue else None,
                find_labels,
            ),
            spread=spread,
            stream=stream,
            span_queue=span_queue,
        )
        agent = HealthAgent(settings, parts, stop)
        agent.stream, agent.poller, agent.first_notes = stream, poller, notes
        agent.restore()
        for one in (queue, span_queue):
            if one is not None:
                stack.enter_context(_thread(one.run, one.close, one.release))
        if poller is not None:
            stack.enter_context(_thread(lambda: _poll(poller, stop), stop.set, poller.close))
        try:
            yield agent
        finally:
            stop.set()
            agent.loop.finish()
            agent.save()


def _poll(poller: ThresholdPoller, stop: threading.Event) -> None:
    delay_ns = 0
    while not stop.wait(delay_ns / NS_PER_S):
        delay_ns = poller.poll()


def build_transport(settings: AgentSettings) -> PushTransport:
    """A connection of one's own to the agent's Fleet, or to whichever of several answers.

    Raises:
        IngeroError: A certificate cannot be used.
    """
    create = GrpcTransport if settings.is_grpc else HttpTransport
    first = settings.transport
    if not first.others:
        return create(first)
    endpoints = (first.endpoint, *first.others)
    transports = [create(replace(first, endpoint=endpoint, others=())) for endpoint in endpoints]
    return FailoverTransport(transports, first.timeout_ns, SystemClock().mono_ns)


def _open_stream(
    stack: ExitStack, settings: AgentSettings, notes: list[str]
) -> LocalEventServer | None:
    if settings.socket_path is None:
        return None
    listener, warning = stack.enter_context(
        open_listener(settings.socket_path, settings.socket_gid)
    )
    notes += [warning] if warning else []
    stream = LocalEventServer(listener)
    stack.enter_context(_thread(stream.run, stream.close))
    return stream


@contextmanager
def _thread(
    run: Callable[[], None], close: Callable[[], None], release: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run something beside the loop; at the end ``close`` stops it, ``release`` then frees its resources."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        close()
        thread.join(JOIN_S)
        if not thread.is_alive():
            release()
