"""Runs questions on threads with a reader each, and says what an error is to a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from ingero.echo.db.faults import DeadlineError
from ingero.echo.db.sandbox.pool import SqlRefusedError
from ingero.echo.db.store import Store
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.ask import Ask, ClusterRefusedError, Span, SqlAnswer
from ingero.echo.queries.catalog import QUERIES
from ingero.errors import BadDataError, IngeroError, RetryableError, StoreError
from ingero.serving.bearer import Principal
from ingero.serving.query import Query, get_query
from ingero.telemetry.clock import Clock

SqlRunner = Callable[[Principal, str, Span, int], SqlAnswer]


@dataclass(frozen=True, slots=True)
class Fault:
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
class Places:
    """How many questions are answered at once.

    Attributes:
        readers: Tools.
        sql: Tenants' statements; one bearer never has all of them when there are two or more.
    """

    readers: int = 4
    sql: int = 2


UNKNOWN_TOOL: Final = Fault(404, "tool_not_found", "no such tool")


_FAULTS: Final[tuple[tuple[type[IngeroError], Fault], ...]] = (
    (ClusterRefusedError, Fault(403, "tenant_scoped_bearer_refused", "")),
    (BadDataError, Fault(400, "invalid_arguments", "")),
    (DeadlineError, Fault(504, "query_timeout", "it did not finish in time; narrow its window")),
    (RetryableError, Fault(503, "busy", "", 1)),
    (StoreError, Fault(503, "store_unavailable", "the store cannot answer now", 5)),
)
"""First match wins; an empty message is filled with the error's own."""


def describe_error(error: IngeroError) -> Fault:
    """What a client is told of an error."""
    if isinstance(error, SqlRefusedError):
        return Fault(400, error.code, error.message)
    for kind, fault in _FAULTS:
        if isinstance(error, kind):
            return fault if fault.message else replace(fault, message=error.message)
    return Fault(500, "internal", "the answer could not be built; the log has the reason")


class Answers:
    """Asks `QUERIES` of a store.

    Args:
        store: Where the rows are.
        clock: The time of a question.
        timeout_ns: Longest question.
        places: Questions at once.
        run_sql: Runs a tenant's statement.
    """

    def __init__(
        self, store: Store, clock: Clock, timeout_ns: int, places: Places, run_sql: SqlRunner
    ) -> None:
        self._store = store
        self._clock = clock
        self._timeout_ns = timeout_ns
        self._run_sql = run_sql
        self._pool = ThreadPoolExecutor(places.readers, thread_name_prefix="echo-reader")
        self._sql_pool = ThreadPoolExecutor(places.sql, thread_name_prefix="echo-sql")
        self._sql_per_bearer = max(1, places.sql - 1)
        self._turns: dict[str, asyncio.Semaphore] = {}

    async def ask(
        self, principal: Principal, name: str, arguments: bytes | Mapping[str, Any]
    ) -> bytes:
        """Answer by name, encoded.

        Raises:
            KeyError: No such question.
            IngeroError: See `describe_error`.
        """
        query = get_query(QUERIES, name)
        if query.name != RUN_ANALYSIS.name:
            return await self._run(self._pool, principal, query, arguments)
        turn = self._turns.setdefault(principal.digest, asyncio.Semaphore(self._sql_per_bearer))
        async with turn:  # a bearer's statements wait for each other and never fill every place
            return await self._run(self._sql_pool, principal, query, arguments)

    async def _run(
        self,
        pool: ThreadPoolExecutor,
        principal: Principal,
        query: Query[Ask, Any, Any],
        arguments: bytes | Mapping[str, Any],
    ) -> bytes:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(pool, self.ask_now, principal, query, arguments)

    def ask_now(
        self,
        principal: Principal,
        query: Query[Ask, Any, Any],
        arguments: bytes | Mapping[str, Any],
    ) -> bytes:
        """The same on this thread."""

        def run_sql(sql: str, span: Span, limit: int) -> SqlAnswer:
            return self._run_sql(principal, sql, span, limit)

        with self._store.open_reader(self._timeout_ns) as reader:
            ask = Ask(reader, principal.clusters, self._clock.wall_ns(), run_sql)
            return query.ask(ask, arguments)

    def close(self) -> None:
        """End the threads after what they run now."""
        self._pool.shutdown()
        self._sql_pool.shutdown()
