"""MCP on standard input and output, over one recording."""

from __future__ import annotations

from pathlib import Path

from ingero.recording.queries.mcp import build_recording_mcp
from ingero.recording.queries.recording_file import ExternalAccess
from ingero.serving import mcp


async def serve_stdio(path: Path, outside: ExternalAccess | None = None) -> None:
    """Serve until the input ends."""
    await mcp.serve_stdio(build_recording_mcp(path, outside))
