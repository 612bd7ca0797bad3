"""What clients meet at the OTLP/gRPC server: frames right and wrong, and floods of them."""

import asyncio

import pytest
from tests.serving.otlp.grpc_site import (
    CALM,
    CANCEL,
    CLOSED,
    COMPRESSION,
    FLOW,
    PROTOCOL,
    SIZE,
    WORD,
    serve,
)
from tests.serving.otlp.http2 import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Client,
    frame,
    message,
    settings,
)

from ingero.serving.otlp.answers import Reason
from ingero.serving.otlp.handler import AnswerHeaders


def test_a_call_is_answered_however_its_bytes_are_cut():
    async def scenario(site):
        site.handler.headers = AnswerHeaders(b"", (("ingero-threshold", "0.9"),))
        client = await site.connect(begins=False)
        block = client.block()
        stream = PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 4, 1, block)
        stream += frame(DATA, 1, 1, message(b"body"))
        for byte in stream:
            client.send(bytes([byte]))
            await asyncio.sleep(0)
        assert await client.status(1) == 0
        first, last = client.headers[1]
        assert first[":status"] == "200"
        assert first["content-type"] == "application/grpc"
        assert first["ingero-threshold"] == last["ingero-threshold"] == "0.9"
        assert client.data[1] == message(b"")
        assert site.handler.taken == [b"body"]
        (request,) = site.handler.requests
        assert (request.transport, request.method, request.path) == (
            "grpc",
            "Export",
            "/v1/metrics",
        )
        assert request.peer == "127.0.0.1"

    serve(scenario)


def test_padding_priority_continuation_and_unknown_frames_change_nothing():
    async def scenario(site):
        client = await site.connect()
        block = client.block(authorization="Bearer x")
        client.send(frame(0xEE, 0xFF, 77, b"what is this"), frame(PRIORITY, 0, 9, bytes(5)))
        client.send(frame(HEADERS, 0x28, 1, b"\x03" + bytes(5) + block[:5] + bytes(3)))
        client.send(frame(CONTINUATION, 0, 1, block[5:9]), frame(CONTINUATION, 4, 1, block[9:]))
        body = message(b"abc")
        client.send(frame(DATA, 8, 1, b"\x02" + body[:4] + bytes(2)), frame(DATA, 0, 1, body[4:]))
        client.send(frame(HEADERS, 5, 1, client.encoder.encode([("trailer", "1")])))
        assert await client.status(1) == 0
        assert site.handler.taken == [b"abc"]
        assert site.handler.requests[0].authorization == "Bearer x"
        assert client.count(WINDOW_UPDATE, 1) == 1  # the padding is given back
        assert not client.resets

    serve(scenario)


HEAD_BLOCK = Client(None, None).block()
WRONG = {
    "not http/2": (b"GET / HTTP/1.1\r\n\r\n", PROTOCOL),
    "no settings first": (PREFACE + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    "data on the connection": (frame(DATA, 0, 0, b"x"), PROTOCOL),
    "data on an idle stream": (frame(DATA, 0, 1, b"x"), PROTOCOL),
    "headers on an even stream": (frame(HEADERS, 5, 2, HEAD_BLOCK), PROTOCOL),
    "headers on the connection": (frame(HEADERS, 5, 0, HEAD_BLOCK), PROTOCOL),
    "headers without their priority": (frame(HEADERS, 0x24, 1, b"abc"), SIZE),
    "priority of six": (frame(PRIORITY, 0, 1, bytes(6)), SIZE),
    "priority on the connection": (frame(PRIORITY, 0, 0, bytes(5)), PROTOCOL),
    "reset of an idle stream": (frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL),
    "reset of three": (frame(RST_STREAM, 0, 1, bytes(3)), SIZE),
    "settings on a stream": (frame(SETTINGS, 0, 1), PROTOCOL),
    "settings of five": (frame(SETTINGS, 0, 0, bytes(5)), SIZE),
    "settings in an acknowledgement": (frame(SETTINGS, 1, 0, bytes(6)), SIZE),
    "a window that cannot be": (frame(SETTINGS, 0, 0, settings(window=1 << 31)), FLOW),
    "a frame size that cannot be": (frame(SETTINGS, 0, 0, settings(frame=100)), PROTOCOL),
    "push": (frame(PUSH_PROMISE, 4, 1, bytes(4)), PROTOCOL),
    "ping on a stream": (frame(PING, 0, 1, bytes(8)), PROTOCOL),
    "ping of seven": (frame(PING, 0, 0, bytes(7)), SIZE),
    "goaway on a stream": (frame(GOAWAY, 0, 1, bytes(8)), PROTOCOL),
    "goaway of seven": (frame(GOAWAY, 0, 0, bytes(7)), SIZE),
    "a window by nothing": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL),
    "a window of an idle stream": (frame(WINDOW_UPDATE, 0, 1, WORD(1)), PROTOCOL),
    "a window too large": (frame(WINDOW_UPDATE, 0, 0, WORD((1 << 31) - 1)), FLOW),
    "continuation of nothing": (frame(CONTINUATION, 4, 1, b""), PROTOCOL),
    "an interrupted block": (frame(HEADERS, 1, 1, HEAD_BLOCK) + frame(PING, 0, 0, bytes(8)), PROTOCOL),
    "another stream's continuation": (
        frame(HEADERS, 1, 1, HEAD_BLOCK) + frame(CONTINUATION, 4, 3, b""), PROTOCOL,
    ),
    "more padding than payload": (frame(HEADERS, 0xC, 1, b"\x05abc"), PROTOCOL),
    "no padding where some was said": (frame(HEADERS, 0xC, 1, b""), PROTOCOL),
    "a frame too large": (frame(DATA, 0, 1, bytes((1 << 14) + 1)), SIZE),
    "no hpack": (frame(HEADERS, 5, 1, b"\xff\xff\xff\xff\xff\xff"), COMPRESSION),
    "hpack cut short": (frame(HEADERS, 5, 1, b"\x00\x05abc"), COMPRESSION),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_breaks_the_protocol_ends_the_connection_with_its_code_and_is_counted(name):
    stream, code = WRONG[name]

    async def scenario(site):
        client = await site.connect(begins=not (stream.startswith((b"GET", PREFACE))))
        client.send(stream)
        assert (await client.end())[0] == code
        assert site.handler.refusals[-1] is Reason.BAD_REQUEST
        other = await site.connect()
        other.call(1)
        assert await other.status(1) == 0

    serve(scenario)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(WINDOW_UPDATE, 0, 1, bytes(4)), PROTOCOL),
        (frame(WINDOW_UPDATE, 0, 1, WORD((1 << 31) - 1)), FLOW),
        (frame(HEADERS, 4, 1, HEAD_BLOCK), PROTOCOL),
        (frame(DATA, 1, 1, message(b"")) + frame(DATA, 1, 1, b"x"), CLOSED),
        (frame(DATA, 1, 1, message(b"")) + frame(HEADERS, 5, 1, HEAD_BLOCK), CLOSED),
    ],
    ids=[
        "window by nothing",
        "window too large",
        "headers again",
        "data after its end",
        "trailers after its end",
    ],
)
def test_what_breaks_a_stream_ends_that_stream_alone(frames, code):
    async def scenario(site):
        site.handler.is_slow = True
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()), frames)
        await client.until(lambda: 1 in client.resets)
        assert client.resets == {1: code}
        site.handler.go.set()
        client.call(3)
        assert await client.status(3) == 0

    serve(scenario)


