"""MCP on standard input and output, over a database that no other process has open."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from mcp.server.stdio import stdio_server

from ingero import __version__
from ingero.config.model import parse_model
from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.sandbox.runner import Sandbox
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import SqlAnswer, TimeSpan
from ingero.echo.queries.prompts import PROMPTS
from ingero.echo.schema import TENANT_TABLES
from ingero.echo.service.app import INSTRUCTIONS, build_store
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.executor import ConcurrencySettings, QueryExecutor
from ingero.echo.service.tenant_sql import Statement, run_statement, sandbox_settings
from ingero.serving.bearer import Principal
from ingero.serving.mcp import McpFacts, build_mcp_server
from ingero.telemetry.clock import SystemClock


async def serve_stdio(
    db: str,
    clusters: frozenset[str] | None,
    db_key_file: str | None = None,
    httpfs_extension: str | None = None,
) -> None:
    """Serve until the input ends.

    Args:
        db: The database file.
        clusters: What the assistant may see; None is everything.
        db_key_file: The file's key, where it is encrypted.
        httpfs_extension: The extension that goes with the key.

    Raises:
        ConfigError: Key and file do not fit each other.
        StoreError: The file cannot be opened, or another process has it.
    """
    given = {"db": db, "db_key_file": db_key_file, "httpfs_extension": httpfs_extension}
    config = parse_model(EchoConfig, {**given, "insecure_no_tls": True})
    clock = SystemClock()
    principal = Principal("stdio", "stdio", clusters)
    store = build_store(config, clock)
    sandbox = Sandbox(sandbox_settings(config), TENANT_TABLES, clock)

    def run_sql(
        asker: Principal, sql: str, span: TimeSpan, limit: int, stop: Cancellation
    ) -> SqlAnswer:
        del asker
        return run_statement(store, sandbox, config, Statement(sql, span, limit), stop)

    with ExitStack() as stack:
        store.open()
        stack.callback(store.close)
        answers = QueryExecutor(store, clock, config.query_timeout, ConcurrencySettings(), run_sql)
        stack.callback(answers.close)
        stack.callback(sandbox.close)

        async def call(name: str, arguments: Mapping[str, Any]) -> bytes:
            return await answers.ask(principal, name, arguments)

        facts = McpFacts("ingero-echo", __version__, INSTRUCTIONS)
        server = build_mcp_server(facts, QUERIES, PROMPTS, call)
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
