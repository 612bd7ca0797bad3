"""``ingero mcp``: the recording, for an AI assistant."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.cli.serving import LISTEN_OPTIONS, add_options, serve
from ingero.errors import UnsupportedError


@click.command("mcp")
@click.option(
    "--db",
    type=click.Path(path_type=Path),
    help="Recording to read.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
@click.option(
    "--http",
    "addr",
    default="",
    metavar="HOST:PORT",
    help="Serve streamable HTTP on /mcp instead of standard input and output.",
)
@add_options(LISTEN_OPTIONS)
def command(
    *, db: Path | None, addr: str, tls_cert: str, tls_key: str, no_tls: bool, hosts: tuple[str, ...]
) -> None:
    r"""Serve a recording to an AI assistant over MCP, on standard input and output or over HTTPS.

    Every tool only reads; answers are short first and come in pages. The prompt "investigate" is a recipe to begin with.

    \b
    Examples:
      ingero mcp --db run.db
      claude mcp add ingero -- ingero mcp --db run.db
      INGERO_MCP_BEARER_TOKEN=… ingero mcp --db run.db --http 0.0.0.0:8443 --host gpu-7.example
    """
    if addr:
        serve(db, addr, "/mcp", tls=(tls_cert, tls_key, not no_tls), hosts=hosts)
        return
    try:
        import anyio

        from ingero.agent.queries.stdio import serve_stdio
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the MCP server needs the package {error.name}", hint="pip install 'ingero[agent]'"
        ) from error
    from ingero.config.database import default_database

    anyio.run(serve_stdio, db or default_database())
