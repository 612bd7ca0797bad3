"""What clients meet at the OTLP/gRPC server: frames right and wrong, flow control, slowness, floods, and its end."""

import asyncio
import struct

import pytest
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

from ingero.config import Endpoint
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.answers import TAKEN, AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.grpc_server import OtlpGrpcServer
from ingero.serving.otlp.handler import AnswerHeaders
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_MS, NS_PER_S

NO_ERROR, PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, CANCEL, COMPRESSION, CALM = (
    0,
    1,
    3,
    5,
    6,
    7,
    8,
    9,
    11,
)
WORD = struct.Struct(">I").pack
UNKNOWN = RequestRefusal(OtlpAnswer(AnswerStatus.UNAUTHENTICATED, "who?"), Reason.UNAUTHENTICATED)


class Handler:
    """Notes what it is called with; answers at once, or when told to."""

    def __init__(self):
        self.taken, self.refusals, self.requests = [], [], []
        self.go, self.room = asyncio.Event(), asyncio.Event()
        self.is_slow, self.waits, self.fault = False, False, None
        self.refusal, self.headers, self.answer = None, None, TAKEN

    def open(self, request):
        self.requests.append(request)

    def admit(self, request, *, is_full):
        if is_full:
            return RequestRefusal(OtlpAnswer(AnswerStatus.OVERLOADED, "full", 2), Reason.OVERLOADED)
        return self.refusal

    def reserve(self, request):
        return self._reserve() if self.waits else None

    async def _reserve(self):
        await self.room.wait()
        return self.refusal

    def take(self, request, body):
        self.taken.append(body)
        if self.fault is not None:
            raise self.fault
        return self._take() if self.is_slow else self.answer

    async def _take(self):
        await self.go.wait()
        return self.answer

    def refused(self, request, refusal):
        self.refusals.append(refusal.reason)

    def find_headers(self, request):
        return self.headers


class Site:
    """A server, its handler, and clients that are closed at the end."""

    def __init__(self, server, handler):
        self.server, self.handler = server, handler
        self.clients = []

    async def connect(self, first=b"", begins=True):
        self.clients.append(await Client.connect(self.server.bound, first, begins))
        return self.clients[-1]


def serve(scenario, *, methods=None, limits=None, **more):
    async def run():
        handler = Handler()
        given = {
            name: round(value * NS_PER_S) if name.endswith("_ns") else value
            for name, value in more.items()
        }
        chosen = OtlpGrpcSettings(connections=ConnectionLimits(**(limits or {})), **given)
        server = OtlpGrpcServer(Endpoint("127.0.0.1", 0), chosen, handler, None, methods or {})
        await server.start()
        site = Site(server, handler)
        try:
            async with asyncio.timeout(30):
                await scenario(site)
        finally:
            for client in site.clients:
                await client.leave()
            await server.stop(0.1)
        assert server._shared.n_in_flight == 0
        assert server._shared.n_buffered_bytes == 0

    asyncio.run(run())


async def until(condition):
    await asyncio.to_thread(wait_until, condition)


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


def test_an_answer_waits_for_the_windows_of_its_stream_and_connection():
    async def scenario(site):
        site.handler.answer = OtlpAnswer(AnswerStatus.TAKEN, "x" * 40, n_rejected=3)
        client = await site.connect(settings(window=0))
        client.call(1)
        client.send(frame(WINDOW_UPDATE, 0, 1, WORD(3)))
        await client.until(lambda: len(client.data.get(1, b"")) == 3)
        client.send(frame(SETTINGS, 0, 0, settings(window=10)))
        await client.until(lambda: len(client.data[1]) == 13)
        assert 1 not in client.ended
        client.send(frame(WINDOW_UPDATE, 0, 1, WORD(1000)))
        assert await client.status(1) == 0
        assert len(client.data[1]) == 5 + int.from_bytes(client.data[1][1:5], "big")
        for stream in range(3, 4001, 2):
            client.call(stream)  # none of them gives the connection's window back
        client.send(frame(SETTINGS, 0, 0, settings(window=1 << 20)))
        await client.until(lambda: sum(map(len, client.data.values())) == (1 << 16) - 1)
        client.send(frame(WINDOW_UPDATE, 0, 0, WORD(1 << 20)))
        assert await client.status(3999) == 0

    serve(scenario, max_streams=4000)


