"""Pipelines as objects: components built, wired from the exporters backwards, serialised and counted.

Opens nothing. A pipeline is a chain, so it has no cycles: nothing leads from an exporter back to a receiver.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ingero.config import StrictModel
from ingero.errors import DeliveryError, PermanentError, RetryableError
from ingero.fleet.component import Component, ComponentId, Kind, Meter, PipelineView
from ingero.fleet.config import FleetConfig, Pipeline
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import (
    ConsumingComponent,
    ExporterFactory,
    ExtensionFactory,
    Factory,
    ProcessorFactory,
    ReceiverFactory,
)
from ingero.telemetry.clock import Clock
from ingero.telemetry.declare import counter, histogram
from ingero.wire.names import Signal

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
    "Batches that a pipeline did not take; retryable ones may come again.",
    "pipeline",
    "outcome",
)
GRAPH_METRICS: Final = (INCOMING, OUTGOING, PIPELINE_SECONDS, PIPELINE_REFUSED)

START_ORDER: Final = (Kind.EXTENSION, Kind.EXPORTER, Kind.PROCESSOR, Kind.RECEIVER)
_KEPT_ERRORS: Final = 16


class FanOut:
    """Hands each batch to every consumer, whatever the others answer.

    One refusal does not stop the others. When any refusal is worth a retry the whole is retryable: those that took the
    batch get it again (metric points are idempotent, a duplicate costs less than a loss).
    """

    __slots__ = ("_consumers",)

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self._consumers = tuple(consumers)

    def consume(self, batch: Batch) -> None:
        """Offer the batch to all.

        Raises:
            RetryableError: At least one refused it for now; asks for the longest delay that any asked for.
            PermanentError: Nobody asks for a retry and at least one refused it for good.
        """
        refusals: list[DeliveryError] = []
        for consumer in self._consumers:
            try:
                consumer.consume(batch)
            except DeliveryError as refusal:
                refusals.append(refusal)
        if refusals:
            raise _join(refusals)


def _join(refusals: Sequence[DeliveryError]) -> DeliveryError:
    if len(refusals) == 1:
        return refusals[0]
    message = "; ".join(refusal.message for refusal in refusals)
    retryable = [refusal for refusal in refusals if isinstance(refusal, RetryableError)]
    if not retryable:
        return PermanentError(message)
    delays = [one.retry_after_ns for one in retryable if one.retry_after_ns is not None]
    return RetryableError(message, retry_after_ns=max(delays, default=None))


def fan_out(consumers: Sequence[Consumer]) -> Consumer:
    """The one consumer that stands for these."""
    return consumers[0] if len(consumers) == 1 else FanOut(consumers)


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

    def __init__(self, pipeline: Pipeline, first: Consumer, meter: Meter, clock: Clock) -> None:
        self.pipeline = pipeline
        self.name = f"{pipeline.signal}/{pipeline.name}" if pipeline.name else str(pipeline.signal)
        self._first = first
        self._clock = clock
        self._record = meter.histogram(PIPELINE_SECONDS).bound(pipeline=self.name)
        refused = meter.counter(PIPELINE_REFUSED)
        self._retryable = refused.bound(pipeline=self.name, outcome="retryable")
        self._permanent = refused.bound(pipeline=self.name, outcome="permanent")
        self._errors: deque[tuple[int, str]] = deque(maxlen=_KEPT_ERRORS)

    def consume(self, batch: Batch) -> None:
        """Send one batch through; raises what the pipeline raises."""
        began_ns = self._clock.mono_ns()
        try:
            self._first.consume(batch)
        except RetryableError as refusal:
            self._retryable(1)
            self._errors.append((self._clock.wall_ns(), refusal.message))
            raise
        except PermanentError as refusal:
            self._permanent(1)
            self._errors.append((self._clock.wall_ns(), refusal.message))
            raise
        finally:
            self._record((self._clock.mono_ns() - began_ns) / 1e9)

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
class Node:
    """One component in the graph; a processor has one per pipeline."""

    kind: Kind
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

    nodes: tuple[Node, ...]
    heads: tuple[PipelineHead, ...]


def build_graph(
    config: FleetConfig, factories: Sequence[Factory], meter: Meter, clock: Clock
) -> Graph:
    """Build every component that runs and connect them."""
    return _Wiring(config, factories, meter, clock).build()


class _Wiring:
    """One pass over one configuration."""

    def __init__(
        self, config: FleetConfig, factories: Sequence[Factory], meter: Meter, clock: Clock
    ) -> None:
        self._config = config
        self._factories = {(factory.kind, factory.type): factory for factory in factories}
        self._meter = meter
        self._clock = clock
        self._nodes: dict[Kind, list[Node]] = {kind: [] for kind in Kind}

    def build(self) -> Graph:
        for one in self._config.extensions:
            factory = self._factories[Kind.EXTENSION, one.type]
            assert isinstance(factory, ExtensionFactory)
            self._add(Kind.EXTENSION, one, factory.create(one, self._settings(Kind.EXTENSION, one)))
        exporters: dict[ComponentId, ConsumingComponent] = {}
        for one in self._config.used(Kind.EXPORTER):
            maker = self._factories[Kind.EXPORTER, one.type]
            assert isinstance(maker, ExporterFactory)
            exporters[one] = maker.create(one, self._settings(Kind.EXPORTER, one))
            self._add(Kind.EXPORTER, one, exporters[one])
        heads = [self._pipeline(pipeline, exporters) for pipeline in self._config.pipelines]
        for one in self._config.used(Kind.RECEIVER):
            self._receiver(one, heads)
        nodes = [node for kind in START_ORDER for node in self._nodes[kind]]
        return Graph(tuple(nodes), tuple(heads))

    def _pipeline(
        self, pipeline: Pipeline, exporters: Mapping[ComponentId, ConsumingComponent]
    ) -> PipelineHead:
        lock = threading.RLock()
        labels = {"otel_signal": str(pipeline.signal)}
        incoming, outgoing = self._meter.counter(INCOMING), self._meter.counter(OUTGOING)
        following: Consumer = fan_out([exporters[one] for one in pipeline.exporters])
        counts: list[Callable[[float], None]] = []
        built: list[Node] = []
        for one in reversed(pipeline.processors):
            factory = self._factories[Kind.PROCESSOR, one.type]
            assert isinstance(factory, ProcessorFactory)
            leaving = outgoing.bound(processor=str(one), **labels)
            after = _Link(lock, following, [*counts, leaving])
            settings = self._settings(Kind.PROCESSOR, one)
            processor = factory.create(one, settings, pipeline.signal, after)
            built.append(Node(Kind.PROCESSOR, one, processor))
            counts = [incoming.bound(processor=str(one), **labels)]
            following = processor
        self._nodes[Kind.PROCESSOR] += built
        if pipeline.processors:
            following = _Link(lock, following, counts)
        return PipelineHead(pipeline, following, self._meter, self._clock)

    def _receiver(self, one: ComponentId, heads: Sequence[PipelineHead]) -> None:
        factory = self._factories[Kind.RECEIVER, one.type]
        assert isinstance(factory, ReceiverFactory)
        outputs: dict[Signal, Consumer] = {}
        for signal in Signal:
            fed = [
                head
                for head in heads
                if head.pipeline.signal is signal and one in head.pipeline.receivers
            ]
            if fed:
                outputs[signal] = fan_out(fed)
        settings = self._settings(Kind.RECEIVER, one)
        self._add(Kind.RECEIVER, one, factory.create(one, settings, outputs))

    def _settings(self, kind: Kind, one: ComponentId) -> StrictModel:
        return self._config.settings[kind, one]

    def _add(self, kind: Kind, one: ComponentId, component: Component) -> None:
        self._nodes[kind].append(Node(kind, one, component))
