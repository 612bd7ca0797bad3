"""Echo's questions over MCP. Importing this imports the SDK: see `ingero.serving.mcp_http`."""

from __future__ import annotations

from typing import Any, Final

from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings

from ingero import __version__
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.prompts import PROMPTS
from ingero.serving.mcp import Call, McpFacts, build_mcp_server

_INSTRUCTIONS: Final = (
    "The memory of GPU clusters: which node is slow, whom it makes wait, what that costs. Begin with "
    "fleet.cluster.summary, or ask for the investigate prompt. Each answer says its window and coverage: no rows "
    "without coverage means unknown. The cause of a slow node is on the node: ask its own `ingero mcp`."
)


def build_echo_mcp(call: Call) -> Server[Any]:
    """The MCP server with Echo's queries and prompts, answered through ``call``."""
    facts = McpFacts("ingero-echo", __version__, _INSTRUCTIONS)
    return build_mcp_server(facts, QUERIES, PROMPTS, call)


def build_echo_manager(call: Call, max_body: int) -> StreamableHTTPSessionManager:
    """The same over HTTP, without sessions; the app in front of it guards host and bearer.

    Args:
        call: Answers a question.
        max_body: Longest body in bytes.
    """
    return StreamableHTTPSessionManager(
        build_echo_mcp(call),
        json_response=True,
        stateless=True,
        security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        max_request_body_size=max_body,
    )