def test_a_large_message_comes_when_its_sender_is_let_in_and_not_before():
    body = bytes(range(256)) * 2000

    async def scenario(site):
        site.handler.waits = True
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()))
        whole = message(body)
        sent, window = 0, (1 << 16) - 1

        async def send_all():
            nonlocal sent, window
            while sent < len(whole):
                n = min(1 << 14, window, len(whole) - sent)
                if n:
                    client.send(frame(DATA, int(sent + n == len(whole)), 1, whole[sent : sent + n]))
                    sent, window = sent + n, window - n
                    continue
                await client.until(lambda: client.count(WINDOW_UPDATE, 1))
                window += struct.unpack(">I", client.others[-1][3])[0]

        sending = asyncio.ensure_future(send_all())
        await asyncio.sleep(0.1)
        assert sent == (1 << 16) - 1
        assert not site.handler.taken
        site.handler.room.set()
        await sending
        assert await client.status(1) == 0
        assert site.handler.taken == [body]
        assert client.count(WINDOW_UPDATE, 1) == 1

    serve(scenario)


def test_more_than_a_streams_window_ends_it_and_the_connections_is_given_back():
    whole = message(bytes(1 << 17))[:15000]

    async def scenario(site):
        site.handler.waits = True
        client = await site.connect()
        for stream in range(1, 80, 2):
            client.send(
                frame(HEADERS, 4, stream, client.block()), frame(DATA, 0, stream, whole) * 4
            )
        await client.until(lambda: client.count(WINDOW_UPDATE, 0) >= 4)
        assert not client.resets
        client.send(frame(DATA, 0, 1, whole))
        await client.until(lambda: client.resets == {1: FLOW})

    serve(scenario)

    async def overrun(site):
        other = await site.connect()
        other.send(frame(HEADERS, 4, 1, other.block()), frame(RST_STREAM, 0, 1, WORD(CANCEL)))
        other.send(frame(DATA, 0, 1, bytes(1 << 14)) * 100)  # is given back
        other.send(frame(PING, 0, 0, bytes(8)))
        await other.until(lambda: other.count(PING) == 1)
        assert other.count(WINDOW_UPDATE, 0) == 1 + 100 * (1 << 14) // ((1 << 19) + (1 << 14))

    serve(overrun)


def test_a_refused_sender_is_answered_at_once_and_its_message_is_not_kept():
    async def scenario(site):
        site.handler.refusal = UNKNOWN
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()))
        assert await client.status(1) == 16
        await client.until(lambda: 1 in client.resets)
        client.send(frame(DATA, 0, 1, bytes(1 << 14)) * 3)  # was on its way
        client.call(3)
        assert await client.status(3) == 16
        await client.until(lambda: client.resets == {1: NO_ERROR, 3: NO_ERROR})
        assert site.handler.refusals == [Reason.UNAUTHENTICATED] * 2
        assert not client.count(WINDOW_UPDATE, 1)

    serve(scenario)


