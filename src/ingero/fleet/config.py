"""The whole configuration file of the collector: sections, component ids, pipelines, and ``service``.

Checks everything that can be known without opening anything, and says all of it at once. Which components exist is an
argument, so this stands below their list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import Field

from ingero.config import Duration, Endpoint, StrictModel
from ingero.config.document import Document
from ingero.config.model import Path, check_model, dotted, find_line, nearest
from ingero.errors import ConfigError, ConfigProblem
from ingero.fleet.component import ComponentId, ComponentKind, parse_id
from ingero.fleet.factory import Factory
from ingero.fleet.jetstream.config import StorageConfig
from ingero.fleet.references import find_file_problems, find_shared_ports, find_unknown_extensions
from ingero.otlp.names import Signal
from ingero.units import parse_duration


class PrometheusReaderConfig(StrictModel):
    """Where Prometheus finds the service's own metrics."""

    host: str = Field("localhost", description="Address to listen on.")
    port: int = Field(
        8888, ge=0, le=65_535, description="Port to listen on; 0 lets the kernel choose."
    )


class PullExporterConfig(StrictModel):
    """The ways in which a reader can be read."""

    prometheus: PrometheusReaderConfig = Field(description="Prometheus text at /metrics.")


class PullReaderConfig(StrictModel):
    """A reader that waits to be scraped."""

    exporter: PullExporterConfig = Field(description="How it is scraped.")


class ReaderConfig(StrictModel):
    """One way for the service's own metrics to leave; only ``pull`` is known."""

    pull: PullReaderConfig = Field(description="A reader that waits to be scraped.")


class OwnMetricsConfig(StrictModel):
    """The service's own metrics."""

    level: Literal["none", "basic", "normal", "detailed"] = Field(
        "normal", description="none closes the endpoint; the others are the same here."
    )
    address: Endpoint | None = Field(
        None,
        description="host:port of the Prometheus endpoint; localhost:8888 when neither this nor readers is set.",
    )
    readers: tuple[ReaderConfig, ...] | None = Field(
        None, description="The Collector's newer way to say where; wins over address."
    )

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Every address to listen on; empty at level none."""
        if self.level == "none":
            return ()
        if self.readers is not None:
            readers = [reader.pull.exporter.prometheus for reader in self.readers]
            return tuple(Endpoint(reader.host, reader.port) for reader in readers)
        return (self.address or Endpoint("localhost", 8888),)


class OwnLogsConfig(StrictModel):
    """The service's own log lines, on standard error."""

    level: Literal["debug", "info", "warn", "error", "DEBUG", "INFO", "WARN", "ERROR"] = Field(
        "info", description="Least severe level that is written."
    )
    encoding: Literal["console", "json"] = Field(
        "console", description="One line of text, or one JSON object, each."
    )


class TelemetryConfig(StrictModel):
    """What the service says about itself."""

    absent_keys = {  # noqa: RUF012 -- declared as ClassVar by StrictModel
        "resource": "the service's own metrics have no resource attributes; set labels where they are scraped",
        "traces": "the service makes no spans of its own; leave it out",
    }

    metrics: OwnMetricsConfig = Field(OwnMetricsConfig(), description="Its own metrics.")
    logs: OwnLogsConfig = Field(OwnLogsConfig(), description="Its own log lines.")


class PipelineConfig(StrictModel):
    """One way from receivers to exporters."""

    receivers: tuple[str, ...] = Field((), description="Where its data comes from.")
    processors: tuple[str, ...] = Field((), description="What happens to it, in order.")
    exporters: tuple[str, ...] = Field((), description="Where it goes; each gets all of it.")


class ServiceConfig(StrictModel):
    """What runs."""

    extensions: tuple[str, ...] = Field((), description="Extensions to start, in order.")
    pipelines: dict[str, PipelineConfig] = Field(
        default_factory=dict,
        description="metrics, logs or traces, with an optional /name, to its parts.",
    )
    telemetry: TelemetryConfig = Field(
        TelemetryConfig(), description="What the service says about itself."
    )
    workers: int = Field(
        1,
        ge=1,
        le=64,
        description="Processes that receive. With 2 and more they share the receivers' ports and hand pushes to"
        " this process, which does everything else; limits of connections and requests are each worker's.",
    )
    storage: StorageConfig = Field(
        StorageConfig(),
        description="Where several Fleets of a site meet; empty is one Fleet alone.",
    )
    shutdown_timeout: Duration = Field(
        parse_duration("25s"),
        description="How long SIGTERM waits for data in flight; keep it under the supervisor's kill delay.",
    )


