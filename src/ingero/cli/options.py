"""Values that several commands take alike."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from ingero.units import parse_duration


def read_duration(_context: click.Context, parameter: click.Parameter, value: str) -> int:
    """Option callback: ``5s`` as nanoseconds."""
    try:
        return parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


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
    """Refuse to overwrite a file that nobody said may go.

    Raises:
        click.UsageError: It exists.
    """
    if output.exists() and not is_replaced:
        raise click.UsageError(f"{output} exists already; --force replaces it")
