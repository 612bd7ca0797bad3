"""``ingero mcp``: the recording, for an AI assistant."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.errors import UnsupportedError


@click.command("mcp")
@click.option(
    "--db",
    type=click.Path(path_type=Path),
    help="Recording to read.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
def command(*, db: Path | None) -> None:
    r"""Serve a recording to an AI assistant over MCP, on standard input and output.

    Every tool only reads; answers are short first and come in pages. The prompt "investigate" is a recipe to begin with.

    \b
    Examples:
      ingero mcp --db run.db
      claude mcp add ingero -- ingero mcp --db run.db
    """
    try:
        import anyio

        from ingero.agent.queries.stdio import serve_stdio
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the MCP server needs the package {error.name}", hint="pip install 'ingero[agent]'"
        ) from error
    from ingero.config.database import default_database

    anyio.run(serve_stdio, db or default_database())
