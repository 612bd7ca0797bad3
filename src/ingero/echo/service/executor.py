"""Runs questions on threads with a reader each, and says what an error is to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.errors import DeadlineError, MemoryLimitError
from ingero.echo.db.sandbox.runner import SqlRefusedError
from ingero.echo.db.store import Store
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import ClusterRefusedError, QueryContext, SqlAnswer, TimeSpan
from ingero.echo.service.fair_queue import FairQueue, FairQueueSettings, QueueFullError, tenant_of
from ingero.errors import BadDataError, IngeroError, RetryableError, StoreError
from ingero.serving.bearer import Principal
from ingero.serving.query import Query, get_query
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

ResultT = TypeVar("ResultT")
SqlRunner = Callable[[Principal, str, TimeSpan, int, Cancellation], SqlAnswer]


class ClientGoneError(Exception):
    """Whoever asked has gone; there is nobody to tell."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as a client sees it.

    Attributes:
        status: HTTP status.
        code: For machines.
        message: For people; never another tenant's data.
        retry_after_s: 0 for never.
    """

    status: int
    code: str
    message: str
    retry_after_s: int = 0


@dataclass(frozen=True, slots=True)
class ConcurrencySettings:
    """How many questions are answered at once, and how long one waits for that.

    Attributes:
        readers: Tools; half of them for one tenant at most.
        sql: Tenants' statements; a quarter of them for one tenant at most, so that three with slow ones leave room.
        wait_ns: Longest wait for a place.
        max_waiting: Questions of one tenant that may wait.
    """

    readers: int = 4
    sql: int = 4
    wait_ns: int = 10 * NS_PER_S
    max_waiting: int = 16

    def tool_turns(self) -> FairQueueSettings:
        """Of tools, and of streams."""
        return self._turns(self.readers, 2)

    def sql_turns(self) -> FairQueueSettings:
        """Of statements."""
        return self._turns(self.sql, 4)

    def _turns(self, n_places: int, shares: int) -> FairQueueSettings:
        per_tenant = max(1, n_places // shares)
        return FairQueueSettings(n_places, per_tenant, self.max_waiting, self.wait_ns)


UNKNOWN_TOOL: Final = ErrorReply(404, "tool_not_found", "no such tool")


_FAULTS: Final[tuple[tuple[type[IngeroError], ErrorReply], ...]] = (
    (ClusterRefusedError, ErrorReply(403, "tenant_scoped_bearer_refused", "")),
    (BadDataError, ErrorReply(400, "invalid_arguments", "")),
    (
        DeadlineError,
        ErrorReply(504, "query_timeout", "it did not finish in time; narrow its window"),
    ),
    (QueueFullError, ErrorReply(429, "queue_full", "", 1)),
    (RetryableError, ErrorReply(503, "busy", "", 1)),
    (
        MemoryLimitError,
        ErrorReply(503, "query_memory", "it needs more memory than there is; narrow its window", 5),
    ),
    (StoreError, ErrorReply(503, "store_unavailable", "the store cannot answer now", 5)),
)
"""First match wins; an empty message is filled with the error's own."""


def build_error_reply(error: IngeroError) -> ErrorReply:
    """What a client is told of an error."""
    if isinstance(error, SqlRefusedError):
        return ErrorReply(400, error.code, error.message)
    for kind, fault in _FAULTS:
        if isinstance(error, kind):
            return fault if fault.message else replace(fault, message=error.message)
    return ErrorReply(500, "internal", "the answer could not be built; the log has the reason")


class QueryExecutor:
    """Asks `QUERIES` of a store.

    Args:
        store: Where the rows are.
        clock: The time of a question.
        timeout_ns: Longest question.
        places: Questions at once.
        run_sql: Runs a tenant's statement.
    """

    def __init__(
        self,
        store: Store,
        clock: Clock,
        timeout_ns: int,
        places: ConcurrencySettings,
        run_sql: SqlRunner,
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeout_ns = timeout_ns
        self._run_sql = run_sql
        self._pool = ThreadPoolExecutor(places.readers, thread_name_prefix="echo-reader")
        self._sql_pool = ThreadPoolExecutor(places.sql, thread_name_prefix="echo-sql")
        self._tool_turns = FairQueue(places.tool_turns(), "questions")
        self._sql_turns = FairQueue(places.sql_turns(), "SQL")
        self.turns = {"tools": self._tool_turns, "sql": self._sql_turns}

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
            name: The question.
            arguments: JSON, or what it decodes to.
            gone: Set when the asker goes away: what runs for it ends, what waits for a place gives it up.

        Raises:
            KeyError: No such question.
            GoneError: The asker went away.
            IngeroError: See `build_error_reply`.
        """
        query = get_query(QUERIES, name)
        is_sql = query.name == RUN_ANALYSIS.name
        turns, pool = (
            (self._sql_turns, self._sql_pool) if is_sql else (self._tool_turns, self._pool)
        )
        stop = Cancellation()

        async def answer() -> bytes:
            async with turns.take(tenant_of(principal)):
                running = asyncio.get_running_loop().run_in_executor(
                    pool, self.ask_now, principal, query, arguments, stop
                )
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    stop.set()
                    # The place is free when the thread is; what it has to say, nobody hears.
                    await asyncio.gather(running, return_exceptions=True)
                    raise

        return await unless_gone(answer(), gone)

    def ask_now(
        self,
        principal: Principal,
        query: Query[QueryContext, Any, Any],
        arguments: bytes | Mapping[str, Any],
        stop: Cancellation,
    ) -> bytes:
        """The same on this thread."""

        def run_sql(sql: str, span: TimeSpan, limit: int) -> SqlAnswer:
            return self._run_sql(principal, sql, span, limit, stop)

        with self._store.open_reader(self._timeout_ns) as reader, stop.calls(reader.stop):
            ask = QueryContext(reader, principal.clusters, self._clock.wall_ns(), run_sql)
            return query.ask(ask, arguments)

    def close(self) -> None:
        """End the threads after what they run now."""
        self._pool.shutdown()
        self._sql_pool.shutdown()


async def unless_gone(work: Coroutine[Any, Any, ResultT], gone: asyncio.Event | None) -> ResultT:
    """The result of ``work``, which is cancelled when ``gone`` is set.

    Raises:
        GoneError: It was.
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
