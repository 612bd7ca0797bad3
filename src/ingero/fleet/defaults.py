"""``config --defaults``: a configuration that runs, with every key of every component and what it does.

What the running pipelines do not use is there as comments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ingero.config.describe import write_commented
from ingero.fleet.component import ComponentKind
from ingero.fleet.config import ServiceConfig
from ingero.fleet.factory import Factory
from ingero.otlp.names import Signal

_PROCESSORS: Final = ("memory_limiter", "ingero", "nccl")
_PIPELINES: Final[Mapping[Signal, Mapping[str, Sequence[str]]]] = {
    Signal.METRICS: {
        "receivers": ("otlp",),
        "processors": _PROCESSORS,
        "exporters": ("prometheus",),
    },
    Signal.LOGS: {"receivers": ("otlp",), "processors": _PROCESSORS, "exporters": ("debug",)},
}
_EXTENSIONS: Final = ("ingero_threshold", "health_check", "zpages")

_HEAD: Final = """\
# Every setting of ingero-fleet, with its default.
# ${env:NAME} and ${env:NAME:-default} are filled in from the environment; durations are 500ms, 5s, 1m30s; sizes 64MiB.
# A key without a value means "this, with its defaults". Components may be named type or type/name.
"""


def write_defaults(factories: Sequence[Factory]) -> str:
    """The YAML text; components that are not in ``factories`` are left out of its pipelines too."""
    return _HEAD + "\n".join(_lines(factories)) + "\n"


def _lines(factories: Sequence[Factory]) -> Iterator[str]:
    service = _service(factories)
    used = {(ComponentKind.EXTENSION, name) for name in service["extensions"]} | {
        (ComponentKind(kind), name)
        for parts in service["pipelines"].values()
        for kind, names in parts.items()
        for name in names
    }
    for kind in ComponentKind:
        yield f"\n{kind.value}:"
        for factory in factories:
            if factory.kind is kind:
                yield from _component(factory, is_used=(kind, factory.type) in used)
    yield "\nservice:"
    yield from _service_lines(service)


def _component(factory: Factory, *, is_used: bool) -> Iterator[str]:
    lead = "  " if is_used else "  # "
    yield f"\n{lead}{factory.type}:  # {factory.description}"
    yield from write_commented(factory.config, factory.example, f"{lead}  ")


def _service(factories: Sequence[Factory]) -> dict[str, Any]:
    by_name = {(factory.kind, factory.type): factory for factory in factories}
    pipelines: dict[str, dict[str, list[str]]] = {}
    for signal, wanted in _PIPELINES.items():
        parts = {
            key: [
                name
                for name in names
                if (ComponentKind(key), name) in by_name
                and signal in by_name[ComponentKind(key), name].signals
            ]
            for key, names in wanted.items()
        }
        if parts["receivers"] and parts["exporters"]:
            pipelines[signal] = parts
    return {
        "extensions": [name for name in _EXTENSIONS if (ComponentKind.EXTENSION, name) in by_name],
        "pipelines": pipelines,
    }


def _service_lines(service: Mapping[str, Any]) -> Iterator[str]:
    fields = ServiceConfig.model_fields
    yield f"  extensions: [{', '.join(service['extensions'])}]  # {fields['extensions'].description}"
    yield f"  pipelines:  # {fields['pipelines'].description}"
    for signal, parts in service["pipelines"].items():
        yield f"    {signal}:"
        for key, names in parts.items():
            yield f"      {key}: [{', '.join(names)}]"
    for line in write_commented(ServiceConfig, {}, "  "):
        if not line.strip().startswith(("extensions:", "# pipelines:", "pipelines:")):
            yield line
