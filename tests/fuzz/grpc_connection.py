"""A whole OTLP/gRPC connection fed with mutated bytes: frames, header blocks, messages, answers."""

from __future__ import annotations

import asyncio
import gzip
from typing import Final

from tests.fuzz.harness import Target
from tests.serving.otlp.http2 import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Client,
    frame,
    message,
    settings,
)
from typing_extensions import override

from ingero.errors import IngeroError
from ingero.serving.otlp.answers import TAKEN, AnswerStatus, OtlpAnswer, RequestRefusal
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.grpc_connection import GrpcConnection
from ingero.serving.otlp.grpc_shared import GrpcShared, ServiceCall
from ingero.serving.otlp.handler import OtlpRequest

_LIMIT_BYTES: Final = 1 << 20


class _Handler:
    """Decodes what it is given."""

    def open(self, request: OtlpRequest) -> None:
        pass

    def admit(self, request: OtlpRequest, *, is_full: bool) -> RequestRefusal | None:
        return None

    def reserve(self, request: OtlpRequest) -> None:
        pass

    def take(self, request: OtlpRequest, body: bytes) -> OtlpAnswer:
        try:
            request.decode(body, _LIMIT_BYTES)
        except IngeroError as error:
            return OtlpAnswer(AnswerStatus.BAD_DATA, error.message, 1)
        return TAKEN

    def refused(self, request: OtlpRequest, refusal: RequestRefusal) -> None:
        pass

    def find_headers(self, request: OtlpRequest) -> None:
        pass


class _Transport(asyncio.Transport):
    """Takes everything until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self._is_closed = False

    @override
    def is_closing(self) -> bool:
        return self._is_closed

    @override
    def get_extra_info(self, name: str, default: object = None) -> object:
        return ("127.0.0.1", 1) if name == "peername" else default

    @override
    def write(self, data: object) -> None:
        pass

    @override
    def close(self) -> None:
        self._is_closed = True

    @override
    def abort(self) -> None:
        self._is_closed = True


class _Take:
    """One connection for each body, and nothing left of it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def __call__(self, body: bytes) -> None:
        self._loop.run_until_complete(self._take(body))

    async def _take(self, body: bytes) -> None:
        shared = GrpcShared(OtlpGrpcSettings(), _Handler(), {b"/a.B/C": _answer})
        connection = GrpcConnection(shared, self._loop)
        connection.connection_made(_Transport())
        cut = len(body) // 3
        connection.data_received(body[:cut])
        connection.data_received(body[cut:])
        connection.check_time(self._loop.time() + 1)
        await asyncio.sleep(0)
        connection.connection_lost(None)
        assert not shared.open
        assert (shared.n_in_flight, shared.n_buffered_bytes) == (0, 0)


def _answer(call: ServiceCall, body: bytes) -> None:
    call.send(body)
    call.end(0)


def list_grpc() -> list[Target]:
    """The target."""
    one, two = Client(None, None), Client(None, None)
    begin = PREFACE + frame(SETTINGS, 0, 0, settings(window=1 << 16))
    body = bytes.fromhex("0a0012001a00")
    calls = (
        frame(HEADERS, 4, 1, one.block()) + frame(DATA, 1, 1, message(body)),
        frame(HEADERS, 4, 3, one.block()) + frame(DATA, 0, 3, message(gzip.compress(body), 1)),
        frame(HEADERS, 4, 5, one.block(grpc_encoding="zstd", grpc_timeout="5S")) + frame(DATA, 1, 5, message(body, 1)),
        frame(HEADERS, 4, 7, one.block(**{":path": "/a.B/C"})) + frame(DATA, 1, 7, message(b"abc")),
        frame(WINDOW_UPDATE, 0, 0, b"\0\0\1\0") + frame(PING, 0, 0, bytes(8)) + frame(SETTINGS, 1, 0),
        frame(RST_STREAM, 0, 3, b"\0\0\0\x08") + frame(GOAWAY, 0, 0, bytes(8)),
    )  # fmt: skip
    block = two.block(authorization="Bearer x")
    cut = (
        frame(HEADERS, 0x28, 1, b"\x03" + bytes(5) + block[:5] + bytes(3)) + frame(CONTINUATION, 4, 1, block[5:]),
        frame(DATA, 8, 1, b"\x02" + message(body) + bytes(2)) + frame(PRIORITY, 0, 9, bytes(5)),
        frame(HEADERS, 5, 1, two.encoder.encode([("trailer", "1")])) + frame(0xEE, 0, 0, b"x"),
    )  # fmt: skip
    seeds = (begin + b"".join(calls), begin + b"".join(cut))
    return [Target("grpc-connection", seeds, _Take(), ())]
