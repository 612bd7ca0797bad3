"""Answers whose rows are sent while the store still yields them: the rest of the answer first, then batch by batch.

The event loop takes one part after the other from a thread, so a client that reads slowly costs one part of memory.
What it holds meanwhile is a cursor's snapshot: writers go on, and the cursor is closed before its instance is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import msgspec
import pyarrow as pa

from ingero.echo.db.cancellation import Cancellation
from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.reader import Reader, conform
from ingero.echo.db.store import Store
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import PageStatement, QueryContext, TimeSpan
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.executor import unless_gone
from ingero.echo.service.fair_queue import FairQueue, tenant_of
from ingero.echo.service.formats import RowFormat, build_schema
from ingero.echo.service.middleware import Receive, Scope, Send
from ingero.echo.service.replies import build_error_reply
from ingero.errors import IngeroError, StoreError
from ingero.serving.bearer import Principal
from ingero.serving.query import get_query
from ingero.serving.threads import run_on_thread
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

MAX_ROWS: Final = 1_000_000
"""Maximum number of rows of a streamed answer."""

_LOG: Final = logging.getLogger("ingero.echo.api")
_POLL_S: Final = 0.05
"""How soon a reader that was stopped is let go while a slow client takes a part."""
_FRAME_HEADER: Final = b"x-ingero-answer"
"""Window, coverage and what was cut, as JSON: what rows alone do not say."""
_BATCH_ROWS: Final = 2048
"""Rows of a part at most."""
_PART_BYTES: Final = 4 << 20
"""Of a part's values at most, unless one row has more: a text may be a megabyte in each row."""
_STALL_S: Final = 15.0
"""Longest time for the client to take one part."""
_MAX_QUERIES_LONG: Final = 6
"""An answer may take as long as so many queries that are not streamed, the client's pace included."""
_IN_HEADER: Final = ("window", "coverage", "n_cut")


class TruncatedAnswerError(Exception):
    """An answer that was begun ends here; the connection must not look as if it were complete."""


@dataclass(frozen=True, slots=True)
class RowsRequest:
    """One call of a tool whose rows are wanted.

    Attributes:
        principal: Who asks.
        name: The tool.
        arguments: Its arguments, JSON.
        max_rows: Instead of the arguments' limit; None leaves that.
        form: How the rows are written.
    """

    principal: Principal
    name: str
    arguments: bytes
    max_rows: int | None
    form: RowFormat


@dataclass(slots=True)
class _Rows:
    """Rows that are still in the store.

    Attributes:
        resources: What they hold: a reader and a place.
        cancellation: Stops the reader.
        reader: Yields them.
        header: The rest of the answer, for a header.
        parts: The answer's body, read from the store as it is taken; None is the end.
    """

    resources: ExitStack
    cancellation: Cancellation
    reader: Reader = field(init=False)
    header: bytes = field(init=False)
    parts: Iterator[bytes] = field(init=False)