@pytest.mark.parametrize(
    "more",
    [
        {"connection": "close"},
        {"te": "gzip"},
        {"Upper": "1"},
        {"x": "a\nb"},
        {":path": None},
        {":what": "x"},
    ],
)
def test_a_malformed_request_is_reset(more):
    async def scenario(site):
        client = await site.connect()
        client.send(frame(HEADERS, 5, 1, client.block(**more)))
        await client.until(lambda: 1 in client.resets)
        assert client.resets == {1: PROTOCOL}
        client.call(3)
        assert await client.status(3) == 0

    serve(scenario)


@pytest.mark.parametrize(
    "flood",
    [
        frame(PING, 0, 0, bytes(8)),
        frame(SETTINGS, 0, 0),
        frame(PRIORITY, 0, 1, bytes(5)),
        frame(WINDOW_UPDATE, 0, 1, WORD(1)),
        frame(DATA, 0, 1),
        frame(0xBB, 0, 0),
        frame(SETTINGS, 1, 0),
    ],
    ids=["ping", "settings", "priority", "window", "data", "unknown", "acknowledgements"],
)
def test_floods_end_the_connection_and_are_counted(flood):
    async def scenario(site):
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()), flood * 6000)
        assert (await client.end())[0] == CALM
        assert Reason.FLOOD in site.handler.refusals

    serve(scenario)


def test_continuation_without_end_is_a_flood_and_a_long_one_is_too_large():
    async def scenario(site):
        client = await site.connect()
        client.send(frame(HEADERS, 1, 1), frame(CONTINUATION, 0, 1) * 6000)
        assert (await client.end())[0] == CALM
        large = await site.connect()
        large.send(frame(HEADERS, 1, 1), frame(CONTINUATION, 0, 1, bytes(1 << 14)) * 5)
        assert await large.end() == (CALM, "the header block is too large")
        assert site.server.counters.large_heads == 1
        bomb = await site.connect()
        bomb.send(frame(HEADERS, 5, 1, bomb.block(x="v" * 3900)))
        bomb.send(frame(HEADERS, 5, 3, bomb.encoder.encode([("x", "v" * 3900)]) * 100))
        assert await bomb.end() == (CALM, "the header list is too large")

    serve(scenario)


def test_calls_that_are_reset_again_and_again_end_the_connection():
    async def scenario(site):
        site.handler.is_slow = True
        client = await site.connect()
        for stream in range(1, 2001, 2):
            client.send(
                frame(HEADERS, 4, stream, client.block()),
                frame(RST_STREAM, 0, stream, WORD(CANCEL)),
            )
        assert await client.end() == (CALM, "too many calls that were reset")
        assert len(site.handler.requests) < 400
        assert set(site.handler.refusals) == {Reason.CUT_SHORT, Reason.FLOOD}

    serve(scenario)


def test_a_client_that_calls_may_ping_and_cancel_as_much_as_it_calls():
    async def scenario(site):
        client = await site.connect()
        for stream in range(1, 8001, 4):
            client.call(stream)
            client.send(frame(PING, 0, 0, bytes(8)), frame(WINDOW_UPDATE, 0, 0, WORD(5)))
            if stream % 5 == 0:
                client.send(frame(HEADERS, 4, stream + 2, client.block()))
                client.send(frame(RST_STREAM, 0, stream + 2, WORD(CANCEL)))
        assert await client.status(7997) == 0
        assert len(site.handler.taken) == 2000

    serve(scenario)
