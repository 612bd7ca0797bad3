"""MCP on standard input and output, over one recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from ingero import __version__
from ingero.recording.queries.catalog import INSTRUCTIONS, PROMPTS, QUERIES
from ingero.recording.queries.recording_file import ExternalAccess, RecordingFile
from ingero.serving import mcp
from ingero.serving.mcp import Call, McpFacts, build_mcp_server
from ingero.serving.query import get_query


def build_call(path: Path, outside: ExternalAccess | None = None) -> Call:
    """What answers a tool's call: the question runs on a thread, one at a time."""
    context = RecordingFile(path, outside)
    one_at_a_time = anyio.CapacityLimiter(1)

    async def call(name: str, arguments: Mapping[str, Any]) -> bytes:
        query = get_query(QUERIES, name)
        return await anyio.to_thread.run_sync(query.ask, context, arguments, limiter=one_at_a_time)

    return call


async def serve_stdio(path: Path, outside: ExternalAccess | None = None) -> None:
    """Serve until the input ends."""
    facts = McpFacts("ingero", __version__, INSTRUCTIONS)
    await mcp.serve_stdio(build_mcp_server(facts, QUERIES, PROMPTS, build_call(path, outside)))
