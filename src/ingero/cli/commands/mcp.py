"""``ingero mcp``: the recording, for an AI assistant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ingero.cli.options import database, group, option, with_config
from ingero.cli.serving import ListenConfig, NodesConfig, find_database, serve, wait_switch
from ingero.errors import UnsupportedError

if TYPE_CHECKING:
    from ingero.recording.queries.recording_file import ExternalAccess

_NODE_TIMEOUT: Final = "30s"  # what a node's own statement may take


@dataclass(frozen=True, slots=True, kw_only=True)
class McpConfig:
    """The options of ``ingero mcp``."""

    db: Path | None = database()
    addr: str = option(
        "Serve streamable HTTP on /mcp instead of standard input and output.",
        "--http",
        default="",
        metavar="HOST:PORT",
    )
    wait: bool = wait_switch()
    listen: ListenConfig = group()
    among: NodesConfig = group(
        *("nodes", "ca_cert", "client_cert", "client_key"),
        nodes={"help": "Nodes that the tool query_fleet may ask; --no-tls counts for them, too."},
    )
    pagerduty_url: str = option(
        "Where pagerduty_trigger sends, such as that of the EU region; needs INGERO_PAGERDUTY_KEY.",
        default="",
        metavar="URL",
    )


@click.command("mcp")
@with_config(McpConfig)
def command(config: McpConfig) -> None:
    r"""Serve a recording to an AI assistant over MCP, on standard input and output or over HTTPS.

    Tools: investigate, get_check, get_trace_stats, get_causal_chains, get_stacks, run_sql, graph_lifecycle,
    graph_frequency, run_demo, get_test_report, query_fleet, pagerduty_trigger. Answers are short first and come in
    pages; the prompt "investigate" is a recipe to begin with. Every tool only reads, but pagerduty_trigger, which
    pages people and does nothing unless INGERO_PAGERDUTY_KEY is set (over HTTP, a bearer as well).

    \b
    Examples:
      ingero mcp --db run.db
      claude mcp add ingero -- ingero mcp --db run.db
      ingero mcp --db run.db --nodes gpu-1:8443,gpu-2:8443 --ca-cert ca.pem
      INGERO_MCP_BEARER_TOKEN=… ingero mcp --db run.db --http 0.0.0.0:8443 --host gpu-7.example
    """
    path = find_database(config.db, is_waiting=config.wait)
    among = replace(config.among, no_tls=config.listen.no_tls)
    outside = _build_outside(among, config.pagerduty_url, is_http=bool(config.addr))
    if config.addr:
        serve(path, config.addr, "/mcp", config.listen, outside)
        return
    try:
        import anyio

        from ingero.recording.queries.stdio import serve_stdio
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"the MCP server needs the package {error.name}", hint="pip install 'ingero[agent]'"
        ) from error

    anyio.run(serve_stdio, path, outside)


def _build_outside(among: NodesConfig, pagerduty_url: str, *, is_http: bool) -> ExternalAccess:
    """What the tools may reach; who can reach an open server must not be able to page people."""
    from ingero.agent.events.alert.pagerduty import PagerDutyPager
    from ingero.config.environment import read_bearer, read_pagerduty_key
    from ingero.recording.queries.recording_file import ExternalAccess

    key = read_pagerduty_key()
    may_page = bool(key) and (not is_http or bool(read_bearer()))
    return ExternalAccess(
        (lambda path, body: among.ask(path, body, _NODE_TIMEOUT)[0]) if among.nodes else None,
        PagerDutyPager(key, pagerduty_url) if may_page else None,
    )
