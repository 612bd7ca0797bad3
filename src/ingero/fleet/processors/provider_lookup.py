"""``provider_lookup``: says whose machine a node is, from a mapping that the operator keeps.

The mapping wins over what an agent found out by itself. It is read again when the file changes; a bad file changes
nothing and is counted.

    # node_providers.yaml: the first rule that fits counts
    rules:
      - provider: coreweave
        nodes: ["cw-*", gpu-node-17]      # ingero.node.id, shell patterns
      - provider: aws
        addresses: [10.20.0.0/16]         # host.ip
      - provider: gcp
        labels: {cloud.google.com/gke-nodepool: a3}   # k8s.node.label.<name>

Source: seed README (provider attribution by ``node_providers.yaml``, by address or node label; Fleet's mapping wins);
the file's schema is ours. OpenTelemetry semantic conventions name ``host.ip`` and ``k8s.node.label.<key>``.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Final, Self

from msgspec.structs import replace as replace_node
from pydantic import Field, PlainValidator, model_validator

from ingero.config import Duration, StrictModel, check_model
from ingero.config.document import load_document
from ingero.errors import ConfigError
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ALL_SIGNALS, ProcessorFactory
from ingero.otlp.codec import Export, build_attributes, structs
from ingero.otlp.codec.values import message_attributes, tree_attributes
from ingero.otlp.names import Signal
from ingero.telemetry.declare import counter
from ingero.units import parse_duration
from ingero.wire.names import PROVIDER_ALIASES, Attribute

RELOADS: Final = counter(
    "ingero_fleet_provider_reloads_total",
    "Readings of a changed mapping of providers: applied or refused.",
    "processor",
    "result",
)
_LABEL: Final = "k8s.node.label."
_ENTRIES: Final = {
    Signal.METRICS: "resource_metrics",
    Signal.LOGS: "resource_logs",
    Signal.TRACES: "resource_spans",
}
_MAX_KNOWN: Final = 50_000
_log = logging.getLogger("ingero.fleet.processors.provider_lookup")


def _read_network(value: object) -> str:
    return str(ipaddress.ip_network(str(value), strict=False))


class ProviderRule(StrictModel):
    """One provider and how its nodes are known."""

    provider: str = Field(min_length=1, description="Value of ingero.provider.")
    nodes: tuple[str, ...] = Field(
        (), description="Patterns of ingero.node.id; * and ? as in a shell."
    )
    addresses: tuple[Annotated[str, PlainValidator(_read_network)], ...] = Field(
        (), description="Networks of host.ip, such as 10.20.0.0/16."
    )
    labels: Mapping[str, str] = Field(
        {}, description="Kubernetes labels of the node, all of which must be equal."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.nodes or self.addresses or self.labels):
            raise ValueError("give nodes, addresses or labels; a rule without any fits every node")
        return self

    def fits(self, attributes: Mapping[str, Any]) -> bool:
        """Whether a resource is one of this provider's."""
        node = str(attributes.get(Attribute.NODE_ID, ""))
        if any(fnmatchcase(node, pattern) for pattern in self.nodes):
            return True
        if self.labels and all(
            attributes.get(_LABEL + key) == value for key, value in self.labels.items()
        ):
            return True
        return any(_is_inside(address, self.addresses) for address in _addresses(attributes))


class ProviderMapping(StrictModel):
    """The mapping file."""

    rules: tuple[ProviderRule, ...] = Field((), description="The first that fits counts.")


class ProviderLookupConfig(ProviderMapping):
    """The mapping, or where it is."""

    mapping_file: str | None = Field(
        None, description="YAML file with the rules, read again when it changes; instead of rules."
    )
    reload_interval: Duration = Field(
        parse_duration("30s"), gt=0, description="How often the file is checked for a change."
    )

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.mapping_file is not None) == bool(self.rules):
            raise ValueError("give either rules or mapping_file")
        return self


def read_mapping(path: Path) -> ProviderMapping:
    """Read a mapping file. Raises ConfigError with every problem of it."""
    document = load_document(path)
    mapping, problems = check_model(ProviderMapping, document.tree, lines=document.lines)
    document.problems += problems
    document.raise_problems()
    assert mapping is not None
    return mapping


def _addresses(attributes: Mapping[str, Any]) -> list[str]:
    found = attributes.get("host.ip")
    return [str(one) for one in found] if isinstance(found, list) else [str(found)] if found else []


def _is_inside(address: str, networks: tuple[str, ...]) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return any(parsed in ipaddress.ip_network(network) for network in networks)


