"""``ingero config``: the settings file of ``trace`` and ``fleet-push``."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from ingero.cli.settings_file import (
    WHERE,
    Setting,
    SettingsFile,
    find_settings,
    load_settings,
)
from ingero.errors import ConfigError, ConfigProblem

_FLAG: Final = re.compile(r"--[a-z]+(?:-[a-z]+)*")


@click.group("config", invoke_without_command=True)
@click.option(
    "--defaults", is_flag=True, help="Print every key with its default, as YAML of comments."
)
@click.pass_context
def command(context: click.Context, *, defaults: bool) -> None:
    r"""Show where the settings of `trace` and `fleet-push` come from; print or check a settings file.

    The file is the one that --config of these commands names, else $INGERO_CONFIG, else the first of ./ingero.yaml,
    /etc/ingero/ingero.yaml and ~/.config/ingero/ingero.yaml. A flag wins over the environment,
    and that over the file.

    \b
    Examples:
      ingero config
      ingero config --defaults > ingero.yaml
      ingero config validate ingero.yaml
    """
    if context.invoked_subcommand is not None:
        if defaults:
            raise click.UsageError(f"{context.invoked_subcommand} takes no --defaults", context)
        return
    if defaults:
        click.echo("\n".join(write_template(context.find_root().command)))
        return
    from ingero.config.agent_file import find_settings_file

    file = find_settings_file()
    click.echo(f"no settings file; looked for {WHERE}" if file is None else f"reads {file}")


@command.command("validate")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--skip-files",
    is_flag=True,
    help="Do not look at certificates and keys, which may be on another machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def validate(context: click.Context, file: Path | None, *, skip_files: bool, as_json: bool) -> None:
    r"""Check FILE without starting anything; every problem is listed with its line.

    Without FILE it is the one that the commands would read. Status 2 if anything is wrong.

    \b
    Examples:
      ingero config validate ingero.yaml
      ingero config validate --json
      ingero config validate --skip-files ingero.yaml
    """
    from ingero.config.agent_file import find_settings_file

    chosen = file or find_settings_file()
    if chosen is None:
        raise click.UsageError(f"give the FILE to check; without it the file is {WHERE}")
    program = context.find_root().command
    found = load_settings(chosen, program)
    _check_trace(found)
    _check_push(context, found, skip_files=skip_files)
    if as_json:
        click.echo(
            json.dumps({
                "file": str(chosen),
                "keys": sorted(found.values),
                "ignored": found.ignored,
            })
        )
        return
    for warning in found.iter_warnings():
        click.echo(f"warning: {warning}", err=True)
    count = len(found.values)
    click.echo(f"{chosen}: valid, {count} setting{'s' if count != 1 else ''}")


def _check_trace(found: SettingsFile) -> None:
    """Check what excludes each other in `trace`.

    Raises:
        ConfigError: Lists every problem by its key and line.
    """
    from ingero.units import parse_size

    given = [key for key in ("trace.pid", "trace.user", "trace.cgroup") if found.values.get(key)]
    pairs = [(key, given[0]) for key in given[1:]]
    rollover = found.values.get("trace.db_rollover_size", "").strip()
    if "trace.max_db" in found.values and rollover and parse_size(rollover):
        pairs.append(("trace.db_rollover_size", "trace.max_db"))
    if pairs:
        raise ConfigError(
            [
                ConfigProblem(key, f"excludes {other}", found.lines.get(key), "give one of them")
                for key, other in pairs
            ],
            source=found.file,
        )


def _check_push(context: click.Context, found: SettingsFile, *, skip_files: bool) -> None:
    """Check what fits together only in `fleet-push`, where the file has a Fleet.

    Raises:
        ConfigError: Lists every problem by its key and line.
    """
    from ingero.agent.health.signals.node_facts import GpuFacts
    from ingero.cli.commands.fleet_push import FleetPushConfig
    from ingero.cli.commands.fleet_push import command as fleet_push
    from ingero.cli.options import take_config
    from ingero.cli.push_settings import build_settings

    flags = ["--config", found.file]
    if "fleet.cluster_id" not in found.values:
        flags += ["--fleet-cluster-id", "given-by-a-flag"]
    if skip_files:
        flags += ["--fleet-tls-ca", "", "--fleet-tls-cert", "", "--fleet-tls-key", ""]
    if "fleet.endpoint" not in found.values:
        return
    with fleet_push.make_context("fleet-push", flags, parent=context) as inner:
        push = take_config(FleetPushConfig, dict(inner.params))
    try:
        build_settings(push.push, push.remediate, GpuFacts(), push.spans)
    except ConfigError as error:
        problems = [_say_keys(problem, found) for problem in error.problems]
        raise ConfigError(problems, source=found.file) from error


def _say_keys(problem: ConfigProblem, found: SettingsFile) -> ConfigProblem:
    """A problem with options in the words of the file: the key and its line, and keys in the message."""
    keys: dict[str, str] = {}
    for key, setting in found.settings.items():
        for flag in setting.flags:
            if flag not in keys or (key in found.values and keys[flag] not in found.values):
                keys[flag] = key  # of two keys of one option the one that counts
    path, message = problem.path, problem.message
    flag, _, rest = message.partition(" ")
    if not path and flag in keys:
        path, message = flag, rest
    key = keys.get(path, path)
    message = _FLAG.sub(lambda one: keys.get(one[0], one[0]), message)
    return replace(problem, path=key, message=message, line=found.lines.get(key))


def write_template(program: click.Command) -> Iterator[str]:
    """The lines of a settings file with every key and its default in a comment."""
    yield "# Settings of `ingero trace` and `ingero fleet-push`; remove the # before what you change."
    yield "# `ingero config validate FILE` checks them. A flag wins over the variable, and that over this file."
    section = ""
    for key, setting in sorted(
        find_settings(program).items(), key=lambda one: one[0].split(".")[0]
    ):
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            yield ""
            yield f"{section}:"
        for line in textwrap.wrap(describe(setting), 110):
            yield f"  # {line}"
        yield f"  # {key.split('.')[1]}: {_write_default(setting)}".rstrip()


def describe(setting: Setting) -> str:
    """What a key does, and the variable that wins over it."""
    option = setting.uses[0][1]
    return f"{' '.join((option.help or '').split())}  ({', '.join(setting.variables)})"


def _write_default(setting: Setting) -> str:
    """The default where all commands agree, as YAML; else empty."""
    from ingero.config.describe import write_value

    found = {str(option.default): option.default for _, option in setting.uses}
    default = next(iter(found.values()))
    if len(found) != 1 or default is None or not isinstance(default, str | int | float | Path):
        return ""
    return write_value(str(default) if isinstance(default, Path) else default)
