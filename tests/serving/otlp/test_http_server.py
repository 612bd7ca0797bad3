"""What a handler that takes its time, and slow or greedy senders, meet at the OTLP/HTTP server."""

import asyncio
import socket

import pytest

from ingero.config import Endpoint
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.answers import TAKEN, AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.http_head import OtlpHttpSettings
from ingero.serving.otlp.http_server import OtlpHttpServer
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_MS, NS_PER_S


class Handler:
    """Notes what it is called with; answers when told to."""

    def __init__(self):
        self.taken, self.refusals = [], []
        self.go, self.room = asyncio.Event(), asyncio.Event()
        self.waits, self.fault, self.refusal = False, None, None

    def open(self, request):
        return None

    def admit(self, request, *, is_full):
        return self.refusal

    def reserve(self, request):
        return self._reserve() if self.waits else None

    async def _reserve(self):
        await self.room.wait()
        return self.refusal

    async def take(self, request, body):
        self.taken.append(body)
        await self.go.wait()
        if self.fault is not None:
            raise self.fault
        return TAKEN if body != b"bad" else OtlpAnswer(AnswerStatus.BAD_DATA, "it is bad")

    def refused(self, request, refusal):
        self.refusals.append(refusal.reason)

    def find_headers(self, request):
        return None


WRITERS = []
"""Of the running scenario; closed at its end."""


def serve(scenario, *, read_s=20, idle_s=20, **limits):
    async def run():
        handler = Handler()
        settings = OtlpHttpSettings(
            read_timeout_ns=round(read_s * NS_PER_S),
            idle_timeout_ns=round(idle_s * NS_PER_S),
            connections=ConnectionLimits(**limits),
        )
        clock = SystemClock()
        server = OtlpHttpServer(Endpoint("127.0.0.1", 0), settings, handler, clock)
        await server.start()
        try:
            async with asyncio.timeout(30):
                return await scenario(server, handler)
        finally:
            for writer in WRITERS:
                writer.close()
            WRITERS.clear()
            await server.stop(0)

    return asyncio.run(run())


async def dial(server):
    reader, writer = await asyncio.open_connection(server.bound.host, server.bound.port)
    WRITERS.append(writer)
    return reader, writer


def head(body=b"{}", *lines, n_bytes=None):
    length = len(body) if n_bytes is None else n_bytes
    fixed = ("Host: x", "Content-Type: application/json", f"Content-Length: {length}", *lines)
    return ("\r\n".join(("POST /v1/logs HTTP/1.1", *fixed)) + "\r\n\r\n").encode()