_ABSENT_SECTIONS: Final = {
    "connectors": "pipelines cannot feed each other here; name the exporters of both in each"
}


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline with its names resolved."""

    signal: Signal
    name: str
    receivers: tuple[ComponentId, ...]
    processors: tuple[ComponentId, ...]
    exporters: tuple[ComponentId, ...]

    def members(self, kind: ComponentKind) -> tuple[ComponentId, ...]:
        """Its components of one kind, in order."""
        by_kind = {
            ComponentKind.RECEIVER: self.receivers,
            ComponentKind.PROCESSOR: self.processors,
            ComponentKind.EXPORTER: self.exporters,
        }
        return by_kind.get(kind, ())


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """A configuration that was checked.

    Attributes:
        service: The ``service`` section.
        pipelines: In the order of the file.
        extensions: In start order.
        settings: Each defined component's settings, used or not.
        warnings: What is legal and probably not meant.
        source: The file's name.
        lines: Line of each key and value of the file, by path.
    """

    service: ServiceConfig
    pipelines: tuple[Pipeline, ...]
    extensions: tuple[ComponentId, ...]
    settings: Mapping[tuple[ComponentKind, ComponentId], StrictModel]
    warnings: tuple[ConfigProblem, ...] = ()
    source: str = ""
    lines: Mapping[Path, int] = field(default_factory=dict)

    def used(self, kind: ComponentKind) -> tuple[ComponentId, ...]:
        """The components of a kind that run, each once, in the order of their first mention."""
        if kind is ComponentKind.EXTENSION:
            return self.extensions
        return tuple(
            dict.fromkeys(one for pipeline in self.pipelines for one in pipeline.members(kind))
        )


def check_files(config: FleetConfig, factories: Sequence[Factory]) -> None:
    """Check every file that the components which run need at their start.

    Raises:
        ConfigError: Lists every one that is missing, unreadable or not what it should be.
    """
    running = {kind: set(config.used(kind)) for kind in ComponentKind}
    used = {
        (kind, one): model for (kind, one), model in config.settings.items() if one in running[kind]
    }
    problems = [
        ConfigProblem(
            dotted(found.at), found.message, find_line(found.at, config.lines), found.hint
        )
        for found in find_file_problems(used, factories)
    ]
    if problems:
        raise ConfigError(problems, source=config.source)


def build_config(document: Document, factories: Sequence[Factory]) -> FleetConfig:
    """Check a document and resolve it.

    Raises:
        ConfigError: Lists every problem, those of reading the document included.
    """
    checker = _Checker(document, factories)
    config = checker.check()
    broken = {problem.path for problem in document.problems}
    document.problems += [problem for problem in checker.problems if problem.path not in broken]
    document.raise_problems()
    assert config is not None
    return config


class _Checker:
    """One walk over one document."""

    def __init__(self, document: Document, factories: Sequence[Factory]) -> None:
        self._document = document
        self._factories = {(factory.kind, factory.type): factory for factory in factories}
        self.problems: list[ConfigProblem] = []
        self._warnings: list[ConfigProblem] = []
        self._settings: dict[tuple[ComponentKind, ComponentId], StrictModel | None] = {}

    def check(self) -> FleetConfig | None:
        known = [*ComponentKind, "service"]
        for key in self._document.tree:
            if key not in known:
                hint = _ABSENT_SECTIONS.get(key) or nearest(key, [str(one) for one in known])
                self._add_problem((key,), "unknown section", hint)
        for kind in ComponentKind:
            for text, settings in self._section(kind):
                self._check_component(kind, text, settings)
        service = self._check_service()
        if service is None:
            return None
        if not service.pipelines:
            self._add_problem(("service", "pipelines"), "there is none", "nothing would run")
        extensions = self._resolve(
            ComponentKind.EXTENSION, service.extensions, ("service", "extensions")
        )
        pipelines = tuple(
            pipeline
            for text, raw in service.pipelines.items()
            if (pipeline := self._pipeline(text, raw))
        )
        self._warn_unused(pipelines, extensions)
        settings = {key: model for key, model in self._settings.items() if model is not None}
        self._check_references(service, pipelines, extensions, settings)
        return FleetConfig(
            service,
            pipelines,
            extensions,
            settings,
            tuple(self._warnings),
            self._document.source,
            self._document.lines,
        )

    def _check_references(
        self,
        service: ServiceConfig,
        pipelines: Sequence[Pipeline],
        extensions: Sequence[ComponentId],
        settings: Mapping[tuple[ComponentKind, ComponentId], StrictModel],
    ) -> None:
        """What components that run say about each other; the rest may be half done."""
        running = _list_running(pipelines, extensions)
        used = {key: model for key, model in settings.items() if key in running}
        defined = {one for kind, one in self._settings if kind is ComponentKind.EXTENSION}
        found = [
            *find_unknown_extensions(used, extensions, defined),
            *find_shared_ports(used, service.telemetry.metrics.endpoints),
        ]
        for problem in found:
            self._add_problem(problem.at, problem.message, problem.hint)

    def _section(self, kind: ComponentKind) -> Iterator[tuple[str, object]]:
        section = self._document.section(kind)
        if isinstance(section, Mapping):
            yield from section.items()
        elif section is not None:
            self._add_problem((kind.value,), "is not a mapping of components")

    def _check_component(self, kind: ComponentKind, text: str, settings: object) -> None:
        at = (kind.value, text)
        component = parse_id(text)
        if component is None:
            self._add_problem(at, "is not a component id", "write type or type/name")
            return
        self._settings[kind, component] = None
        factory = self._factories.get((kind, component.type))
        if factory is None:
            types = sorted(one for of, one in self._factories if of is kind)
            self._add_problem(
                at,
                f"unknown {kind.value[:-1]} type {component.type!r}",
                nearest(component.type, types),
            )
        elif settings is not None and not isinstance(settings, Mapping):
            self._add_problem(at, "is not a mapping of settings")
        else:
            model, problems = check_model(
                factory.config, settings, at=at, lines=self._document.lines
            )
            self._settings[kind, component] = model
            self.problems += problems

    def _check_service(self) -> ServiceConfig | None:
        raw = self._document.section("service")
        if not isinstance(raw, Mapping):
            self._add_problem(("service",), "is required", "it names the pipelines to run")
            return None
        service, problems = check_model(
            ServiceConfig, raw, at=("service",), lines=self._document.lines
        )
        self.problems += problems
        if service is not None and service.storage.nats is not None and service.workers > 1:
            self._add_problem(
                ("service", "workers"),
                "not together with storage.nats",
                "start more Fleets instead, on any machines",
            )
        return service

    def _pipeline(self, text: str, raw: PipelineConfig) -> Pipeline | None:
        at: Path = ("service", "pipelines", text)
        kind, _, name = text.partition("/")
        if kind not in [*Signal]:
            self._add_problem(at, f"{kind!r} is not a signal", nearest(kind, [*Signal]))
            return None
        signal = Signal(kind)
        members = {
            of: self._resolve(of, getattr(raw, of.value), (*at, of.value))
            for of in (ComponentKind.RECEIVER, ComponentKind.PROCESSOR, ComponentKind.EXPORTER)
        }
        for of, components in members.items():
            if of is not ComponentKind.PROCESSOR and not getattr(raw, of.value):
                self._add_problem(at, f"has no {of.value}", "a pipeline needs at least one")
            for component in components:
                self._check_signal(of, component, signal, (*at, of.value))
        return Pipeline(
            signal,
            name,
            members[ComponentKind.RECEIVER],
            members[ComponentKind.PROCESSOR],
            members[ComponentKind.EXPORTER],
        )

    def _resolve(
        self, kind: ComponentKind, names: Sequence[str], at: Path
    ) -> tuple[ComponentId, ...]:
        found: list[ComponentId] = []
        for index, text in enumerate(names):
            component = parse_id(text)
            where = (*at, index)
            if component is None or (kind, component) not in self._settings:
                defined = [str(one) for of, one in self._settings if of is kind]
                self._add_problem(
                    where, f"{text!r} is not defined under {kind.value}", nearest(text, defined)
                )
            elif component in found:
                self._add_problem(where, f"{text!r} stands twice in this list")
            else:
                found.append(component)
        return tuple(found)

    def _check_signal(
        self, kind: ComponentKind, component: ComponentId, signal: Signal, at: Path
    ) -> None:
        factory = self._factories.get((kind, component.type))
        if factory is not None and signal not in factory.signals:
            can = ", ".join(sorted(factory.signals))
            self._add_problem(
                at, f"{component} cannot be in a {signal} pipeline", f"it takes {can}"
            )

    def _warn_unused(
        self, pipelines: Sequence[Pipeline], extensions: Sequence[ComponentId]
    ) -> None:
        used = _list_running(pipelines, extensions)
        for kind, component in self._settings:
            if (kind, component) not in used:
                at = (kind.value, str(component))
                self._warnings.append(
                    ConfigProblem(
                        dotted(at), "is defined and not used", find_line(at, self._document.lines)
                    )
                )

    def _add_problem(self, at: Path, message: str, hint: str = "") -> None:
        line = find_line(at, self._document.lines)
        self.problems.append(ConfigProblem(dotted(at), message, line, hint))


def _list_running(
    pipelines: Sequence[Pipeline], extensions: Sequence[ComponentId]
) -> set[tuple[ComponentKind, ComponentId]]:
    found = {(of, one) for line in pipelines for of in ComponentKind for one in line.members(of)}
    return found | {(ComponentKind.EXTENSION, one) for one in extensions}
