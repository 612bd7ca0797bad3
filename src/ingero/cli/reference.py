"""Writes ``docs/reference/`` from the code.

``make docs`` runs ``python -m ingero.cli.reference docs/reference``.

Configuration keys come from the settings models, metrics from their declarations, commands from click. A page that is
edited by hand or left behind fails ``tests/docs/test_reference.py``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import click

from ingero.cli.arguments import iter_old
from ingero.cli.entry_points import PROGRAMS
from ingero.cli.help import keep_line_breaks
from ingero.cli.programs import health_check
from ingero.cli.settings_file import OLD_KEYS, find_settings
from ingero.config.describe import iter_keys
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.telemetry import METRICS as ECHO_METRICS
from ingero.fleet.builtin import FACTORIES
from ingero.fleet.component import ComponentKind
from ingero.fleet.config import ServiceConfig
from ingero.fleet.factory import Factory
from ingero.fleet.graph import GRAPH_METRICS
from ingero.fleet.service import SERVICE_METRICS
from ingero.remediation.config import RemediatorConfig
from ingero.telemetry.declare import MetricDeclaration

PLAIN: Final = {health_check.__name__: ("ingero-health-check", health_check.USAGE)}
"""Programs without click, whose start has to be fast: name and usage by module."""
_GENERATED: Final = "<!-- Written by `make docs`; edit the code it names instead. -->"


def write_fleet_config() -> str:
    """Every key of every component and of ``service``."""
    return "\n".join([
        "# Configuration of ingero-fleet",
        "",
        _GENERATED,
        "",
        "Durations are written `500ms`, `5s` or `1m30s`, sizes `64MiB` or `10GB`, addresses `host:port`.",
        "`${env:NAME}` and `${env:NAME:-default}` are filled in from the environment; nothing else is.",
        (
            "A key without a value means the section with its defaults. `ingero-fleet config --defaults` prints "
            "all of this as YAML."
        ),
        "",
        *(line for kind in ComponentKind for line in _config_of_kind(kind)),
        "## service",
        "",
        *_key_table(ServiceConfig),
    ])


def _config_of_kind(kind: ComponentKind) -> Iterator[str]:
    for factory in FACTORIES:
        if factory.kind is kind:
            yield from (f"## {kind.value}: {factory.type}", "", _introduce(factory), "")
            yield from _key_table(factory.config)


def _introduce(factory: Factory) -> str:
    pipelines = (
        f" Pipelines: {', '.join(sorted(factory.signals))}."
        if factory.kind is not ComponentKind.EXTENSION
        else ""
    )
    return f"{factory.description} Stability: {factory.stability.value}.{pipelines}"


def _key_table(model: type) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in iter_keys(model):
        default = "required" if key.is_required else f"`{key.default}`" if key.default else ""
        yield f"| `{key.path}` | {_cell(key.form)} | {_cell(default)} | {_cell(key.description)} |"
    yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_fleet_metrics() -> str:
    """Every instrument of the collector's own telemetry."""
    owners: dict[MetricDeclaration, list[str]] = {
        metric: ["service"] for metric in (*GRAPH_METRICS, *SERVICE_METRICS)
    }
    for factory in FACTORIES:
        for metric in factory.metrics:
            owners.setdefault(metric, []).append(f"{factory.kind.value}: {factory.type}")
    return "\n".join([
        "# Metrics of ingero-fleet about itself",
        "",
        _GENERATED,
        "",
        (
            "Scraped from `service.telemetry.metrics`, port 8888 by default. What is unknown is absent, "
            "not zero."
        ),
        "",
        *_metric_table(owners),
    ])


def _metric_table(owners: Mapping[MetricDeclaration, Iterable[str]]) -> Iterator[str]:
    yield "| metric | type | labels | meaning | from |"
    yield "|---|---|---|---|---|"
    for metric in sorted(owners, key=lambda one: one.name):
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        yield (
            f"| `{metric.name}` | {metric.kind.value} | {labels} | {_cell(metric.description)} | "
            f"{', '.join(owners[metric])} |"
        )
    yield ""


def write_echo_config() -> str:
    """Every key of Echo's settings file."""
    return "\n".join([
        "# Configuration of ingero-echo",
        "",
        _GENERATED,
        "",
        "Each key is a flag of `ingero-echo serve` too, or is set with `--set KEY=VALUE`; flags win over the file.",
        "`ingero-echo config --defaults` prints all of this as YAML.",
        "",
        *_key_table(EchoConfig),
    ])


def write_echo_metrics() -> str:
    """Every instrument of Echo."""
    return "\n".join([
        "# Metrics of ingero-echo",
        "",
        _GENERATED,
        "",
        "Served at `/metrics` of the MCP listener, to bearers. No label is ever a tenant's name.",
        "",
        *_metric_table(dict.fromkeys(ECHO_METRICS, ())),
    ])