class ProviderLookup:
    """Sets ``ingero.provider`` on the resources of one pipeline."""

    def __init__(
        self,
        component: ComponentId,
        config: ProviderLookupConfig,
        signal: Signal,
        following: Consumer,
    ) -> None:
        self._name = str(component)
        self._path = Path(config.mapping_file) if config.mapping_file is not None else None
        self._interval_ns = config.reload_interval
        self._entries = _ENTRIES[signal]
        self._following = following
        self._rules = config.rules
        self._stamp: tuple[int, int, int] | None = None
        self._known: dict[bytes, str | None] = {}

    async def start(self, host: Host) -> None:
        """Read the mapping. Raises ConfigError with every problem of it."""
        reloads = host.meter.counter(RELOADS)
        self._applied = reloads.bound(processor=self._name, result="applied")
        self._refused = reloads.bound(processor=self._name, result="refused")
        if self._path is not None:
            self._read(self._path)
            host.every(self._interval_ns, self._refresh)

    async def stop(self) -> None:
        """Nothing to release."""

    def consume(self, batch: Batch) -> None:
        """Pass the batch on, its resources named."""
        export = batch.export
        named = self._name_message(export) if export.is_message else self._name_tree(export)
        self._following.consume(batch if named is export else replace(batch, export=named))

    def _refresh(self) -> None:
        assert self._path is not None
        try:
            if self._read(self._path):
                self._applied(1)
        except ConfigError as error:
            self._refused(1)
            _log.warning("processors.%s keeps its old mapping: %s", self._name, error.message)

    def _read(self, path: Path) -> bool:
        """Read the file if it changed; whether it had."""
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
        stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
        if stamp == self._stamp:
            return False
        self._stamp = stamp  # also of a bad file: it is complained about once
        self._rules = read_mapping(path).rules
        self._known = {}
        return True

    def _find(self, attributes: Mapping[str, Any]) -> str | None:
        """The provider to set; None to leave the resource alone."""
        found = next((rule.provider for rule in self._rules if rule.fits(attributes)), None)
        provider = found if found is not None else attributes.get(Attribute.PROVIDER)
        wanted = PROVIDER_ALIASES.get(str(provider), str(provider)) if provider else None
        if wanted == attributes.get(Attribute.PROVIDER):
            wanted = None
        return wanted

    def _find_known(self, resource: structs.Proto) -> str | None:
        """As `_find`, of a upb resource; remembered by its bytes."""
        key: bytes = resource.SerializeToString()
        known = self._known
        if key in known:
            return known[key]
        wanted = self._find(message_attributes(resource.attributes))
        if len(known) >= _MAX_KNOWN:
            self._known = {}
        self._known[key] = wanted
        return wanted

    def _name_message(self, export: Export) -> Export:
        changed: dict[int, str] = {}
        for at, entry in enumerate(getattr(export.message, self._entries)):
            wanted = self._find_known(entry.resource)
            if wanted is not None:
                changed[at] = wanted
        if not changed:
            return export
        copy = type(export.message)()
        copy.CopyFrom(export.message)
        for at, provider in changed.items():
            attributes = getattr(copy, self._entries)[at].resource.attributes
            mine = next((one for one in attributes if one.key == Attribute.PROVIDER), None)
            (
                mine if mine is not None else attributes.add(key=str(Attribute.PROVIDER))
            ).value.string_value = provider
        return Export.from_message(export.signal, copy, export.size_bytes)

    def _name_tree(self, export: Export) -> Export:
        entries = list(getattr(export.tree, self._entries))
        is_changed = False
        for at, entry in enumerate(entries):
            resource = entry.resource or structs.Resource()
            attributes = tree_attributes(resource.attributes)
            wanted = self._find(attributes)
            if wanted is not None:
                kept = [one for one in resource.attributes if one.key != Attribute.PROVIDER]
                named = kept + build_attributes({Attribute.PROVIDER: wanted})
                entries[at] = replace_node(entry, resource=replace_node(resource, attributes=named))
                is_changed = True
        if not is_changed:
            return export
        tree = replace_node(export.tree, **{self._entries: entries})
        return Export.from_tree(export.signal, tree, export.size_bytes)


def _check_files(config: ProviderLookupConfig) -> None:
    if config.mapping_file is not None:
        read_mapping(Path(config.mapping_file))


FACTORY: Final = ProcessorFactory(
    type="provider_lookup",
    config=ProviderLookupConfig,
    description="Names the provider of each node from a mapping file.",
    signals=ALL_SIGNALS,
    stability=Stability.BETA,
    metrics=(RELOADS,),
    create=ProviderLookup,
    check_files=_check_files,
    example={"rules": [{"provider": "aws", "nodes": ["aws-*"]}]},
)
