"""How a component is made: one factory per type, listed in `ingero.fleet.builtin.FACTORIES`.

Above the contracts (`component`, `consumer`), below every component. A factory is data: the name and config model that
the configuration file refers to, what the component says about itself, and a function that builds it. Building opens
nothing: sockets, files and threads are for ``start``.

    FACTORY = ProcessorFactory(
        type="batch",
        config=BatchConfig,
        says="Joins small exports into larger ones.",
        signals=ALL_SIGNALS,
        stability=Stability.BETA,
        metrics=(SENDS,),
        create=BatchProcessor,          # (id, config, signal, following) -> Processor
    )
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, Protocol, TypeAlias, TypeVar

from ingero.config import StrictModel
from ingero.fleet.component import Component, ComponentId, ComponentKind, Stability
from ingero.fleet.consumer import Consumer
from ingero.otlp.names import Signal
from ingero.telemetry.declare import MetricDeclaration

ConfigT = TypeVar("ConfigT", bound=StrictModel)

ALL_SIGNALS: Final = frozenset(Signal)
METRICS_ONLY: Final = frozenset({Signal.METRICS})


class ConsumingComponent(Component, Consumer, Protocol):
    """A processor or an exporter: something with a lifecycle that takes batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentFacts(Generic[ConfigT]):
    """What every factory says.

    Attributes:
        type: The name in the configuration, before any ``/name``.
        config: The model of its settings; an empty mapping must be valid unless a setting has no sensible default.
        description: One line for ``ingero-fleet components`` and the reference.
        signals: Which pipeline types may name it; empty for extensions.
        stability: How far it may be relied on.
        metrics: Every instrument it makes; the reference and the conformance test read this.
        example: Settings with which a component that has no usable defaults can be shown and tested.
        check_files: Checks the files that ``start`` would need, beside those of TLS, and raises IngeroError where it
            would; None when there are none.
    """

    type: str
    config: builtins.type[ConfigT]
    description: str
    signals: frozenset[Signal] = ALL_SIGNALS
    stability: Stability = Stability.BETA
    metrics: tuple[MetricDeclaration, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
    check_files: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverFactory(ComponentFacts[ConfigT]):
    """Makes the one instance of a receiver, whatever number of pipelines it feeds.

    ``create(id, config, outputs)``: ``outputs`` has a consumer for each signal that a pipeline wants from it; a
    signal that is absent is not accepted.
    """

    kind: ClassVar[ComponentKind] = ComponentKind.RECEIVER
    create: Callable[[ComponentId, ConfigT, Mapping[Signal, Consumer]], Component]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorFactory(ComponentFacts[ConfigT]):
    """Makes one instance per pipeline: ``create(id, config, signal, following)`` with the consumer after it."""

    kind: ClassVar[ComponentKind] = ComponentKind.PROCESSOR
    create: Callable[[ComponentId, ConfigT, Signal, Consumer], ConsumingComponent]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterFactory(ComponentFacts[ConfigT]):
    """Makes the one instance of an exporter, shared by every pipeline that names it: ``create(id, config)``."""

    kind: ClassVar[ComponentKind] = ComponentKind.EXPORTER
    create: Callable[[ComponentId, ConfigT], ConsumingComponent]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionFactory(ComponentFacts[ConfigT]):
    """Makes the one instance of an extension: ``create(id, config)``. Leave ``signals`` alone."""

    kind: ClassVar[ComponentKind] = ComponentKind.EXTENSION
    create: Callable[[ComponentId, ConfigT], Component]


Factory: TypeAlias = (
    ReceiverFactory[Any] | ProcessorFactory[Any] | ExporterFactory[Any] | ExtensionFactory[Any]
)
