"""``ingero dashboard``: a recording in the browser."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from ingero.cli.options import database, group, option, with_config
from ingero.cli.serving import ListenConfig, find_database, serve, wait_switch


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardConfig:
    """The options of ``ingero dashboard``."""

    db: Path | None = database("Recording to show.")
    addr: str = option(
        "Where to listen; port 0 takes a free one.", default="127.0.0.1:8080", metavar="HOST:PORT"
    )
    wait: bool = wait_switch()
    listen: ListenConfig = group()


@click.command("dashboard")
@with_config(DashboardConfig)
def command(config: DashboardConfig) -> None:
    r"""Show a recording in the browser, live: incidents, timeline, code paths, memory, collectives.

    HTTPS by default, with a certificate for a day unless you give one. Beyond loopback a bearer token is needed, from
    INGERO_MCP_BEARER_TOKEN; the page asks for it. Nothing is written and nothing is loaded from elsewhere. Also
    serves MCP on /mcp.

    \b
    Examples:
      ingero dashboard --db run.db
      ingero dashboard --db run.db --addr 127.0.0.1:0 --no-tls
      INGERO_MCP_BEARER_TOKEN=… ingero dashboard --addr 0.0.0.0:8443 --host gpu-7 --tls-cert c.pem --tls-key k.pem
    """
    path = find_database(config.db, is_waiting=config.wait)
    serve(path, config.addr, "", config.listen)