def test_a_refusal_that_is_held_back_is_counted_once_also_when_its_sender_leaves():
    async def scenario(site):
        site.handler.refusal = UNKNOWN._replace(delay_ns=300 * NS_PER_MS)
        client, other = await site.connect(), await site.connect()
        client.call(1)
        other.call(1)
        await until(lambda: len(site.handler.requests) == 2)
        other.close()
        await until(lambda: len(site.handler.refusals) == 1)
        assert await client.status(1) == 16
        await asyncio.sleep(0.1)
        assert site.handler.refusals == [Reason.UNAUTHENTICATED] * 2

    serve(scenario)


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (frame(DATA, 1, 1), 13),
        (frame(DATA, 1, 1, b"\0\0"), 13),
        (frame(DATA, 1, 1, message(b"abc")[:-1]), 13),
        (frame(DATA, 1, 1, message(b"abc") + b"x"), 13),
        (frame(DATA, 1, 1, message(b"abc") * 2), 13),
        (frame(DATA, 1, 1, message(b"abc", flag=1)), 13),
        (frame(DATA, 1, 1, message(b"abc", flag=7)), 13),
        (frame(DATA, 0, 1, b"\0" + WORD((1 << 20) + 1)), 8),
    ],
    ids=["none", "prefix", "short", "long", "two", "no encoding", "bad flag", "too large"],
)
def test_a_message_that_is_none_is_answered_with_its_code(frames, code):
    async def scenario(site):
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()), frames)
        assert await client.status(1) == code
        assert "grpc-status-details-bin" not in client.headers[1][-1]
        assert not site.handler.taken
        assert len(site.handler.refusals) == 1
        client.call(3)
        assert await client.status(3) == 0

    serve(scenario, max_message_bytes=1 << 20)


def test_what_is_no_export_is_answered_and_counted():
    async def scenario(site):
        client = await site.connect()
        client.call(1, **{":path": "/a.B/C\u00e9"})
        trailers = await client.trailers(1)
        assert trailers["grpc-status"] == "12"
        assert "MetricsService/Export" in trailers["grpc-message"]
        for stream, head, status in (
            (3, {":method": "GET"}, "405"),
            (5, {"content-type": "text/html"}, "415"),
        ):
            client.send(frame(HEADERS, 5, stream, client.block(**head)))
            await client.until(lambda stream=stream: stream in client.ended)
            assert client.headers[stream] == [{":status": status}]
        assert site.handler.refusals == [Reason.PATH, Reason.METHOD, Reason.CONTENT_TYPE]

    serve(scenario)


def test_an_unknown_encoding_is_unimplemented_and_told_what_is_known():
    async def scenario(site):
        client = await site.connect()
        client.call(1, b"x", flag=1, grpc_encoding="br")
        trailers = await client.trailers(1)
        assert trailers["grpc-status"] == "12"
        assert trailers["grpc-accept-encoding"] == "identity,deflate,gzip,snappy,zstd"
        assert site.handler.refusals == [Reason.CONTENT_ENCODING]
        for stream, name in ((3, "zstd"), (5, "identity"), (7, None)):
            client.call(stream, b"x", flag=int(name == "zstd"), grpc_encoding=name)
            assert await client.status(stream) == 0
        client.call(9, b"plain", grpc_encoding="gzip")
        assert await client.status(9) == 0
        assert [one.encoding for one in site.handler.requests[1:]] == ["zstd", "", "", ""]

    serve(scenario)


def test_the_text_of_an_error_is_percent_encoded_and_no_line_of_its_own():
    async def scenario(site):
        site.handler.answer = OtlpAnswer(AnswerStatus.BAD_DATA, "100 % \u00e9\r\nx")
        client = await site.connect()
        client.call(1)
        assert (await client.trailers(1))["grpc-message"] == "100 %25 %C3%A9%0D%0Ax"

    serve(scenario)


def test_a_defect_is_one_calls_alone():
    async def scenario(site):
        client = await site.connect()
        site.handler.fault = ValueError("a defect")
        client.call(1)
        assert await client.status(1) == 13
        assert site.handler.refusals == [Reason.INTERNAL]
        site.handler.fault = None
        client.call(3)
        assert await client.status(3) == 0

    serve(scenario)


def test_slow_heads_and_messages_are_ended_and_counted():
    async def scenario(site):
        silent = await site.connect(begins=False)
        await silent.end()
        half = await site.connect()
        half.send(frame(HEADERS, 1, 1, b"\x83"))
        await half.end()
        assert site.server.counters.slow_heads == 2
        assert site.handler.refusals == [Reason.TIMEOUT] * 2
        slow = await site.connect()
        slow.send(frame(HEADERS, 4, 1, slow.block()), frame(DATA, 0, 1, b"\0"))
        assert await slow.status(1) == 4
        assert site.handler.refusals == [Reason.TIMEOUT] * 3

    serve(scenario, limits={"head_s": 0.4}, read_timeout_ns=0.4)


