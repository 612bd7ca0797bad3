"""Slowness, numbers and ages that the OTLP/gRPC server bounds, and its end."""

import asyncio

import pytest
from tests.serving.otlp.grpc_site import (
    CALM,
    CANCEL,
    NO_ERROR,
    REFUSED,
    WORD,
    serve,
    until,
)
from tests.serving.otlp.http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    frame,
    message,
    settings,
)

from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer, Reason


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