class RowStreams:
    """Asks `QUERIES` of a store and streams the rows.

    Args:
        store: Where the rows are.
        clock: The time of a query.
        config: How many at once, and how long a query may take, its first rows of a stream included.
    """

    def __init__(self, store: Store, clock: Clock, config: EchoConfig) -> None:
        self._store = store
        self._clock = clock
        self._timeout_ns = config.query_timeout
        self._pool = ThreadPoolExecutor(config.readers, thread_name_prefix="echo-stream")
        per_tenant = max(1, config.readers // 2)
        self._queue = FairQueue("streamed answers", config.readers, per_tenant, self._timeout_ns)

    async def answer(self, request: RowsRequest, gone: asyncio.Event) -> StreamedAnswer:
        """Begin to answer: what is returned has its first part.

        Raises:
            KeyError: No such query.
            ClientGoneError: The client went away.
            IngeroError: See `build_error_reply`.
        """
        return await unless_gone(self._begin(request), gone)

    async def _begin(self, request: RowsRequest) -> StreamedAnswer:
        query = get_query(QUERIES, request.name)
        args = query.parse_args(request.arguments)
        if request.max_rows is not None and hasattr(args, "limit"):
            args = msgspec.structs.replace(args, limit=request.max_rows)
        tenant = tenant_of(request.principal)
        await self._queue.acquire(tenant)
        rows = _Rows(ExitStack(), Cancellation())
        rows.resources.callback(self._queue.release, tenant)
        first: bytes | None = None

        def begin() -> bytes:
            self._open(request, lambda context: query.run(context, args), rows)
            return next(rows.parts)

        try:
            async with asyncio.timeout(self._timeout_ns / NS_PER_S):
                first = await run_on_thread(self._pool, begin, rows.cancellation.set)
        except TimeoutError:
            raise DeadlineError("cannot read: stopped at its deadline") from None
        finally:
            if first is None:
                rows.resources.close()
        return StreamedAnswer(rows, first, request, self._pool)

    def close(self) -> None:
        """End the threads after what they run now."""
        self._pool.shutdown()

    def _open(self, request: RowsRequest, run: Callable[[QueryContext], Any], rows: _Rows) -> None:
        """Ask for everything but the rows, and open them."""
        form, timeout_ns = request.form, _MAX_QUERIES_LONG * self._timeout_ns
        reader = rows.resources.enter_context(self._store.open_reader(timeout_ns))
        rows.resources.enter_context(rows.cancellation.calls(reader.stop))
        pages: list[PageStatement] = []
        clusters, now_ns = request.principal.clusters, self._clock.wall_ns()
        answer = run(QueryContext(reader, clusters, now_ns, _refuse_sql, pages))
        (page,) = pages  # every query but the tenant's own SQL has one
        batches, n_all = reader.page_batches(page.sql, page.params, page.limit, _BATCH_ROWS)
        answer.n_cut = max(0, n_all - page.limit)
        frame = msgspec.to_builtins(answer)
        del frame["rows"]
        schema = build_schema(page.row)

        def iter_parts() -> Iterator[bytes]:
            yield form.begin(schema, msgspec.json.encode(frame))
            for batch in batches:
                yield from map(form.write, _split(conform(batch, schema)))
            yield form.end()

        rows.reader, rows.parts = reader, iter_parts()
        rows.header = msgspec.json.encode({name: frame[name] for name in _IN_HEADER})


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in pieces of `_PART_BYTES` at most, of one row at least."""
    if batch.nbytes <= _PART_BYTES or batch.num_rows < 2:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _split(batch.slice(0, half))
    yield from _split(batch.slice(half))


def _refuse_sql(sql: str, span: TimeSpan, limit: int) -> NoReturn:
    del sql, span, limit
    raise StoreError("a tenant's statement is not streamed from the store")


class StreamedAnswer:
    """The ASGI answer that sends the parts.

    Args:
        rows: Open; let go when the answer is over, however it ends.
        first: Their first part, taken already.
        request: What was asked for.
        pool: Threads that read.
    """

    def __init__(
        self, rows: _Rows, first: bytes, request: RowsRequest, pool: ThreadPoolExecutor
    ) -> None:
        self._rows = rows
        self._first = first
        self._request = request
        self._pool = pool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything.

        Raises:
            ClientGoneError: The client went away.
            TruncatedAnswerError: The client must see that the answer is not whole.
        """
        del receive
        try:
            await unless_gone(self._send_all(send), scope["gone"])
        finally:
            self._rows.resources.close()

    async def _send_all(self, send: Send) -> None:
        form = self._request.form
        head = [(b"content-type", form.media_type.encode()), (_FRAME_HEADER, self._rows.header)]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        part: bytes | None = self._first
        try:
            while part is not None:
                await self._send(send, part, more=True)
                part = await run_on_thread(
                    self._pool, lambda: next(self._rows.parts, None), self._rows.cancellation.set
                )
        except IngeroError as error:
            _LOG.warning("%s: broke off: %s", self._request.name, error.message)
            last = form.fail(build_error_reply(error))
            await self._send(send, last, more=not form.is_ended_by_fault)
            if not form.is_ended_by_fault:
                raise TruncatedAnswerError("the answer broke off") from None
        else:
            await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        """Send a part; a reader that was stopped is let go meanwhile, however slow the client is."""
        if more and not data:
            return None
        sending = asyncio.ensure_future(
            send({"type": "http.response.body", "body": data, "more_body": more})
        )
        try:
            for _ in range(round(_STALL_S / _POLL_S)):
                await asyncio.wait({sending}, timeout=_POLL_S)
                if sending.done():
                    return sending.result()
                if self._rows.reader.is_stopped:
                    self._rows.resources.close()
        finally:
            sending.cancel()
        raise TruncatedAnswerError("the client did not take its answer")
