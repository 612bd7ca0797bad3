"""`QueryExecutor`: runs queries on threads, each with a reader of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.store import Store
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import QueryContext, SqlAnswer, TimeSpan
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.fair_queue import FairQueue, tenant_of
from ingero.serving.bearer import Principal
from ingero.serving.query import Query, get_query
from ingero.serving.threads import run_on_thread
from ingero.telemetry.clock import Clock

ResultT = TypeVar("ResultT")
TenantSqlRunner = Callable[[str, TimeSpan, int, Cancellation], SqlAnswer]


class ClientGoneError(Exception):
    """The client has gone; the answer has no reader."""


class QueryExecutor:
    """Asks `QUERIES` of a store.

    Args:
        store: Where the rows are.
        clock: The time of a query.
        config: How many queries at once. One tenant has half of the places for tools at most, and a quarter of those
            for statements, so that three with slow ones leave room.
        timeout_ns: Longest query.
        run_sql: Runs a tenant's statement.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: EchoConfig,
        timeout_ns: int,
        run_sql: TenantSqlRunner,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeout_ns = timeout_ns
        self._run_sql = run_sql
        n_tools, n_sql, wait_ns = config.readers, config.sql_workers, config.queue_timeout
        self._pools = {
            "tools": ThreadPoolExecutor(n_tools, thread_name_prefix="echo-reader"),
            "sql": ThreadPoolExecutor(n_sql, thread_name_prefix="echo-sql"),
        }
        self.queues = {
            "tools": FairQueue("questions", n_tools, max(1, n_tools // 2), wait_ns),
            "sql": FairQueue("SQL", n_sql, max(1, n_sql // 4), wait_ns),
        }

    async def ask(
        self,
        principal: Principal,
        name: str,
        arguments: bytes | Mapping[str, Any],
        gone: asyncio.Event | None = None,
    ) -> bytes:
        """Answer by name, encoded.

        Args:
            principal: Who asks.
            name: The query.
            arguments: JSON, or what it decodes to.
            gone: Set when the client goes away: what runs for it ends, what waits for a place gives it up.

        Raises:
            KeyError: No such query.
            ClientGoneError: The client went away.
            IngeroError: See `build_error_reply`.
        """
        query = get_query(QUERIES, name)
        kind = "sql" if query.name == RUN_ANALYSIS.name else "tools"
        cancellation = Cancellation()

        async def answer() -> bytes:
            async with self.queues[kind].take(tenant_of(principal)):
                return await run_on_thread(
                    self._pools[kind],
                    lambda: self.ask_now(principal, query, arguments, cancellation),
                    cancellation.set,
                )

        return await unless_gone(answer(), gone)

    def ask_now(
        self,
        principal: Principal,
        query: Query[QueryContext, Any, Any],
        arguments: bytes | Mapping[str, Any],
        cancellation: Cancellation,
    ) -> bytes:
        """The same on this thread."""

        def run_sql(sql: str, span: TimeSpan, limit: int) -> SqlAnswer:
            return self._run_sql(sql, span, limit, cancellation)

        with (
            self._store.open_reader(self._timeout_ns) as reader,
            cancellation.calls(reader.stop),
        ):
            context = QueryContext(reader, principal.clusters, self._clock.wall_ns(), run_sql)
            return query.ask(context, arguments)

    def close(self) -> None:
        """End the threads after what they run now."""
        for pool in self._pools.values():
            pool.shutdown()


async def unless_gone(work: Coroutine[Any, Any, ResultT], gone: asyncio.Event | None) -> ResultT:
    """The result of ``work``, which is cancelled when ``gone`` is set.

    Raises:
        ClientGoneError: It was.
    """
    if gone is None:
        return await work
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone.wait())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        del working  # as in `run_on_thread`