def test_a_clients_deadline_is_kept():
    async def scenario(site):
        site.handler.is_slow = True
        client = await site.connect()
        client.call(1, grpc_timeout="100m")
        client.send(frame(HEADERS, 4, 3, client.block(grpc_timeout="100000u")))
        client.call(5, grpc_timeout="1H")
        assert [await client.status(1), await client.status(3)] == [4, 4]
        assert site.handler.refusals == [Reason.TIMEOUT]  # of the one that the handler never had
        site.handler.go.set()
        assert await client.status(5) == 0

    serve(scenario, read_timeout_ns=10, limits={"head_s": 0.4})


def test_clients_that_take_nothing_are_ended_and_counted():
    async def scenario(site):
        client = await site.connect(settings(window=0))
        client.call(1)
        await client.until(lambda: client.resets == {1: CANCEL})
        assert site.server.counters.stalled == 1

    serve(scenario, limits={"stall_s": 0.2})


def test_a_client_that_never_reads_is_cut_off():
    async def scenario(site):
        site.handler.answer = OtlpAnswer(AnswerStatus.BAD_DATA, "x" * 1000)
        client = await site.connect()
        client._reader._transport.pause_reading()
        sending = True
        stream = 1
        while sending and stream < 2_000_000:
            for _ in range(100):
                client.call(stream)
                stream += 2
            await asyncio.sleep(0)
            sending = not site.server.counters.stalled
        assert site.server.counters.stalled == 1

    serve(scenario, limits={"stall_s": 0.2})


def test_one_connection_and_one_call_too_many():
    async def scenario(site):
        site.handler.is_slow = True
        first = await site.connect()
        first.call(1)
        await first.until(lambda: first.others)
        second = await site.connect()
        assert await second.end() == (CALM, "too many connections")
        assert site.server.counters.refused == 1
        first.call(3)
        first.call(5)
        assert await first.status(3) == 8
        assert "grpc-status-details-bin" in first.headers[3][-1]
        site.handler.go.set()
        assert await first.status(1) == 0
        first.close()
        await until(lambda: not site.server._shared.open)
        third = await site.connect()
        third.call(1)
        assert await third.status(1) == 0

    serve(scenario, max_in_flight=1, limits={"max_connections": 1})


def test_more_streams_than_were_allowed_are_refused_so_that_they_come_again():
    async def scenario(site):
        site.handler.is_slow = True
        client = await site.connect()
        for stream in (1, 3, 5):
            client.call(stream)
        await client.until(lambda: client.resets == {5: REFUSED})
        site.handler.go.set()
        assert [await client.status(1), await client.status(3)] == [0, 0]
        client.call(7)
        assert await client.status(7) == 0

    serve(scenario, max_streams=2)


def test_unfinished_messages_have_a_bound_together():
    async def scenario(site):
        client = await site.connect()
        client.send(
            frame(HEADERS, 4, 1, client.block()), frame(DATA, 0, 1, message(bytes(20000))[:15000])
        )
        client.send(
            frame(HEADERS, 4, 3, client.block()), frame(DATA, 0, 3, message(bytes(20000))[:15000])
        )
        assert await client.status(3) == 8
        assert site.handler.refusals == [Reason.OVERLOADED]
        client.send(frame(DATA, 1, 1, bytes(5005)))
        assert await client.status(1) == 0

    serve(scenario, max_buffered_bytes=22000)


def test_a_sender_that_leaves_is_counted_and_what_the_handler_has_is_applied():
    async def scenario(site):
        client = await site.connect()
        client.send(frame(HEADERS, 4, 1, client.block()), frame(DATA, 0, 1, b"\0\0"))
        await until(lambda: site.handler.requests)
        client.send(frame(RST_STREAM, 0, 1, WORD(CANCEL)))
        await until(lambda: site.handler.refusals == [Reason.CUT_SHORT])
        site.handler.is_slow = True
        client.call(3)
        await until(lambda: site.handler.taken)
        client.close()
        await until(lambda: not site.server._shared.open)
        assert site.server._shared.n_in_flight == 1
        site.handler.go.set()
        await until(lambda: not site.server._shared.n_in_flight)
        assert site.handler.refusals == [Reason.CUT_SHORT]

    serve(scenario)


