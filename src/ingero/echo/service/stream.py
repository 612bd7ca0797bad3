"""An answer on its way out while the store still yields it: a thread reads and encodes, the event loop sends.

At most a few parts wait between the two, so a client that reads slowly makes the thread wait and costs no memory. What
it holds meanwhile is a cursor's snapshot: writers go on, and whoever closes the instance stops the cursor first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.reader import Reader
from ingero.echo.service.middleware import Receive, Scope, Send
from ingero.errors import IngeroError
from ingero.units import NS_PER_S

_LOG: Final = logging.getLogger("ingero.echo.api")
_LOOK_S: Final = 0.05
"""How soon a thread that waits for a slow client notices that it should stop."""


FRAME_HEADER: Final = b"x-ingero-answer"
"""Window, coverage and what was cut, as JSON: what rows alone do not say."""


class TruncatedAnswerError(Exception):
    """An answer that was begun ends here; the connection must not look as if it were complete."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """Bounds of one streamed answer.

    Attributes:
        timeout_ns: From the question to the last row read from the store, the client's pace included.
        stall_ns: Longest time for the client to take one part.
        depth: Parts that wait for the client.
        batch_rows: Rows of a part.
        n_streams: Streamed answers at once; one bearer never has all of them.
    """

    timeout_ns: int = 60 * NS_PER_S
    stall_ns: int = 15 * NS_PER_S
    depth: int = 4
    batch_rows: int = 2048
    n_streams: int = 4


@dataclass(frozen=True, slots=True)
class StreamPart:
    """Bytes of an answer.

    Attributes:
        data: As they are sent.
        is_last: The answer is complete.
        is_cut: Nothing follows, and the client must not take what it has for all there is.
        head: What goes into the answer's head; the first part only.
    """

    data: bytes
    is_last: bool = False
    is_cut: bool = False
    head: bytes = b""


class AnswerStream:
    """Parts from a thread to the loop, at most ``depth`` waiting.

    Args:
        depth: Parts that may wait for the client.
        on_close: Called once, on the loop, when the answer is over.
    """

    def __init__(self, depth: int, on_close: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[StreamPart | IngeroError] = asyncio.Queue()
        self._room = threading.Semaphore(depth)
        self._lock = threading.Lock()
        self._reader: Reader | None = None
        self._is_closed = False
        self._on_close = on_close

    # On the loop.

    def start(self, pool: ThreadPoolExecutor, produce: Callable[[AnswerStream], None]) -> None:
        """Run ``produce`` on a thread of the pool."""

        def look(done: Future[None]) -> None:
            error = done.exception()
            if isinstance(error, IngeroError):
                self._pass(error)
            elif error is not None:
                _LOG.error("an answer could not be streamed", exc_info=error)
                self._pass(IngeroError("the answer could not be built"))

        pool.submit(produce, self).add_done_callback(look)

    async def next(self) -> StreamPart:
        """The next part.

        Raises:
            IngeroError: The answer failed before its first part.
        """
        part = await self._parts.get()
        self._room.release()
        if isinstance(part, IngeroError):
            raise part
        return part

    def close(self) -> None:
        """The client is served or gone: the thread stops at once, or soon where it waits."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            reader = self._reader
        self._on_close()
        if reader is not None:
            reader.stop()

    # On the thread.

    @property
    def is_closed(self) -> bool:
        """Nobody waits for it any more."""
        return self._is_closed

    def attach(self, reader: Reader) -> None:
        """Say what to stop.

        Raises:
            DeadlineError: The client is gone already.
        """
        with self._lock:
            self._reader = reader
            is_closed = self._is_closed
        if is_closed:
            raise DeadlineError("cannot answer: nobody waits for it")

    def put(self, part: StreamPart) -> None:
        """Hand a part over, waiting for room.

        Raises:
            DeadlineError: The reader was stopped meanwhile: its deadline has passed, or the client has gone.
        """
        reader = self._reader
        assert reader is not None
        while not self._room.acquire(timeout=_LOOK_S):
            if reader.is_stopped:
                raise DeadlineError("cannot answer: the rows were not taken in time")
        self._pass(part)

    def put_last(self, part: StreamPart) -> None:
        """The same without waiting: for the part that says why there are no more."""
        self._pass(part)

    def _pass(self, part: StreamPart | IngeroError) -> None:
        try:
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)
        except RuntimeError:
            return  # the loop is closed: the process ends, and so does the client's connection


class StreamedAnswer:
    """The ASGI answer that sends a stream's parts.

    Args:
        stream: Open; closed when the answer is over, however it ends.
        first: Its first part, taken already.
        media_type: Of the answer.
        stall_ns: Longest time for the client to take one part.
    """

    def __init__(
        self, stream: AnswerStream, first: StreamPart, media_type: str, stall_ns: int
    ) -> None:
        self._stream = stream
        self._first = first
        self._media_type = media_type
        self._stall_s = stall_ns / NS_PER_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything.

        Raises:
            CutError: The client must see that the answer is not whole.
        """
        del scope
        gone = asyncio.ensure_future(self._close_when_gone(receive))
        try:
            async with asyncio.timeout(None) as patience:
                await self._send_parts(send, patience)
        except TimeoutError:
            raise TruncatedAnswerError("the client did not take its answer") from None
        finally:
            gone.cancel()
            self._stream.close()

    async def _send_parts(self, send: Send, patience: asyncio.Timeout) -> None:
        loop = asyncio.get_running_loop()
        headers = [
            (b"content-type", self._media_type.encode()),
            (FRAME_HEADER, self._first.head),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        part = self._first
        while True:
            if part.data or part.is_last:
                more = part.is_cut or not part.is_last
                patience.reschedule(loop.time() + self._stall_s)
                await send({"type": "http.response.body", "body": part.data, "more_body": more})
                patience.reschedule(None)
            if part.is_cut:
                raise TruncatedAnswerError("the answer broke off")
            if part.is_last:
                return
            part = await self._stream.next()

    async def _close_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._stream.close()
