"""What a slow, silent or greedy client may hold of a listener."""

import asyncio
import socket

import pytest

from ingero.config import Endpoint
from ingero.serving.asgi import AsgiServer, AsgiSettings
from ingero.serving.connections import ConnectionLimits


async def _hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


def serve(scenario, app=_hello, **limits):
    async def run():
        settings = AsgiSettings(drain_s=0, limits=ConnectionLimits(**limits))
        server = AsgiServer(app, Endpoint("127.0.0.1", 0), settings=settings)
        await server.start()
        try:
            return await scenario(server)
        finally:
            await server.stop()

    return asyncio.run(run())


async def dial(server):
    return await asyncio.open_connection(server.bound.host, server.bound.port)


GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"G", b"GET / HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_arrive_ends_the_connection(sent):
    async def scenario(server):
        reader, writer = await dial(server)
        writer.write(sent)
        answer = await reader.read()
        writer.close()
        return answer, server.counters.slow_heads

    answer, n_slow = serve(scenario, head_s=0.05)
    assert n_slow == 1
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""
    assert b"head_timeout" in answer or not sent


def test_a_head_that_trickles_is_not_saved_by_its_trickling():
    async def scenario(server):
        reader, writer = await dial(server)
        writer.write(b"GET /")
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.005)  # each byte comes sooner than the limit, the head never ends
            if server.counters.slow_heads:
                break
        writer.close()
        del reader
        return server.counters.slow_heads

    assert serve(scenario, head_s=0.05) == 1


def test_the_second_request_of_a_connection_is_held_to_the_same_time():
    async def scenario(server):
        reader, writer = await dial(server)
        writer.write(GET)
        await reader.readuntil(b"hello\r\n0\r\n\r\n")
        writer.write(b"GET")
        answer = await reader.read()
        writer.close()
        return answer

    assert serve(scenario, head_s=0.05).startswith(b"HTTP/1.1 408 ")


def test_a_slow_answer_is_not_a_slow_head():
    async def slow(scope, receive, send):
        await asyncio.sleep(0.2)
        await _hello(scope, receive, send)

    async def scenario(server):
        reader, writer = await dial(server)
        writer.write(GET)
        answer = await reader.readuntil(b"hello\r\n0\r\n\r\n")
        writer.close()
        return answer

    assert b"200 OK" in serve(scenario, slow, head_s=0.05)


def test_a_head_without_end_is_refused():
    async def scenario(server):
        reader, writer = await dial(server)
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"y" * 5_000)
        answer = await reader.read()
        writer.close()
        return answer

    assert serve(scenario, max_head_bytes=4096).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize(
    ("limits", "code"),
    [({"max_connections": 3}, "503"), ({"max_per_peer": 3}, "503")],
)
def test_connections_beyond_the_limit_are_told_so_and_room_comes_back(limits, code):
    async def scenario(server):
        held = [await dial(server) for _ in range(3)]
        reader, writer = await dial(server)
        refused = await reader.read()
        writer.close()
        _, first = held.pop()
        first.close()
        await first.wait_closed()
        while True:  # the server hears of it soon
            reader, writer = await dial(server)
            writer.write(GET)
            answer = await reader.readline()
            writer.close()
            if b"200" in answer:
                break
        for _, writer in held:
            writer.close()
        return refused

    refused = serve(scenario, **limits)
    assert refused.startswith(f"HTTP/1.1 {code} ".encode())
    assert b"retry-after: 5" in refused


def test_a_client_that_never_reads_is_cut_off():
    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 100_000, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def scenario(server):
        with socket.create_connection((server.bound.host, server.bound.port)) as link:
            link.setblocking(False)
            link.send(GET)
            while not server.counters.stalled:  # noqa: ASYNC110 - the counter has no event
                await asyncio.sleep(0)
        return True

    assert serve(scenario, endless, stall_s=0.05)
