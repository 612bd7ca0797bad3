"""Flow control of the OTLP/gRPC server: windows of streams and connections, and who is let in."""

import asyncio
import struct

from tests.serving.otlp.grpc_site import (
    CANCEL,
    FLOW,
    NO_ERROR,
    UNKNOWN,
    WORD,
    serve,
    until,
)
from tests.serving.otlp.http2 import (
    DATA,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    message,
    settings,
)

from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer, Reason
from ingero.units import NS_PER_MS


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
