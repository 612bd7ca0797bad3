"""One client's connection over OTLP/gRPC: bytes into frames, answers back, and what takes too long is ended.

`GrpcConnection` is asyncio's protocol. Its `StreamTable` makes calls of frames; its `FrameSender` knows what the client
takes. Where the handler answers at once, everything happens inside the callback that completed the call.
"""

from __future__ import annotations

import asyncio
import random
from functools import partial
from typing import Final, cast

from typing_extensions import override

from ingero.serving.otlp.answers import Reason
from ingero.serving.otlp.grpc_call import GrpcCall
from ingero.serving.otlp.grpc_shared import GrpcShared
from ingero.serving.otlp.grpc_streams import StreamTable, greet
from ingero.serving.otlp.h2_frames import (
    MAX_STREAM_ID,
    PING,
    FrameReader,
    H2Code,
    H2Error,
    write_frame,
    write_goaway,
)
from ingero.serving.otlp.h2_sender import FrameSender
from ingero.serving.tls import find_names
from ingero.units import NS_PER_S

_LEAVING: Final = b"leaving\0"
_ALIVE: Final = b"alive?\0\0"
_LEAVE_S: Final = 1.0
"""How long a client may take to learn that it shall leave."""
_AGE_SPREAD: Final = 0.1
"""So that clients that came together do not all leave together. Source: gRPC proposal A9, MAX_CONNECTION_AGE."""
_REASONS: Final = {H2Code.ENHANCE_YOUR_CALM: Reason.FLOOD}


class _Life:
    """When a connection began, received bytes, and is to end, on the event loop's clock."""

    __slots__ = (
        "begun_s",
        "closed_s",
        "end_s",
        "has_received",
        "leaving_s",
        "pinged_s",
        "received_s",
        "stalled_s",
        "swept_s",
        "used_s",
    )

    def __init__(self, now_s: float, age_ns: int | None) -> None:
        self.begun_s = self.received_s = self.used_s = self.swept_s = now_s
        self.has_received = False
        self.pinged_s: float | None = None
        self.stalled_s: float | None = None
        self.leaving_s: float | None = None
        self.closed_s: float | None = None
        self.end_s: float | None = None
        if age_ns is not None:
            spread = random.uniform(1 - _AGE_SPREAD, 1 + _AGE_SPREAD)  # noqa: S311 - no secret
            self.end_s = now_s + age_ns / NS_PER_S * spread

    def is_old(self, now_s: float, idle_ns: int | None) -> bool:
        """Whether the client is to connect anew, or has had no call for ``idle_ns``."""
        if self.end_s is not None and now_s > self.end_s:
            return True
        return idle_ns is not None and now_s - self.used_s > idle_ns / NS_PER_S


def _check_calls(streams: StreamTable, now_s: float) -> None:
    """End calls that take too long."""
    for call in list(streams.calls.values()):
        code = call.check_time(now_s)
        if code is not None:
            streams.reset(call, code)


