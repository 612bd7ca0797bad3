"""A bare HTTP/2 client that says what it is told to, right or wrong; it shares no code with the server but hpack."""

import asyncio
import struct
from contextlib import suppress

from hpack import Decoder, Encoder

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)  # fmt: skip
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
METRICS = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
HEAD = {
    ":method": "POST", ":scheme": "http", ":path": METRICS, ":authority": "x",
    "content-type": "application/grpc", "te": "trailers",
}  # fmt: skip


def frame(kind, flags, stream, payload=b""):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(body, flag=0):
    return bytes([flag]) + struct.pack(">I", len(body)) + body


def settings(**values):
    numbers = {"table": 1, "window": 4, "frame": 5}
    return b"".join(struct.pack(">HI", numbers[name], value) for name, value in values.items())


class Client:
    """One connection.

    Attributes:
        headers, data, resets: What came, by stream.
        others: Frames of other kinds: kind, flags, stream, payload.
    """

    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._decoder, self.encoder = Decoder(), Encoder()
        self.headers, self.data, self.resets, self.others = {}, {}, {}, []
        self.ended = set()
        self.is_closed = False

    @classmethod
    async def connect(cls, endpoint, first=b"", begins=True):
        client = cls(*await asyncio.open_connection(endpoint.host, endpoint.port))
        if begins:
            client.send(PREFACE, frame(SETTINGS, 0, 0, first))
        return client

    def send(self, *frames):
        self._writer.write(b"".join(frames))

    def block(self, **more):
        fields = {**HEAD, **{name.replace("_", "-"): value for name, value in more.items()}}
        fields = {name: value for name, value in fields.items() if value is not None}
        return self.encoder.encode(sorted(fields.items(), key=lambda one: one[0][0] != ":"))

    def call(self, stream, body=b"", ends=True, flag=0, **more):
        self.send(frame(HEADERS, 4, stream, self.block(**more)))
        whole = message(body, flag)
        parts = [whole[at : at + (1 << 14)] for at in range(0, len(whole), 1 << 14)]
        self.send(*(frame(DATA, 0, stream, part) for part in parts[:-1]))
        self.send(frame(DATA, int(ends), stream, parts[-1]))

    def close(self):
        self._writer.close()

    async def leave(self):
        """Close, and wait until the socket is."""
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def read(self):
        """Take one frame; False at the end."""
        try:
            head = await self._reader.readexactly(9)
            length = int.from_bytes(head[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_closed = True
            return False
        if kind == HEADERS:
            assert flags & 4
            self.headers.setdefault(stream, []).append(dict(self._decoder.decode(payload)))
        elif kind == DATA:
            self.data[stream] = self.data.get(stream, b"") + payload
        elif kind == RST_STREAM:
            self.resets[stream] = int.from_bytes(payload, "big")
        else:
            self.others.append((kind, flags, stream, payload))
        if kind in (HEADERS, DATA) and flags & 1:
            self.ended.add(stream)
        return True

    async def until(self, condition, seconds=10):
        async with asyncio.timeout(seconds):
            while not condition():
                if not await self.read():
                    assert condition(), "the connection ended"
        return self

    async def trailers(self, stream):
        await self.until(lambda: stream in self.ended)
        return self.headers[stream][-1]

    async def status(self, stream):
        return int((await self.trailers(stream))["grpc-status"])

    async def end(self):
        """Read until the server closes; the code and text of its last GOAWAY."""
        await self.until(lambda: self.is_closed)
        goaways = [payload for kind, _, _, payload in self.others if kind == GOAWAY]
        return struct.unpack(">I", goaways[-1][4:8])[0], goaways[-1][8:].decode()

    def count(self, kind, stream=None):
        return sum(one[0] == kind and stream in (None, one[2]) for one in self.others)
