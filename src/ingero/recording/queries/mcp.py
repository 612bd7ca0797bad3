"""A recording's questions over MCP. Importing this imports the SDK: see `ingero.serving.mcp_http`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from mcp.server.lowlevel.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from ingero import __version__
from ingero.recording.queries.catalog import INSTRUCTIONS, PROMPTS, QUERIES
from ingero.recording.queries.recording_file import ExternalAccess, RecordingFile
from ingero.recording.store.sql import SqlStop
from ingero.serving.mcp import Call, McpFacts, build_mcp_server
from ingero.serving.query import get_query
from ingero.serving.threads import run_on_thread


def build_recording_mcp(path: Path, outside: ExternalAccess | None = None) -> Server[Any]:
    """The MCP server with a recording's questions and prompts.

    Args:
        path: The recording.
        outside: What tools may reach beyond it; None for nothing.
    """
    facts = McpFacts("ingero", __version__, INSTRUCTIONS)
    return build_mcp_server(facts, QUERIES, PROMPTS, build_call(path, outside))


def build_recording_manager(
    path: Path, outside: ExternalAccess | None = None
) -> StreamableHTTPSessionManager:
    """The same over HTTP, without sessions; the app in front of it guards host and bearer."""
    server = build_recording_mcp(path, outside)
    return StreamableHTTPSessionManager(server, json_response=True, stateless=True)


def build_call(path: Path, outside: ExternalAccess | None = None) -> Call:
    """What answers a tool's call: a question runs on a thread, one at a time; its SQL ends when it is cancelled."""
    context = RecordingFile(path, outside)
    one_at_a_time = anyio.CapacityLimiter(1)

    async def call(name: str, arguments: Mapping[str, Any]) -> bytes:
        query, stop = get_query(QUERIES, name), SqlStop()

        def work() -> bytes:
            context.stop = stop
            return query.ask(context, arguments)

        async with one_at_a_time:
            return await run_on_thread(None, work, stop.set)

    return call
