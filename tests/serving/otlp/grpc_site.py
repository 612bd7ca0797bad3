"""A gRPC server with a handler that notes what it is called with, and clients of single frames."""

import asyncio
import struct

from tests.serving.otlp.http2 import (
    Client,
)

from ingero.config import Endpoint
from ingero.serving.connections import ConnectionLimits
from ingero.serving.otlp.answers import TAKEN, AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.grpc_server import OtlpGrpcServer
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

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
