"""A worker's end: pushes go to the judge, answers and thresholds come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol, cast

from typing_extensions import override

from ingero.fleet.component import PushAnswer, PushAnswerer, PushContext
from ingero.fleet.workers.messages import (
    READ_JUDGE,
    FrameBuffer,
    FromJudge,
    FromWorker,
    RelayedAnswer,
    RelayedPush,
    StopOrder,
    Threshold,
    ThresholdUpdate,
    encode_frame,
    unpack_threshold,
)

MAX_WAITING_BYTES: Final = 128 << 20
"""Bodies that the judge has not answered; a push beyond them is asked to come again. As `max_buffered_size`."""

OnAnswer = Callable[[RelayedAnswer | None], None]
"""Called with what the judge said, or None when it is gone."""


class PushRelay(Protocol):
    """Capability in a worker: the way to the judge."""

    def submit(self, push: RelayedPush, on_answer: OnAnswer) -> bool:
        """Send a push, on the event loop; False when too much waits already, and then it is not sent."""
        ...

    def add_endpoint(self) -> int:
        """The number of the next endpoint; workers take them in the order in which the judge gave them."""
        ...

    def answerer(self, endpoint_idx: int) -> PushAnswerer:
        """Who knows the thresholds of clusters at an endpoint."""
        ...


class ThresholdTable:
    """The thresholds of clusters, as the judge last sent them. Any thread."""

    def __init__(self) -> None:
        self._known: dict[str, PushAnswer] = {}

    def put(self, cluster_id: str, threshold: Threshold | None) -> None:
        """Note what the judge sent."""
        answer = unpack_threshold(threshold)
        if answer is None:
            self._known.pop(cluster_id, None)
        else:
            self._known[cluster_id] = answer

    def answer(self, push: PushContext) -> PushAnswer | None:
        """The threshold of the cluster that a sender says it is of."""
        return self._known.get(push.cluster_hint)


class JudgeLink(asyncio.Protocol):
    """The connection to the judge; a `PushRelay`. Its loop owns it.

    Attributes:
        order: Set when the judge asks the worker to end, and with None when the judge is gone.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.order: asyncio.Future[StopOrder | None] = loop.create_future()
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer()
        self._unsent: list[FromWorker] = []
        self._waiting: dict[int, tuple[OnAnswer, int]] = {}
        self._n_waiting_bytes = 0
        self._number = 0
        self._n_endpoints = 0
        self._tables: dict[int, ThresholdTable] = {}

    def add_endpoint(self) -> int:
        """The number of the next endpoint."""
        endpoint_idx = self._n_endpoints
        self._n_endpoints += 1
        return endpoint_idx

    def answerer(self, endpoint_idx: int) -> PushAnswerer:
        """The table of an endpoint."""
        return self._tables.setdefault(endpoint_idx, ThresholdTable())

    def submit(self, push: RelayedPush, on_answer: OnAnswer) -> bool:
        """Send a push together with what else this turn of the loop brings."""
        n_bytes = len(push.body)
        if self._n_waiting_bytes and self._n_waiting_bytes + n_bytes > MAX_WAITING_BYTES:
            return False
        if self._transport is None:
            on_answer(None)
            return True
        self._number += 1
        push.number = self._number
        self._waiting[push.number] = (on_answer, n_bytes)
        self._n_waiting_bytes += n_bytes
        self.send(push)
        return True

    def send(self, message: FromWorker) -> None:
        """Send a message soon."""
        if not self._unsent:
            self._loop.call_soon(self.flush)
        self._unsent.append(message)

    def flush(self) -> None:
        """Send what is unsent."""
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(encode_frame(unsent))

    def close(self) -> None:
        """End the connection once everything was sent."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    @override
    def data_received(self, data: bytes) -> None:
        for frame in self._frames.add(data):
            for message in READ_JUDGE.decode(frame):
                self._take(message)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.order.done():
            self.order.set_result(None)
        waiting, self._waiting = self._waiting, {}
        for on_answer, _ in waiting.values():
            on_answer(None)

    def _take(self, message: FromJudge) -> None:
        if isinstance(message, RelayedAnswer):
            on_answer, n_bytes = self._waiting.pop(message.number)
            self._n_waiting_bytes -= n_bytes
            on_answer(message)
        elif isinstance(message, ThresholdUpdate):
            table = self._tables.setdefault(message.endpoint_idx, ThresholdTable())
            table.put(message.cluster_id, message.threshold)
        elif not self.order.done():
            self.order.set_result(message)
