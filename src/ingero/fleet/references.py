"""What settings of one component say about others: names of extensions, ports that two want, files that must be there.

Below the configuration, which reports what is found with its line; reads validated models only. Only
`find_file_problems` opens anything, and nothing stays open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pydantic.fields import FieldInfo

from ingero.config import Endpoint, StrictModel
from ingero.config.tls import TlsClientConfig, TlsServerConfig
from ingero.errors import ConfigError, IngeroError
from ingero.fleet.component import ComponentId, ComponentKind, NamesExtension, parse_id
from ingero.fleet.factory import Factory
from ingero.serving.tls import build_client_context, build_server_context

Path = tuple[str | int, ...]
Settings = Mapping[tuple[ComponentKind, ComponentId], StrictModel]

_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 -- compared, not bound
_LOOPBACK: Final = {"localhost": "127.0.0.1", "::1": "127.0.0.1"}


@dataclass(frozen=True, slots=True)
class Problem:
    """A setting that cannot work, by its path in the file."""

    at: Path
    message: str
    hint: str = ""


def iter_settings(model: StrictModel, at: Path) -> Iterator[tuple[Path, FieldInfo, object]]:
    """Every setting of a model and of the models inside, with its path and its declaration."""
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        here = (*at, name)
        yield here, info, value
        if isinstance(value, StrictModel):
            yield from iter_settings(value, here)
        elif isinstance(value, tuple):
            for index, one in enumerate(value):
                if isinstance(one, StrictModel):
                    yield from iter_settings(one, (*here, index))


def find_unknown_extensions(
    settings: Settings, running: Sequence[ComponentId], defined: Collection[ComponentId]
) -> Iterator[Problem]:
    """Settings that name an extension which does not run."""
    for (kind, component), model in settings.items():
        for at, info, value in iter_settings(model, (kind.value, str(component))):
            if not isinstance(value, str) or not any(
                isinstance(mark, NamesExtension) for mark in info.metadata
            ):
                continue
            named = parse_id(value)
            if named in running:
                continue
            if named in defined:
                yield Problem(at, f"{value!r} does not run", "list it under service.extensions")
            else:
                hint = "define it there and list it under service.extensions"
                yield Problem(at, f"{value!r} is not defined under extensions", hint)


def find_shared_ports(settings: Settings, own: Sequence[Endpoint]) -> Iterator[Problem]:
    """Settings that listen where an earlier one does."""
    taken: list[tuple[Endpoint, str]] = [
        (one, "service.telemetry.metrics") for one in own if one.port
    ]
    for (kind, component), model in settings.items():
        for at, _, value in iter_settings(model, (kind.value, str(component))):
            if not isinstance(value, Endpoint) or not value.port:
                continue
            other = next((name for one, name in taken if _is_same_port(one, value)), None)
            if other is not None:
                yield Problem(
                    at, f"{value} is where {other} listens", "give each a port of its own"
                )
            taken.append((value, ".".join(map(str, at))))


def _is_same_port(one: Endpoint, other: Endpoint) -> bool:
    hosts = {_LOOPBACK.get(host, host) for host in (one.host, other.host)}
    return one.port == other.port and (len(hosts) == 1 or bool(hosts & _EVERYWHERE))


def find_file_problems(settings: Settings, factories: Sequence[Factory]) -> Iterator[Problem]:
    """Files that components need at their start and that are missing, unreadable or not what they should be."""
    by_type = {(factory.kind, factory.type): factory for factory in factories}
    for (kind, component), model in settings.items():
        top: Path = (kind.value, str(component))
        for at, _, value in iter_settings(model, top):
            try:
                if isinstance(value, TlsServerConfig):
                    build_server_context(value)
                elif isinstance(value, TlsClientConfig) and not value.insecure:
                    build_client_context(value)
            except IngeroError as error:
                yield Problem(at, error.message, error.hint)
        check = by_type[kind, component.type].check_files
        if check is None:
            continue
        try:
            check(model)
        except ConfigError as error:
            for line in error.message.splitlines():
                yield Problem(top, line.strip())
        except IngeroError as error:
            yield Problem(top, error.message, error.hint)