def test_a_server_that_stops_answers_what_was_begun_and_takes_nothing_new():
    async def scenario(site):
        site.handler.is_slow = True
        client, idle = await site.connect(), await site.connect()
        client.call(1)
        await until(lambda: site.handler.taken)
        stopping = asyncio.ensure_future(site.server.stop(10))
        await client.until(lambda: client.count(GOAWAY) == 1)
        await client.until(lambda: client.count(PING) == 1)
        goaway = next(payload for kind, _, _, payload in client.others if kind == GOAWAY)
        assert goaway == WORD((1 << 31) - 1) + bytes(4)
        client.call(3)  # had been sent before it knew
        (ping,) = [payload for kind, _, _, payload in client.others if kind == PING]
        client.send(frame(PING, 1, 0, ping))
        await client.until(lambda: client.count(GOAWAY) == 2)
        assert client.others[-1][3] == WORD(3) + bytes(4)
        client.call(5)
        await asyncio.sleep(0.05)
        site.handler.go.set()
        assert [await client.status(1), await client.status(3)] == [0, 0]
        await client.end()
        assert 5 not in client.headers
        await idle.end()  # it never answered
        await stopping
        with pytest.raises(ConnectionRefusedError):
            await site.connect()

    serve(scenario)


def test_a_connection_that_was_just_accepted_when_the_server_stops_is_sent_away():
    async def scenario(site):
        site.server._shared.is_stopping = True
        assert await (await site.connect()).end() == (NO_ERROR, "shutting down")

    serve(scenario)


def test_connections_end_by_age_and_idleness_and_silence():
    async def scenario(site):
        client = await site.connect()
        client.call(1)
        assert await client.status(1) == 0
        assert await client.end() == (NO_ERROR, "")

    serve(scenario, age_ns=0.1)
    serve(scenario, idle_ns=0.1)

    async def silence(site):
        client = await site.connect()
        await client.until(lambda: client.count(PING) == 1)
        client.send(frame(PING, 1, 0, client.others[-1][3]))
        await client.until(lambda: client.count(PING) == 2)
        await client.until(lambda: client.is_closed)

    serve(silence, ping_after_ns=0.1, ping_timeout_ns=0.6)


def test_calls_of_an_old_connection_have_their_grace():
    async def scenario(site):
        site.handler.is_slow = True
        client = await site.connect()
        client.call(1)
        await client.until(lambda: client.is_closed)
        assert 1 not in client.headers
        site.handler.go.set()
        await until(lambda: not site.server._shared.n_in_flight)

    serve(scenario, age_ns=0.05, age_grace_ns=0.2)


def test_a_method_beside_the_exports_is_asked_in_any_encoding():
    import zstandard

    asked = []

    def ask(call, body):
        asked.append(body)
        call.send(b"one")
        call.send(b"two")
        call.end(0)

    async def scenario(site):
        client = await site.connect()
        client.call(1, b"plain", **{":path": "/a.B/C"})
        client.call(
            3, zstandard.compress(b"zstd"), flag=1, grpc_encoding="zstd", **{":path": "/a.B/C"}
        )
        client.call(5, b"no zstd", flag=1, grpc_encoding="zstd", **{":path": "/a.B/C"})
        client.call(7, b"", grpc_encoding="br", **{":path": "/a.B/C"})
        client.send(
            frame(HEADERS, 4, 9, client.block(**{":path": "/a.B/C"})),
            frame(DATA, 0, 9, b"\0" + WORD(1 << 20)),
        )
        assert [await client.status(stream) for stream in (1, 3, 5, 7, 9)] == [0, 0, 3, 12, 8]
        assert client.data[1] == message(b"one") + message(b"two")
        assert asked == [b"plain", b"zstd"]
        assert not site.handler.requests

    serve(scenario, methods={b"/a.B/C": ask})
