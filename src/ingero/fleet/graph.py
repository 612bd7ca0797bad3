"""Pipelines as objects: components built, wired from the exporters backwards, serialised and counted.

Opens nothing. A pipeline is a chain, so it has no cycles: nothing leads from an exporter back to a receiver.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from ingero.errors import DeliveryError, PermanentError, RetryableError
from ingero.fleet.component import (
    Component,
    ComponentId,
    ComponentKind,
)
from ingero.fleet.config import FleetConfig, Pipeline
from ingero.fleet.consumer import Batch, Bounded, Consumer
from ingero.fleet.factory import (
    ConsumingComponent,
    Factory,
)
from ingero.fleet.helpers.sending_report import ENQUEUE_FAILED
from ingero.fleet.views import (
    PipelineView,
)
from ingero.otlp.names import Signal
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import counter, histogram
from ingero.telemetry.limited import RateLimitedLog
from ingero.telemetry.metrics import MeterRegistry

INCOMING: Final = counter(
    "otelcol_processor_incoming_items_total",
    "Points, log records or spans handed to a processor.",
    "processor",
    "otel_signal",
)
OUTGOING: Final = counter(
    "otelcol_processor_outgoing_items_total",
    "Points, log records or spans that a processor handed on.",
    "processor",
    "otel_signal",
)
PIPELINE_SECONDS: Final = histogram(
    "ingero_fleet_pipeline_duration_seconds",
    "Time a pipeline took for one batch, up to its exporters' queues.",
    (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0),
    "pipeline",
)
PIPELINE_REFUSED: Final = counter(
    "ingero_fleet_pipeline_refused_batches_total",
    "Batches that a pipeline did not take; retryable ones may come again, and those that another pipeline took are lost"
    " to this one.",
    "pipeline",
    "outcome",
)
GRAPH_METRICS: Final = (
    INCOMING,
    OUTGOING,
    PIPELINE_SECONDS,
    PIPELINE_REFUSED,
    *ENQUEUE_FAILED.values(),
)

_log = logging.getLogger("ingero.fleet.pipeline")

START_ORDER: Final = (
    ComponentKind.EXTENSION,
    ComponentKind.EXPORTER,
    ComponentKind.PROCESSOR,
    ComponentKind.RECEIVER,
)
_KEPT_ERRORS: Final = 16


class Receiving(Consumer, Protocol):
    """A consumer among several, which can be asked beforehand and learns that what it refused will not come again."""

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """Why no consumer should get the batch yet; None when this one may get it."""
        ...

    def lose(self, batch: Batch, refusal: DeliveryError) -> None:
        """Count a batch that it refused for now and that others took as lost, and say so."""
        ...


class FanOut:
    """Hands each batch to every consumer, or to none.

    While one is full and its destination works, the batch is refused before any consumer has it, and its pusher keeps
    it. Beyond that, what one refuses changes nothing for the others: a batch that at least one took is taken, because
    sent again, those that have it would hold it twice. A consumer that refused it for now has then lost it, which is
    counted and logged there. A batch that no consumer took is refused as a whole.
    """

    __slots__ = ("_consumers",)

    def __init__(self, consumers: Sequence[Receiving]) -> None:
        self._consumers = tuple(consumers)

    def consume(self, batch: Batch) -> None:
        """Offer the batch to all.

        Raises:
            RetryableError: None took it and at least one asks for it again; with the longest delay that any asked for.
            PermanentError: None took it, and none asks for a retry.
        """
        found = (one.find_refusal(batch) for one in self._consumers)
        waiting = [refusal for refusal in found if refusal is not None]
        if waiting:
            raise _join(waiting)
        refusals: list[tuple[Receiving, DeliveryError]] = []
        for consumer in self._consumers:
            try:
                consumer.consume(batch)
            except DeliveryError as refusal:
                refusals.append((consumer, refusal))
        if not refusals:
            return
        if len(refusals) == len(self._consumers):
            raise _join([refusal for _, refusal in refusals])
        for consumer, why in refusals:
            consumer.lose(batch, why)

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """The first of theirs."""
        return next(filter(None, (one.find_refusal(batch) for one in self._consumers)), None)

    def lose(self, batch: Batch, refusal: DeliveryError) -> None:
        """Count it as lost in all of them."""
        for consumer in self._consumers:
            consumer.lose(batch, refusal)


def _join(refusals: Sequence[DeliveryError]) -> DeliveryError:
    if len(refusals) == 1:
        return refusals[0]
    message = "; ".join(refusal.message for refusal in refusals)
    retryable = [refusal for refusal in refusals if isinstance(refusal, RetryableError)]
    if not retryable:
        return PermanentError(message)
    delays = [one.retry_after_ns for one in retryable if one.retry_after_ns is not None]
    return RetryableError(message, retry_after_ns=max(delays, default=None))


def fan_out(consumers: Sequence[Receiving]) -> Receiving:
    """The one consumer that stands for these."""
    return consumers[0] if len(consumers) == 1 else FanOut(consumers)


class _Exit:
    """The way into one exporter from one pipeline."""

    __slots__ = ("_bounded", "_log", "_lost", "_n_lost", "_name", "_target")

    def __init__(
        self, name: ComponentId, target: Consumer, meter: MeterRegistry, clock: Clock
    ) -> None:
        self._name = str(name)
        self._target = target
        # Once: asking a protocol class takes several microseconds, of each push.
        self._bounded = target if isinstance(target, Bounded) else None
        self._lost = {
            signal: meter.counter(metric).bound(exporter=self._name)
            for signal, metric in ENQUEUE_FAILED.items()
        }
        self._n_lost = 0
        self._log = RateLimitedLog(_log, clock, burst=2)

    def consume(self, batch: Batch) -> None:
        if batch.push.is_replay:
            return
        self._target.consume(batch)
        if self._n_lost:
            message, n_lost = "exporter takes everything again", self._n_lost
            self._n_lost = 0
            self._log.write("lost", logging.INFO, message, exporter=self._name, items_lost=n_lost)

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        return None if self._bounded is None else self._bounded.find_refusal(batch)

    def lose(self, batch: Batch, refusal: DeliveryError) -> None:
        if not isinstance(refusal, RetryableError):
            return  # refused permanently: the exporter counted it
        n_items = batch.export.n_items
        self._lost[batch.signal](n_items)
        self._n_lost += n_items
        self._log.write(
            "lost",
            logging.WARNING,
            "items lost that other exporters took",
            exporter=self._name,
            items=n_items,
            items_lost=self._n_lost,
            error=refusal.message,
        )


class _Link:
    """The way into one processor: one batch at a time, counted.

    The lock is the pipeline's and re-entrant, so a processor that sends from its own timer waits for a batch that is
    passing, and never the other way round as long as it holds no lock of its own while it sends.
    """

    __slots__ = ("_counts", "_lock", "_target")

    def __init__(
        self, lock: threading.RLock, target: Consumer, counts: Sequence[Callable[[float], None]]
    ) -> None:
        self._lock = lock
        self._target = target
        self._counts = tuple(counts)

    def consume(self, batch: Batch) -> None:
        n_items = batch.export.n_items
        for count in self._counts:
            count(n_items)
        with self._lock:
            self._target.consume(batch)


class PipelineHead:
    """Where receivers hand batches to a pipeline; times and counts what happens."""

    def __init__(
        self, pipeline: Pipeline, first: Consumer, meter: MeterRegistry, clock: Clock
    ) -> None:
        self.pipeline = pipeline
        self.name = f"{pipeline.signal}/{pipeline.name}" if pipeline.name else str(pipeline.signal)
        self._first = first
        self._clock = clock
        self._record = meter.histogram(PIPELINE_SECONDS).bound(pipeline=self.name)
        refused = meter.counter(PIPELINE_REFUSED)
        self._retryable = refused.bound(pipeline=self.name, outcome="retryable")
        self._permanent = refused.bound(pipeline=self.name, outcome="permanent")
        self._lost = refused.bound(pipeline=self.name, outcome="lost")
        self._log = RateLimitedLog(_log, clock)
        self._errors: deque[tuple[int, str]] = deque(maxlen=_KEPT_ERRORS)

    def consume(self, batch: Batch) -> None:
        """Send one batch through; raises what the pipeline raises."""
        began_ns = self._clock.mono_ns()
        try:
            self._first.consume(batch)
        except DeliveryError as refusal:
            (self._retryable if isinstance(refusal, RetryableError) else self._permanent)(1)
            self._errors.append((self._clock.wall_ns(), refusal.message))
            raise
        finally:
            self._record((self._clock.mono_ns() - began_ns) / 1e9)

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """Nothing: what its processors will do is not known beforehand."""
        del batch
        return None

    def lose(self, batch: Batch, refusal: DeliveryError) -> None:
        """Count a batch that this pipeline refused and another of the same receiver took."""
        self._lost(1)
        self._log.write(
            "lost",
            logging.WARNING,
            "items lost that another pipeline took",
            pipeline=self.name,
            items=batch.export.n_items,
            error=refusal.message,
        )

    def view(self, durations: Sequence[float]) -> PipelineView:
        """What is known about it; ``durations`` are its batches per bucket."""
        return PipelineView(
            self.name,
            tuple(map(str, self.pipeline.receivers)),
            tuple(map(str, self.pipeline.processors)),
            tuple(map(str, self.pipeline.exporters)),
            int(sum(durations)),
            PIPELINE_SECONDS.bounds,
            tuple(map(int, durations)),
            tuple(self._errors),
        )


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One component in the graph; a processor has one per pipeline."""

    kind: ComponentKind
    id: ComponentId
    component: Component

    @property
    def label(self) -> str:
        """As the configuration spells it: ``receivers.otlp``."""
        return f"{self.kind.value}.{self.id}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Everything that one configuration runs.

    Attributes:
        nodes: In start order; stopping is the reverse.
        heads: The pipelines.
    """

    nodes: tuple[GraphNode, ...]
    heads: tuple[PipelineHead, ...]


def build_graph(
    config: FleetConfig, factories: Sequence[Factory], meter: MeterRegistry, clock: Clock
) -> Graph:
    """Build every component that runs and connect them."""
    return _Wiring(config, factories, meter, clock).build()


class _Wiring:
    """One pass over one configuration."""

    def __init__(
        self, config: FleetConfig, factories: Sequence[Factory], meter: MeterRegistry, clock: Clock
    ) -> None:
        self._config = config
        self._factories = {(factory.kind, factory.type): factory for factory in factories}
        self._meter = meter
        self._clock = clock
        self._nodes: dict[ComponentKind, list[GraphNode]] = {kind: [] for kind in ComponentKind}

    def build(self) -> Graph:
        for one in self._config.extensions:
            self._add(ComponentKind.EXTENSION, one, self._create(ComponentKind.EXTENSION, one))
        exporters: dict[ComponentId, ConsumingComponent] = {}
        for one in self._config.used(ComponentKind.EXPORTER):
            exporters[one] = self._create(ComponentKind.EXPORTER, one)
            self._add(ComponentKind.EXPORTER, one, exporters[one])
        heads = [self._pipeline(pipeline, exporters) for pipeline in self._config.pipelines]
        for one in self._config.used(ComponentKind.RECEIVER):
            self._receiver(one, heads)
        nodes = [node for kind in START_ORDER for node in self._nodes[kind]]
        return Graph(tuple(nodes), tuple(heads))

    def _pipeline(
        self, pipeline: Pipeline, exporters: Mapping[ComponentId, ConsumingComponent]
    ) -> PipelineHead:
        lock = threading.RLock()
        labels = {"otel_signal": str(pipeline.signal)}
        incoming, outgoing = self._meter.counter(INCOMING), self._meter.counter(OUTGOING)
        following: Consumer = fan_out([
            _Exit(one, exporters[one], self._meter, self._clock) for one in pipeline.exporters
        ])
        counts: list[Callable[[float], None]] = []
        built: list[GraphNode] = []
        for one in reversed(pipeline.processors):
            leaving = outgoing.bound(processor=str(one), **labels)
            after = _Link(lock, following, [*counts, leaving])
            processor = self._create(ComponentKind.PROCESSOR, one, pipeline.signal, after)
            built.append(GraphNode(ComponentKind.PROCESSOR, one, processor))
            counts = [incoming.bound(processor=str(one), **labels)]
            following = processor
        self._nodes[ComponentKind.PROCESSOR] += built
        if pipeline.processors:
            following = _Link(lock, following, counts)
        return PipelineHead(pipeline, following, self._meter, self._clock)

    def _receiver(self, one: ComponentId, heads: Sequence[PipelineHead]) -> None:
        outputs: dict[Signal, Consumer] = {}
        for signal in Signal:
            fed = [
                head
                for head in heads
                if head.pipeline.signal is signal and one in head.pipeline.receivers
            ]
            if fed:
                outputs[signal] = fan_out(fed)
        self._add(ComponentKind.RECEIVER, one, self._create(ComponentKind.RECEIVER, one, outputs))

    def _create(self, kind: ComponentKind, one: ComponentId, *wired: object) -> Any:  # noqa: ANN401 -- by kind
        """What the factory of this kind makes of the settings and of what it is wired to."""
        factory: Any = self._factories[kind, one.type]
        return factory.create(one, self._config.settings[kind, one], *wired)

    def _add(self, kind: ComponentKind, one: ComponentId, component: Component) -> None:
        self._nodes[kind].append(GraphNode(kind, one, component))
