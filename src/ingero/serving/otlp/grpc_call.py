"""One call: a stream's message gathered out of DATA frames, and its answer."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from ingero.serving.otlp.answers import OVERLOADED
from ingero.serving.otlp.grpc_calls import PREFIX_BYTES, CallAnswer, CallHead
from ingero.serving.otlp.grpc_exchanges import (
    BROKEN,
    TIMEOUT,
    TOO_MANY,
    Exchange,
    ExportExchange,
    ServiceExchange,
)
from ingero.serving.otlp.grpc_shared import GrpcShared, ServiceMethod
from ingero.serving.otlp.h2_frames import FIRST_WINDOW_BYTES, WINDOW_UPDATE, H2Code, write_word
from ingero.serving.otlp.h2_sender import FrameSender, Outflow
from ingero.units import NS_PER_S

_UNKNOWN: Final = -1


class CallOwner(Protocol):
    """The connection, as its calls see it."""

    shared: GrpcShared
    sender: FrameSender
    peer: str
    peer_names: tuple[str, ...]

    def close_call(self, call: GrpcCall) -> None:
        """Forget a call that was answered."""
        ...


class GrpcCall:
    """One call.

    Args:
        owner: Its connection.
        stream_id: Its stream.
        head: What it asks.
        now_s: When that came, on the event loop's clock.

    Attributes:
        peer: Address of its client.
        peer_names: Who its client's certificate is of.
        out: What it sends.
        is_ended: Whether its client has sent everything.
        is_closed: Whether nothing is sent any more.
    """

    __slots__ = (
        "_exchange",
        "_n_body",
        "_owner",
        "_parts",
        "_since_s",
        "_wanted",
        "_window",
        "deadline_s",
        "is_closed",
        "is_ended",
        "out",
    )

    def __init__(self, owner: CallOwner, stream_id: int, head: CallHead, now_s: float) -> None:
        self._owner = owner
        self._parts: list[bytes] = []
        self._n_body = 0
        self._wanted = _UNKNOWN
        self._window = FIRST_WINDOW_BYTES
        self._since_s = now_s
        self.deadline_s = None if head.timeout_s is None else now_s + head.timeout_s
        self.out = Outflow(stream_id, owner.sender.stream_window)
        self.is_ended = False
        self.is_closed = False
        self._exchange: Exchange

    @property
    def peer(self) -> str:
        """Address of its client."""
        return self._owner.peer

    @property
    def peer_names(self) -> tuple[str, ...]:
        """Who its client's certificate is of."""
        return self._owner.peer_names

    def begin_export(self, head: CallHead) -> None:
        """It is an export."""
        assert head.signal is not None
        self._exchange = ExportExchange(self, self._owner.shared, head, head.signal)
        self._exchange.begin()

    def begin_service(self, head: CallHead, method: ServiceMethod) -> None:
        """It is another method's."""
        self._exchange = ServiceExchange(self, head.encoding, method)
        self._exchange.begin()

    def take_window(self, n_bytes: int) -> bool:
        """Count what a DATA frame takes of the stream's window; False where that is more than there was."""
        self._window -= n_bytes
        return self._window >= 0

    def give_window(self, n_bytes: int) -> None:
        """Let the client send more."""
        self._window += n_bytes
        self._owner.sender.say(write_word(WINDOW_UPDATE, self.out.stream_id, n_bytes))

    def receive(self, data: bytes, *, ends: bool) -> None:
        """A part of the message."""
        exchange = self._exchange
        self.is_ended = ends
        if exchange.is_settled:
            return
        if data:
            self._parts.append(data)
            self._n_body += len(data)
            has_room = self._owner.shared.buffer(len(data))
            is_prefix = self._wanted == _UNKNOWN and self._n_body >= PREFIX_BYTES
            if is_prefix and not self._read_prefix():
                return
            if not has_room:
                exchange.refuse(OVERLOADED)
                return
        if 0 <= self._wanted < self._n_body - PREFIX_BYTES:
            exchange.refuse(TOO_MANY)
        elif ends:
            self._complete()

    def _read_prefix(self) -> bool:
        """Whether the message is wanted."""
        parts = self._parts
        first = parts[0] if len(parts) == 1 else b"".join(parts)
        self._parts = [first]
        self._wanted = int.from_bytes(first[1:PREFIX_BYTES], "big")
        exchange = self._exchange
        exchange.declare(first[0], self._wanted)
        if exchange.is_settled:
            return False
        if not exchange.is_waiting:
            self._open_window()
        return True

    def _open_window(self) -> None:
        """Let the whole message through, and no more."""
        n_missing = PREFIX_BYTES + self._wanted - self._n_body - self._window
        if n_missing > 0 and not self.is_ended:
            self.give_window(n_missing)

    def _complete(self) -> None:
        exchange = self._exchange
        if exchange.is_waiting:
            return
        if self._n_body - PREFIX_BYTES != self._wanted:
            exchange.refuse(BROKEN)
            return
        parts = self._parts
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        self.release()
        exchange.take(body[PREFIX_BYTES:])

    def go_on(self) -> None:
        """There is room for the message."""
        self._since_s = asyncio.get_running_loop().time()
        self._open_window()
        if self.is_ended:
            self._complete()

    def release(self) -> None:
        """Keep nothing of the message."""
        self._owner.shared.n_buffered_bytes -= self._n_body
        self._n_body = 0
        self._parts = []

    def answer(self, answer: CallAnswer) -> None:
        """Send an answer; nothing follows it."""
        sender, out = self._owner.sender, self.out
        if answer.head is None:
            sender.finish(out, answer.trailers)
        else:
            sender.begin(out, answer.head)
            sender.add(out, answer.message, answer.trailers)
        self.close_if_done()

    def send(self, head: bytes | None, message: bytes) -> None:
        """Send one message of several."""
        if not self.is_closed:
            if head is not None:
                self._owner.sender.begin(self.out, head)
            self._owner.sender.add(self.out, message)

    def finish(self, trailers: bytes) -> None:
        """Send the status behind all messages."""
        self._owner.sender.add(self.out, b"", trailers)
        self.close_if_done()

    def close_if_done(self) -> None:
        """Forget it when everything was said."""
        if self.out.is_done and not self.is_closed:
            self.is_closed = True
            self._exchange.drop()
            self._owner.close_call(self)

    def drop(self) -> None:
        """Its client does not wait for an answer any more."""
        if not self.is_closed:
            self.is_closed = True
            self.release()
            self._exchange.drop()

    def check_time(self, now_s: float) -> H2Code | None:
        """End what takes too long; a code where the stream is to be reset."""
        shared, exchange, out = self._owner.shared, self._exchange, self.out
        if out.pending:
            if out.stalled_s is None:
                out.stalled_s = now_s
            elif now_s - out.stalled_s > shared.settings.connections.stall_s:
                shared.admission.counters.stalled += 1
                return H2Code.CANCEL
            return None
        is_late = self.deadline_s is not None and now_s > self.deadline_s
        if exchange.is_settled:
            if is_late:
                exchange.expire()
        elif is_late or (
            not exchange.is_waiting
            and now_s - self._since_s > shared.settings.read_timeout_ns / NS_PER_S
        ):
            exchange.refuse(TIMEOUT)
        return None
