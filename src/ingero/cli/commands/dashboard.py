"""``ingero dashboard``: a recording in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.cli.serving import LISTEN_OPTIONS, WAIT, add_options, find_database, serve


@click.command("dashboard")
@click.option(
    "--db",
    type=click.Path(path_type=Path),
    help="Recording to show.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
@click.option(
    "--addr",
    default="127.0.0.1:8080",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to listen; port 0 takes a free one.",
)
@WAIT
@add_options(LISTEN_OPTIONS)
def command(
    *, db: Path | None, addr: str, wait: bool, tls_cert: str, tls_key: str, no_tls: bool, hosts: tuple[str, ...],
) -> None:  # fmt: skip
    r"""Show a recording in the browser, live: incidents, timeline, code paths, memory, collectives.

    HTTPS by default, with a certificate for a day unless you give one. Beyond loopback a bearer token is needed, from
    INGERO_MCP_BEARER_TOKEN; the page asks for it. Nothing is written and nothing is loaded from elsewhere. Also serves MCP on /mcp.

    \b
    Examples:
      ingero dashboard --db run.db
      ingero dashboard --db run.db --addr 127.0.0.1:0 --no-tls
      INGERO_MCP_BEARER_TOKEN=… ingero dashboard --addr 0.0.0.0:8443 --host gpu-7.example --tls-cert c.pem --tls-key k.pem
    """
    path = find_database(db, is_waiting=wait)
    serve(path, addr, "", tls=(tls_cert, tls_key, not no_tls), hosts=hosts)
