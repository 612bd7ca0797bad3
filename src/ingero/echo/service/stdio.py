"""MCP on standard input and output, over a database file that is only read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ingero.config.model import parse_model
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.executor import QueryExecutor
from ingero.echo.service.mcp import build_echo_mcp
from ingero.echo.service.settings import build_store
from ingero.echo.service.tenant_sql import TenantSql
from ingero.serving import mcp
from ingero.serving.bearer import Principal
from ingero.telemetry.clock import SystemClock


async def serve_stdio(
    db: str,
    clusters: frozenset[str] | None,
    db_key_file: str | None = None,
    httpfs_extension: str | None = None,
) -> None:
    """Serve until the input ends. The file stays as it is: what retention it has is its server's business.

    Args:
        db: The database file.
        clusters: What the assistant may see; None is everything.
        db_key_file: The file's key, where it is encrypted.
        httpfs_extension: The extension that goes with the key.

    Raises:
        ConfigError: Key and file do not fit each other.
        StoreError: The file cannot be opened, is of another release, or another process writes it.
    """
    given = {"db": db, "db_key_file": db_key_file, "httpfs_extension": httpfs_extension}
    config = parse_model(EchoConfig, {**given, "insecure_no_tls": True})
    clock = SystemClock()
    principal = Principal("stdio", "stdio", clusters)
    store = build_store(config, clock, is_read_only=True)
    sql = TenantSql(store, config, clock)
    with ExitStack() as stack:
        store.open()
        stack.callback(store.close)
        executor = QueryExecutor(store, clock, config, config.query_timeout, sql.run)
        stack.callback(executor.close)
        stack.callback(sql.sandbox.close)

        async def call(name: str, arguments: Mapping[str, Any]) -> bytes:
            return await executor.ask(principal, name, arguments)

        await mcp.serve_stdio(build_echo_mcp(call))