def write_agent_config() -> str:
    """Every key of the settings file of ``trace`` and ``fleet-push``."""
    lines = [
        "# Settings of ingero trace and ingero fleet-push",
        "",
        _GENERATED,
        "",
        "Each option of these commands is a key of `ingero.yaml` and a variable of the environment. A flag wins over",
        "the variable, and that over the file; [the guide](../guides/agent.md#settings-in-a-file) says where it is",
        "looked for.",
        "",
        "| key | flag | variable | read by | meaning |",
        "|---|---|---|---|---|",
    ]
    for key, setting in find_settings(find_programs()["ingero"]).items():
        flags, variables = (
            " ".join(f"`{name}`" for name in names) for names in (setting.flags, setting.variables)
        )
        users = ", ".join(f"`{command.name}`" for command, _ in setting.uses)
        description = " ".join((setting.uses[0][1].help or "").split())
        lines.append(f"| `{key}` | {flags} | {variables} | {users} | {_cell(description)} |")
    lines += ["", "Keys of the existing agent that have no effect, which a warning says:", ""]
    lines += ["| key | instead |", "|---|---|"]
    lines += [f"| `{key}` | {_cell(instead)} |" for key, instead in OLD_KEYS.items()]
    return "\n".join(lines)


def write_remediator_config() -> str:
    """Every key of a remediator's policy."""
    return "\n".join([
        "# Policy of ingero-remediator",
        "",
        _GENERATED,
        "",
        "Durations are written `500ms`, `5s` or `1m30s`; `${env:NAME}` is filled in from the environment.",
        "`action` has exactly one section. `ingero-remediator config --defaults` prints all of this as YAML.",
        "",
        *_key_table(RemediatorConfig),
    ])


def write_cli() -> str:
    """Every command of every program, as ``--help`` shows it."""
    lines = ["# Commands", "", _GENERATED, ""]
    for name, program in sorted(find_programs().items()):
        keep_line_breaks(program)
        lines += _describe_command(program, name, None)
    for name, usage in PLAIN.values():
        lines += [f"## {name}", "", "```text", *usage.splitlines(), "```", ""]
    return "\n".join([*lines, *_old_option_table()])


def _old_option_table() -> Iterator[str]:
    yield "## Options of the existing agent"
    yield ""
    yield "Accepted and not shown by `--help`. A switch may have a value (`--record=false`),"
    yield "a long name one dash (`-listen`)."
    yield ""
    yield "| command | option | meaning |"
    yield "|---|---|---|"
    for old in (one for program in find_programs().values() for one in iter_old(program)):
        names = ", ".join(f"`{name}`" for name in old.names.split())
        effect = "" if old.has_effect else "Refused: " if old.is_refused else "No effect: "
        yield f"| `{old.where}` | {names} | {_cell(effect + old.description)} |"
    yield ""


def find_programs() -> dict[str, click.Command]:
    """The click program behind each console script that has one; scripts of one program are one entry."""
    programs: dict[str, click.Command] = {}
    for name, module in sorted(PROGRAMS.items(), key=lambda one: len(one[0])):
        command = _program_of(importlib.import_module(module))
        if command not in programs.values():
            programs[name] = command
    return programs


def _program_of(module: object) -> click.Command:
    for name in ("cli", "command", "program"):
        found = getattr(module, name, None)
        if isinstance(found, click.Command):
            return found
    raise LookupError(f"{module} has no click program named cli, command or program")


def _describe_command(command: click.Command, name: str, parent: click.Context | None) -> list[str]:
    settings = {**command.context_settings, "terminal_width": 100, "max_content_width": 100}
    context = click.Context(command, info_name=name, parent=parent, **settings)
    text = inspect.cleandoc(command.get_help(context))
    lines = [
        f"## {context.command_path}",
        "",
        "```text",
        *(line.rstrip() for line in text.splitlines()),
        "```",
        "",
    ]
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            found = command.get_command(context, inner)
            if found is not None and not found.hidden:
                lines += _describe_command(found, inner, context)
    return lines


PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "agent-config.md": write_agent_config,
    "fleet-config.md": write_fleet_config,
    "fleet-metrics.md": write_fleet_metrics,
    "echo-config.md": write_echo_config,
    "echo-metrics.md": write_echo_metrics,
    "remediator-config.md": write_remediator_config,
    "cli.md": write_cli,
}
"""Each generated page and what writes it."""


def write_pages(folder: Path) -> None:
    """Write every page below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in PAGES.items():
        (folder / name).write_text(write().rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m ingero.cli.reference FOLDER")
    write_pages(Path(sys.argv[1]))
