"""MCP over HTTP for servers that often nobody asks by MCP: its SDK is imported for the first request.

Importing mcp 2.3 takes a second of a processor, as much as all else of Echo's start, and 20 MB: it builds a model for
each type of each version of the protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from typing import Any, Final, Protocol

from ingero.errors import UnsupportedError
from ingero.serving.threads import run_on_thread

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_SDK: Final = "mcp"


class McpManager(Protocol):
    """What is used of the SDK's `StreamableHTTPSessionManager`."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Allow requests while the context lasts; it is left by the task that entered it."""
        ...

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        ...


class McpOverHttp:
    """Answers MCP's requests from the first one on.

    Args:
        load: Imports the SDK, on a thread; gives what makes the manager, on the event loop.

    Raises:
        UnsupportedError: The SDK is not installed.
    """

    def __init__(self, load: Callable[[], Callable[[], McpManager]]) -> None:
        if find_spec(_SDK) is None:
            raise UnsupportedError(
                f"MCP over HTTP needs the package {_SDK}", hint=f"pip install {_SDK}"
            )
        self._load = load
        self._asked = asyncio.Event()
        self._manager: asyncio.Future[McpManager]

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Allow requests while the context lasts; another task than the one that entered it may leave it."""
        self._manager = asyncio.get_running_loop().create_future()
        holding = asyncio.create_task(self._hold())
        holding.add_done_callback(self._refuse_waiting)
        try:
            yield
        finally:
            holding.cancel()
            await asyncio.wait({holding})

    async def handle_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request that has no body.

        Raises:
            Exception: The SDK could not be imported.
        """
        self._asked.set()
        manager = await asyncio.shield(self._manager)
        await manager.handle_request(scope, receive, send)

    async def handle_body(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Answer one request whose whole body was read; the SDK would wait for it for ever.

        A body that is no message is answered here: the SDK says of it what is inside the SDK, and not under its id.

        Raises:
            Exception: The SDK could not be imported.
        """
        self._asked.set()
        await asyncio.shield(self._manager)
        from ingero.serving.mcp_refusals import find_refusal  # noqa: PLC0415 - the SDK, imported by now

        if (refused := find_refusal(body)) is not None:
            await _send_refusal(refused.model_dump_json(by_alias=True, exclude_unset=True), send)
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def replay() -> MutableMapping[str, Any]:
            return next(messages, None) or await receive()

        await self.handle_request(scope, replay, send)

    async def _hold(self) -> None:
        """Hold the manager open in one task: its task group must be left where it was entered."""
        await self._asked.wait()
        build = await run_on_thread(None, self._load)
        manager = build()
        async with manager.run():
            self._manager.set_result(manager)
            await asyncio.get_running_loop().create_future()

    def _refuse_waiting(self, holding: asyncio.Task[None]) -> None:
        if self._manager.done():
            return
        error = None if holding.cancelled() else holding.exception()
        if error is None:
            self._manager.cancel()
        else:
            self._manager.set_exception(error)


async def _send_refusal(answer: str, send: Send) -> None:
    body = answer.encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 400, "headers": headers})
    await send({"type": "http.response.body", "body": body})
