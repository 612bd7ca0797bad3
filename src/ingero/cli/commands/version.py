"""``ingero version``: what is installed, for a person or a bug report."""

from __future__ import annotations

import json
import platform

import click

from ingero import __version__


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, as_json: bool) -> None:
    r"""Show the version of ingero, Python and the kernel.

    \b
    Examples:
      ingero version
      ingero version --json
    """
    facts = {
        "version": __version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(
        f"ingero {facts['version']} (Python {facts['python']}, {facts['kernel']}, {facts['machine']})"
    )
