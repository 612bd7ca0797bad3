"""MCP on standard input and output, over one recording."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from ingero import __version__
from ingero.recording.queries.catalog import INSTRUCTIONS, PROMPTS, QUERIES
from ingero.recording.queries.recording_file import ExternalAccess, RecordingFile
from ingero.recording.store.sql import SqlStop
from ingero.serving import mcp
from ingero.serving.mcp import Call, McpFacts, build_mcp_server
from ingero.serving.query import get_query
from ingero.serving.threads import run_on_thread


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


async def serve_stdio(path: Path, outside: ExternalAccess | None = None) -> None:
    """Serve until the input ends."""
    facts = McpFacts("ingero", __version__, INSTRUCTIONS)
    await mcp.serve_stdio(build_mcp_server(facts, QUERIES, PROMPTS, build_call(path, outside)))
