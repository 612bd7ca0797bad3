"""The ``ingero-fleet`` program: run a collector, or look at what it would run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ingero import __version__
from ingero.cli.commands import help_page
from ingero.cli.main import run_program
from ingero.errors import UnsupportedError

if TYPE_CHECKING:
    from ingero.fleet.config import FleetConfig

_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one setting, such as exporters.debug.verbosity=detailed; may be repeated.",
)


@click.group(
    "ingero-fleet",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ingero-fleet", message="%(prog)s %(version)s")
@click.option("--config", "file", metavar="FILE", help="The configuration to run.")
@_SET
@click.pass_context
def cli(context: click.Context, file: str | None, overrides: tuple[str, ...]) -> int | None:
    r"""Compare the ranks of a cluster where they meet: OTLP in, threshold and verdicts out.

    SIGTERM drains and ends; SIGHUP reads FILE again and keeps the old settings when the new ones are bad.

    \b
    Examples:
      ingero-fleet --config fleet-config.yaml
      ingero-fleet --config fleet-config.yaml --set processors.ingero.threshold.k=3
      ingero-fleet validate fleet-config.yaml
      ingero-fleet config --defaults > fleet-config.yaml
    """
    if context.invoked_subcommand is not None:
        _refuse_early(context, context.invoked_subcommand)
        return None
    if file is None:
        raise click.UsageError(
            "give --config FILE; `ingero-fleet config --defaults` prints one", context
        )
    return _run(file, overrides)


def _refuse_early(context: click.Context, verb: str) -> None:
    """Refuse options of a run before a command, which reads its own after its name.

    Raises:
        click.UsageError: There is one.
    """
    taken = {name for one in cli.commands[verb].params for name in one.opts}
    for parameter in cli.params:
        name = parameter.opts[0]
        if parameter.name not in context.params or not context.params[parameter.name]:
            continue
        if name in taken:
            raise click.UsageError(f"{name} belongs after the command: {verb} {name} …", context)
        raise click.UsageError(f"{verb} takes no {name}", context)


def _load(file: str, overrides: tuple[str, ...]) -> FleetConfig:
    from ingero.config.document import load_document

    with _explaining_imports():
        from ingero.fleet.builtin import FACTORIES
        from ingero.fleet.config import build_config

    return build_config(load_document(file, overrides), FACTORIES)


def _check_files(config: FleetConfig) -> None:
    with _explaining_imports():
        from ingero.fleet.builtin import FACTORIES
        from ingero.fleet.config import check_files

    check_files(config, FACTORIES)


def _run(file: str, overrides: tuple[str, ...]) -> int:
    import asyncio

    from ingero.config.environment import quiet_grpc

    quiet_grpc()
    with _explaining_imports():
        import uvloop

        from ingero.fleet.builtin import FACTORIES
        from ingero.fleet.service import FleetService

    async def serve() -> int:
        return await FleetService(lambda: _load(file, overrides), FACTORIES).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


@contextmanager
def _explaining_imports() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"this installation has no {missing.name}", hint="pip install 'ingero[fleet]'"
        ) from missing


@cli.command("validate")
@click.argument("file", required=False)
@click.option("--config", "option", metavar="FILE", help="The same as FILE.")
@click.option(
    "--skip-files",
    is_flag=True,
    help="Do not look at certificates, keys, mappings and folders, which may be on another machine.",
)
@_SET
def validate(
    file: str | None, option: str | None, overrides: tuple[str, ...], *, skip_files: bool
) -> None:
    r"""Check FILE, and the files that it names, without starting anything; every problem is listed with its line.

    \b
    Examples:
      ingero-fleet validate fleet-config.yaml
      ingero-fleet validate --config fleet-config.yaml --set service.extensions=[]
      ingero-fleet validate --skip-files fleet-config.yaml
    """
    if file and option:
        raise click.UsageError("--config is the same as FILE: give one of them")
    name = file or option
    if name is None:
        raise click.UsageError("give the FILE to check")
    config = _load(name, overrides)
    if not skip_files:
        _check_files(config)
    for warning in config.warnings:
        click.echo(f"{name}: warning: {warning}", err=True)
    count = len(config.pipelines)
    click.echo(f"{name}: valid, {count} pipeline{'s' if count != 1 else ''}")


@cli.command("components")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def components(*, as_json: bool) -> None:
    r"""List the receivers, processors, exporters and extensions that a configuration may name.

    \b
    Examples:
      ingero-fleet components
      ingero-fleet components --json
    """
    from ingero.fleet.builtin import FACTORIES
    from ingero.fleet.component import ComponentKind

    by_kind = {
        kind.value: [
            {
                "name": factory.type,
                "says": factory.description,
                "stability": factory.stability.value,
                "signals": [] if kind is ComponentKind.EXTENSION else sorted(factory.signals),
            }
            for factory in FACTORIES
            if factory.kind is kind
        ]
        for kind in ComponentKind
    }
    if as_json:
        click.echo(json.dumps({"version": __version__, **by_kind}))
        return
    width = max(len(factory.type) for factory in FACTORIES)
    for kind_name, found in by_kind.items():
        click.echo(f"{kind_name}:")
        for one in found:
            click.echo(f"  {one['name']:{width}}  {one['stability']:6} {one['says']}")


@cli.command("config")
@click.option(
    "--defaults", is_flag=True, required=True, help="Print every setting with its default."
)
def config(*, defaults: bool) -> None:
    r"""Print a configuration that runs, with every key there is and what it does.

    \b
    Examples:
      ingero-fleet config --defaults > fleet-config.yaml
    """
    assert defaults
    from ingero.fleet.builtin import FACTORIES
    from ingero.fleet.defaults import write_defaults

    click.echo(write_defaults(FACTORIES), nl=False)


@cli.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(*, as_json: bool) -> None:
    r"""Show the version.

    \b
    Examples:
      ingero-fleet version
    """
    click.echo(json.dumps({"version": __version__}) if as_json else f"ingero-fleet {__version__}")


cli.add_command(help_page.command)


def main() -> None:
    """Entry point of the ``ingero-fleet`` console script."""
    sys.exit(run_program(cli))
