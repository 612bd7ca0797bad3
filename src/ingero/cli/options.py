"""Values that several commands take alike."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click
from typing_extensions import override

from ingero.units import parse_duration


class CheckedCommand(click.Command):
    """A command that tells every wrong value at once, not the first."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.BadParameter as first:
            problems = self._find_problems(ctx, given)
            if len(problems) < 2:
                raise
            raise click.UsageError("\n".join(problems), ctx) from first

    def _find_problems(self, ctx: click.Context, args: list[str]) -> list[str]:
        values, rest, _ = self.make_parser(ctx).parse_args(args)
        problems = []
        for parameter in self.params:
            try:
                parameter.handle_parse_result(ctx, values, rest)
            except click.BadParameter as error:
                problems.append(error.format_message())
        return problems


def _take_probe_mode(
    _context: click.Context, _parameter: click.Parameter, value: str | None
) -> None:
    """Option callback: what the environment says holds unless the option is given."""
    from ingero.config.probing import ProbeMode, set_probe_mode

    if value is not None:
        set_probe_mode(ProbeMode(value))


PROBE_MODES: Final = ("session", "pair", "event", "auto")
"""Those of `ingero.config.probing.ProbeMode`, which is not imported to show help."""
PROBE_MODE_OPTION: Final = click.option(
    "--probe-mode",
    type=click.Choice(PROBE_MODES),
    callback=_take_probe_mode,
    expose_value=False,
    is_eager=True,
    help="How to probe library calls: by session links (Linux 6.13), pairs of multi-uprobe links (6.6), or a perf event for each"
    " (5.15).  [default: $INGERO_PROBE_MODE or auto: the cheapest that the kernel has]",
)
"""For every command that probes."""


def read_duration(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``5s`` as nanoseconds."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


def read_pids(
    _context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> tuple[int, ...]:
    """Option callback: repeated or comma-separated process ids."""
    texts = [text.strip() for value in values for text in value.split(",") if text.strip()]
    for text in texts:
        if not text.isdecimal():
            raise click.BadParameter(f"{text!r} is not a process id", param=parameter)
    return tuple(int(text) for text in texts)


def read_optional_duration(
    context: click.Context, parameter: click.Parameter, value: str | None
) -> int | None:
    """Option callback: the same, or None when it was not given."""
    return None if value is None else read_duration(context, parameter, value)


def read_headers(
    _context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Option callback: ``NAME=VALUE``, repeated, as a mapping."""
    headers = {}
    for value in values:
        name, separator, content = value.partition("=")
        if not separator or not name.strip():
            raise click.BadParameter(f"{value!r} is not NAME=VALUE", param=parameter)
        headers[name.strip()] = content
    return headers


HEADERS: Final = click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    callback=read_headers,
    help="A header to send along, such as Authorization='Bearer …'; may be repeated.",
)


FORCE: Final = click.option("--force", is_flag=True, help="Replace the output file if it exists.")


def check_output(output: Path, *, is_replaced: bool) -> None:
    """Refuse to overwrite a file that nobody said may go, and what is no file: a device would be replaced by one.

    Raises:
        click.UsageError: It exists, or is a device, a pipe or a folder.
    """
    if output.exists() and not output.is_file():
        raise click.UsageError(f"{output} is not a regular file, so it is not replaced")
    if output.exists() and not is_replaced:
        raise click.UsageError(f"{output} exists already; --force replaces it")
