"""Runs questions whose rows are streamed: the frame of the answer first, then the rows batch by batch from the store."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import msgspec

from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.reader import conform
from ingero.echo.db.store import Store
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import PageStatement, QueryContext, TimeSpan
from ingero.echo.service.executor import build_error_reply, unless_gone
from ingero.echo.service.fair_queue import FairQueue, FairQueueSettings, tenant_of
from ingero.echo.service.formats import RowFormat, build_schema
from ingero.echo.service.stream import (
    AnswerStream,
    StreamedAnswer,
    StreamPart,
    StreamSettings,
)
from ingero.errors import IngeroError, StoreError
from ingero.serving.bearer import Principal
from ingero.serving.query import Query, get_query
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

MAX_ROWS: Final = 1_000_000
"""Most rows of a streamed answer."""

_LOG: Final = logging.getLogger("ingero.echo.api")
_IN_HEAD: Final = ("window", "coverage", "n_cut")


@dataclass(frozen=True, slots=True)
class RowsQuestion:
    """One call of a tool whose rows are wanted.

    Attributes:
        principal: Who asks.
        name: The tool.
        arguments: Its arguments, JSON.
        max_rows: Instead of the arguments' limit; None leaves that.
    """

    principal: Principal
    name: str
    arguments: bytes
    max_rows: int | None


class RowStreams:
    """Asks `QUERIES` of a store and streams the rows.

    Args:
        store: Where the rows are.
        clock: The time of a question.
        first_timeout_ns: Longest wait for the first rows.
        settings: Bounds.
    """

    def __init__(
        self, store: Store, clock: Clock, first_timeout_ns: int, settings: StreamSettings
    ) -> None:
        self._store = store
        self._clock = clock
        self._first_timeout_s = first_timeout_ns / NS_PER_S
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.n_streams, thread_name_prefix="echo-stream")
        self._turns = FairQueue(
            FairQueueSettings(
                settings.n_streams, max(1, settings.n_streams // 2), wait_ns=first_timeout_ns
            ),
            "streamed answers",
        )

    async def answer(
        self, question: RowsQuestion, form: RowFormat, gone: asyncio.Event
    ) -> StreamedAnswer:
        """Begin to answer: what is returned has its first part.

        Raises:
            KeyError: No such question.
            GoneError: The asker went away.
            IngeroError: See `build_error_reply`.
        """
        return await unless_gone(self._begin(question, form), gone)

    async def _begin(self, question: RowsQuestion, form: RowFormat) -> StreamedAnswer:
        query = get_query(QUERIES, question.name)
        args = query.parse_args(question.arguments)
        if question.max_rows is not None and hasattr(args, "limit"):
            args = msgspec.structs.replace(args, limit=question.max_rows)
        settings = self._settings
        tenant = tenant_of(question.principal)
        await self._turns.acquire(tenant)
        stream = AnswerStream(settings.depth, lambda: self._turns.release(tenant))
        principal, first = question.principal, None
        stream.start(self._pool, lambda out: self._produce(out, principal, (query, args), form))
        try:
            async with asyncio.timeout(self._first_timeout_s):
                first = await stream.next()
        except TimeoutError:
            raise DeadlineError("cannot read: stopped at its deadline") from None
        finally:
            if first is None:
                stream.close()
        return StreamedAnswer(stream, first, form.media_type, settings.stall_ns)

    def close(self) -> None:
        """End the threads after what they run now."""
        self._pool.shutdown()

    def _produce(
        self,
        out: AnswerStream,
        principal: Principal,
        asked: tuple[Query[QueryContext, Any, Any], Any],
        form: RowFormat,
    ) -> None:
        query, args = asked
        with self._store.open_reader(self._settings.timeout_ns) as reader:
            out.attach(reader)
            pages: list[PageStatement] = []
            ask = QueryContext(
                reader, principal.clusters, self._clock.wall_ns(), _refuse_sql, pages
            )
            answer = query.run(ask, args)
            (page,) = pages  # every question but the tenant's own SQL has one
            batches, n_all = reader.page_batches(
                page.sql, page.params, page.limit, self._settings.batch_rows
            )
            answer.n_cut = max(0, n_all - page.limit)
            frame = msgspec.to_builtins(answer)
            del frame["rows"]
            head = msgspec.json.encode({name: frame[name] for name in _IN_HEAD})
            schema = build_schema(page.row)
            out.put(StreamPart(form.begin(schema, msgspec.json.encode(frame)), head=head))
            try:
                for batch in batches:
                    out.put(StreamPart(form.write(conform(batch, schema))))
                out.put(StreamPart(form.end(), is_last=True))
            except IngeroError as error:
                if not out.is_closed:
                    _LOG.warning("%s: broke off: %s", query.name, error.message)
                fault = build_error_reply(error)
                is_cut = not form.is_ended_by_fault
                out.put_last(StreamPart(form.fail(fault), is_last=True, is_cut=is_cut))


def _refuse_sql(sql: str, span: TimeSpan, limit: int) -> NoReturn:
    del sql, span, limit
    raise StoreError("a tenant's statement is not streamed from the store")