class GrpcConnection(asyncio.Protocol):
    """One connection.

    Args:
        shared: What the listener's connections share.
        loop: The running loop.

    Attributes:
        shared: Likewise.
        sender: What it sends.
        peer: Address of the client.
        peer_names: Who its certificate is of.
        is_done: Nothing more is taken from it.
    """

    __slots__ = (
        "_is_admitted",
        "_life",
        "_loop",
        "_reader",
        "_streams",
        "_transport",
        "is_done",
        "peer",
        "peer_names",
        "sender",
        "shared",
    )

    def __init__(self, shared: GrpcShared, loop: asyncio.AbstractEventLoop) -> None:
        self.shared = shared
        self.peer = ""
        self.peer_names: tuple[str, ...] = ()
        self.is_done = False
        self.sender = FrameSender(partial(shared.send_soon, self))
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._streams = StreamTable(self)
        self._life = _Life(loop.time(), shared.settings.age_ns)
        self._is_admitted = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.shared.open.add(self)
        name = transport.get_extra_info("peername")
        self.peer = str(name[0]) if name else ""
        self.peer_names = find_names(transport.get_extra_info("peercert"))
        greet(self)
        self._is_admitted = self.shared.admission.enter(self.peer)
        if not self._is_admitted:
            self._say_goodbye(H2Code.ENHANCE_YOUR_CALM, "too many connections")
        elif self.shared.is_stopping:  # it was accepted before the port was closed
            self._say_goodbye(H2Code.NO_ERROR, "shutting down")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.is_done = True
        calls = list(self._streams.calls.values())
        self._streams.calls.clear()
        for call in calls:
            call.drop()
        self.sender.unsent.clear()
        if self._is_admitted:
            self.shared.admission.leave(self.peer)
        self.shared.forget(self)

    @override
    def data_received(self, data: bytes) -> None:
        if self.is_done:
            return
        self._life.has_received = True
        streams = self._streams
        try:
            for frame in self._reader.feed(data):
                streams.take(frame)
        except H2Error as error:
            self._fail(error)

    @override
    def eof_received(self) -> None:
        self.send()

    @override
    def pause_writing(self) -> None:
        self._life.stalled_s = self._loop.time()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    @override
    def resume_writing(self) -> None:
        self._life.stalled_s = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def on_pong(self, payload: bytes) -> None:
        """A ping was answered."""
        self._life.pinged_s = None
        if payload == _LEAVING and self._life.leaving_s is not None:
            self._finish_leaving()

    def close_call(self, call: GrpcCall) -> None:
        """Forget a call that was answered, or reset."""
        streams = self._streams
        stream_id = call.out.stream_id
        if streams.calls.pop(stream_id, None) is not None:
            if not call.is_ended:
                self.sender.reset(stream_id, H2Code.NO_ERROR)
            streams.answered()
        if not streams.calls:
            self._life.used_s = self._loop.time()
            if streams.is_final:
                self._close()

    def check_time(self, now_s: float) -> None:
        """End what takes too long."""
        life, settings = self._life, self.shared.settings
        counters = self.shared.admission.counters
        if life.has_received:
            life.has_received, life.received_s, life.pinged_s = False, now_s, None
            self._streams.refill(now_s - life.swept_s)
            life.swept_s = now_s
        stalled_s = life.stalled_s if life.closed_s is None else life.closed_s
        if stalled_s is not None:
            if now_s - stalled_s > settings.connections.stall_s:
                counters.stalled += 1
                self.abort()
            return
        if self._is_head_late(now_s):
            counters.slow_heads += 1
            self._fail(
                H2Error(H2Code.ENHANCE_YOUR_CALM, "a head did not arrive in time"), Reason.TIMEOUT
            )
            return
        if self._streams.calls:
            _check_calls(self._streams, now_s)
        if life.leaving_s is not None:
            self._check_leaving(now_s, life.leaving_s)
        elif life.is_old(now_s, settings.idle_ns if not self._streams.calls else None):
            self.close_if_idle()
        else:
            self._check_silence(now_s)

    def _is_head_late(self, now_s: float) -> bool:
        """Whether the preface, or a header block, has been arriving for too long."""
        head_s = self.shared.settings.connections.head_s
        if not self._reader.has_begun:
            return now_s - self._life.begun_s > head_s
        began_s = self._streams.block_since_s
        return began_s is not None and now_s - began_s > head_s

    def _check_silence(self, now_s: float) -> None:
        """Ask a silent client whether it is there; cut it off when it is not."""
        life, settings = self._life, self.shared.settings
        if life.pinged_s is not None:
            if now_s - life.pinged_s > settings.ping_timeout_ns / NS_PER_S:
                self.abort()
        elif now_s - life.received_s > settings.ping_after_ns / NS_PER_S:
            life.pinged_s = now_s
            self.sender.say(write_frame(PING, 0, 0, _ALIVE))

    def _check_leaving(self, now_s: float, leaving_s: float) -> None:
        if not self._streams.is_final:
            if now_s - leaving_s > _LEAVE_S:
                self._finish_leaving()
            return
        grace_ns = self.shared.settings.age_grace_ns
        if grace_ns is not None and now_s - leaving_s > grace_ns / NS_PER_S:
            self.abort()

    def close_if_idle(self) -> None:
        """Have the client leave: it begins no further call, and its own are answered (RFC 9113, section 6.8)."""
        if self._life.leaving_s is None and not self.is_done:
            self._life.leaving_s = self._loop.time()
            if not self._reader.has_begun:
                self._finish_leaving()
                return
            ping = write_frame(PING, 0, 0, _LEAVING)
            self.sender.say(write_goaway(MAX_STREAM_ID, H2Code.NO_ERROR) + ping)

    def _finish_leaving(self) -> None:
        """What the client sent before it knew has arrived."""
        streams = self._streams
        if streams.is_final or self.is_done:
            return
        streams.is_final = True
        self.sender.say(write_goaway(streams.last_id, H2Code.NO_ERROR))
        if not streams.calls:
            self._close()

    def _fail(self, error: H2Error, reason: Reason | None = None) -> None:
        """End the connection for what its client did."""
        if self.is_done:
            return
        self.shared.count_broken(
            self.peer, reason or _REASONS.get(error.code, Reason.BAD_REQUEST), error.message
        )
        self._say_goodbye(error.code, error.message)

    def _say_goodbye(self, code: H2Code, message: str) -> None:
        self.sender.say(write_goaway(self._streams.last_id, code, message))
        self._close()

    def send(self) -> None:
        """Send what is unsent; nothing to a connection that is being closed."""
        unsent, transport = self.sender.unsent, self._transport
        if unsent and transport is not None and not transport.is_closing():
            transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        unsent.clear()

    def abort(self) -> None:
        """Cut the connection."""
        self.is_done = True
        if self._transport is not None:
            self._transport.abort()

    def _close(self) -> None:
        """Nothing more is taken; what was said is sent."""
        self.is_done = True
        self._life.closed_s = self._loop.time()
        self.send()
        if self._transport is not None:
            self._transport.close()
