"""What the connections of one listener share, whichever protocol they speak: who is there, and what is to be sent."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from ingero.serving.connections import ConnectionAdmission, ConnectionLimits


class OpenConnection(Protocol):
    """What the listener does with a connection."""

    def send(self) -> None:
        """Send what is unsent, and close after a last answer."""
        ...

    def check_time(self, now_s: float) -> None:
        """End what takes too long; the time is the event loop's."""
        ...

    def close_if_idle(self) -> None:
        """Close unless a request is arriving or being answered."""
        ...

    def abort(self) -> None:
        """Cut the connection."""
        ...


class OpenConnections:
    """The connections of one listener. One event loop owns them.

    Args:
        limits: How many, and how slow.

    Attributes:
        admission: How many connections.
        is_stopping: The listener ends.
        open: All connections.
        tasks: Answers being made.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.admission = ConnectionAdmission(limits)
        self.is_stopping = False
        self.open: set[OpenConnection] = set()
        self.tasks: set[asyncio.Future[Any]] = set()
        self._all_gone = asyncio.Event()
        self._unsent: list[OpenConnection] = []

    def send_soon(self, connection: OpenConnection) -> None:
        """Send what this connection has to say once everything that is readable now has been read."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send_all)
        self._unsent.append(connection)

    def _send_all(self) -> None:
        unsent, self._unsent = self._unsent, []
        for connection in unsent:
            connection.send()

    def forget(self, connection: OpenConnection) -> None:
        """A connection is gone."""
        self.open.discard(connection)
        if not self.open:
            self._all_gone.set()

    def check_time(self, now_s: float) -> None:
        """End what takes too long; one timer for all connections costs less than one each."""
        for connection in list(self.open):
            connection.check_time(now_s)

    async def drain(self, drain_s: float) -> None:
        """Close idle connections; let requests in flight finish for ``drain_s``, then cut them."""
        self.is_stopping = True
        for connection in list(self.open):
            connection.close_if_idle()
        try:
            async with asyncio.timeout(drain_s):
                while self.open:
                    self._all_gone.clear()
                    await self._all_gone.wait()
                if self.tasks:  # of senders that went away meanwhile
                    await asyncio.wait(self.tasks)
        except TimeoutError:
            for connection in list(self.open):
                connection.abort()
        for task in list(self.tasks):
            task.cancel()