async def read_status(reader):
    """Status and body of the next answer."""
    text = await reader.readuntil(b"\r\n\r\n")
    length = int(text.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(text.split()[1]), await reader.readexactly(length)


async def turn():
    """Let the server read what was written."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_pipelined_requests_are_answered_in_order_by_a_handler_that_takes_its_time():
    async def scenario(server, handler):
        reader, writer = await dial(server)
        writer.write(head() + b"{}" + head(b"bad") + b"bad" + b"nonsense\r\n\r\n")
        while not handler.taken:
            await turn()
        await turn()
        before = list(handler.taken)
        handler.go.set()
        statuses = [(await read_status(reader))[0] for _ in range(3)]
        return before, statuses, await reader.read(), handler

    before, statuses, rest, handler = serve(scenario)
    assert before == [b"{}"]  # the second waits for the answer of the first
    assert handler.taken == [b"{}", b"bad"]
    assert (statuses, rest) == ([200, 400, 400], b"")
    assert handler.refusals == [Reason.BAD_REQUEST]


def test_a_handler_that_fails_later_is_a_500_and_the_connection_lives(caplog):
    async def scenario(server, handler):
        handler.go.set()
        handler.fault = ZeroDivisionError("a bug")
        reader, writer = await dial(server)
        writer.write(head() + b"{}")
        failed = await read_status(reader)
        handler.fault = None
        writer.write(head() + b"{}")
        return failed[0], (await read_status(reader))[0], handler.refusals

    assert serve(scenario) == (500, 200, [Reason.INTERNAL])
    assert "a bug" in caplog.text


def test_a_body_is_not_read_before_there_is_room_for_it():
    async def scenario(server, handler):
        handler.waits = True
        handler.go.set()
        n_bytes = 8 << 20
        with socket.create_connection((server.bound.host, server.bound.port)) as link:
            link.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(link, head(n_bytes=n_bytes))
            sending = loop.create_task(loop.sock_sendall(link, b" " * n_bytes))
            done, _ = await asyncio.wait([sending], timeout=0.2)
            handler.room.set()
            await sending
            answer = await loop.sock_recv(link, 65_536)
        return done, answer, handler

    done, answer, handler = serve(scenario)
    assert not done
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert [len(body) for body in handler.taken] == [8 << 20]


def test_no_room_in_time_is_the_handlers_refusal_and_the_end():
    async def scenario(server, handler):
        handler.waits = True
        reader, writer = await dial(server)
        writer.write(head(n_bytes=100) + b"x")
        await turn()
        answer = OtlpAnswer(AnswerStatus.OVERLOADED, "no room", 1)
        handler.refusal = RequestRefusal(answer, Reason.OVERLOADED)
        handler.room.set()
        return await reader.read(), handler

    got, handler = serve(scenario)
    assert got.startswith(b"HTTP/1.1 429 ")
    assert b"retry-after: 1\r\n" in got
    assert (handler.taken, handler.refusals) == ([], [Reason.OVERLOADED])


def test_a_sender_that_leaves_while_it_waits_for_room_is_forgotten():
    async def scenario(server, handler):
        handler.waits = True
        _, writer = await dial(server)
        writer.write(head(n_bytes=100) + b"{}")
        await turn()
        writer.transport.abort()
        await turn()
        handler.room.set()  # nothing is read before, so nothing is noticed either
        while not handler.refusals:
            await turn()
        return handler.refusals

    assert serve(scenario) == [Reason.CUT_SHORT]


def test_a_refusal_that_is_held_back_is_counted_when_it_is_answered():
    async def scenario(server, handler):
        answer = OtlpAnswer(AnswerStatus.UNAUTHENTICATED, "who is it")
        handler.refusal = RequestRefusal(answer, Reason.UNAUTHENTICATED, 100 * NS_PER_MS)
        reader, writer = await dial(server)
        began_s = asyncio.get_running_loop().time()
        writer.write(head() + b"{}")
        status, _ = await read_status(reader)
        return status, asyncio.get_running_loop().time() - began_s, handler.refusals

    status, took_s, refusals = serve(scenario)
    assert (status, refusals) == (401, [Reason.UNAUTHENTICATED])
    assert took_s >= 0.1


def test_a_request_that_is_being_answered_is_finished_while_the_server_stops():
    async def scenario(server, handler):
        reader, writer = await dial(server)
        writer.write(head() + b"{}")
        while not handler.taken:
            await turn()
        stopping = asyncio.create_task(server.stop(20))
        await turn()
        handler.go.set()
        got = await reader.read()
        await stopping
        return got

    assert serve(scenario).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"P", b"POST /v1/logs HTTP/1.1\r\nhost: x\r\n"])
def test_a_head_that_does_not_arrive_ends_the_connection_long_before_an_idle_one(sent):
    async def scenario(server, handler):
        reader, writer = await dial(server)
        writer.write(sent)
        return await reader.read(), server.counters.slow_heads

    answer, n_slow = serve(scenario, head_s=0.05)
    assert n_slow == 1
    assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""


def test_a_connection_that_has_pushed_may_be_idle_for_longer_than_a_head():
    async def scenario(server, handler):
        handler.go.set()
        reader, writer = await dial(server)
        for _ in range(2):
            writer.write(head() + b"{}")
            assert (await read_status(reader))[0] == 200
            await asyncio.sleep(0.2)
        return server.counters.slow_heads

    assert serve(scenario, head_s=0.05) == 0


@pytest.mark.parametrize("limits", [{"max_connections": 3}, {"max_per_peer": 3}])
def test_connections_beyond_the_limit_are_told_so_and_room_comes_back(limits):
    async def scenario(server, handler):
        handler.go.set()
        held = [await dial(server) for _ in range(3)]
        reader, _ = await dial(server)
        refused = await reader.read()
        held.pop()[1].close()
        while True:  # the server learns of it soon
            reader, writer = await dial(server)
            writer.write(head() + b"{}")
            answer = await reader.readline()
            if b" 200 " in answer:
                return refused, server.counters.refused
            writer.close()

    refused, n_refused = serve(scenario, **limits)
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5\r\n" in refused
    assert n_refused >= 1


def test_a_sender_that_never_reads_is_cut_off():
    async def scenario(server, handler):
        handler.go.set()
        with socket.socket() as link:
            # Before it connects: a window that shrinks later can end in both kernels waiting for each other.
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            link.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(link, (server.bound.host, server.bound.port))
            sending = loop.create_task(loop.sock_sendall(link, (head() + b"{}") * 200_000))
            while not server.counters.stalled:  # noqa: ASYNC110 - the counter has no event
                await asyncio.sleep(0)
            with pytest.raises(ConnectionError):
                await sending
        return True

    assert serve(scenario, stall_s=0.05)
