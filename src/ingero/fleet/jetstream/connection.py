"""The way to the site's NATS servers: one connection, the stream of pushes, the bucket of documents, that of leases.

Starts without a server and looks for one until it has found it; what is asked meanwhile raises `RetryableError`.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, NamedTuple

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import MaxPayloadError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    KeyValueConfig,
    StreamConfig,
)
from nats.js.errors import APIError, NotFoundError

from ingero.errors import PermanentError, RetryableError
from ingero.fleet.jetstream.config import NatsConfig
from ingero.serving.tls import build_client_context
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S, NS_PER_US

_RETRY_S: Final = 0.5
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_IDLE_S: Final = 2.0
"""A reader that got nothing for this long asks whether its consumer still exists."""
_WRONG_LAST: Final = frozenset({10071, 10164})
"""``err_code`` of a message whose expected last sequence is another (nats-server, ``errors.json``)."""
_LAST: Final = "Nats-Expected-Last-Subject-Sequence"
_log = logging.getLogger("ingero.fleet.nats")


class OvertakenError(RetryableError):
    """Somebody else has written the document since it was read."""


class StoredDocument(NamedTuple):
    """A document.

    Attributes:
        content: Its bytes.
        revision: By which the next one says what it replaces.
    """

    content: bytes
    revision: int


class StoredMessage(NamedTuple):
    """A message of a stream.

    Attributes:
        subject: Its subject.
        data: Its bytes.
        seq: Its number in the stream.
        stored_wall_ns: When the server stored it, by the server's clock.
    """

    subject: str
    data: bytes
    seq: int
    stored_wall_ns: int


class NatsConnection:
    """One connection; everything runs on the event loop.

    Args:
        config: Where, and how the stream is to be.
        clock: Limits how often the log says the same.

    Attributes:
        log: For what fails again and again while no server answers: by what fails, a line a minute.
    """

    def __init__(self, config: NatsConfig, clock: Clock) -> None:
        self.log = RateLimitedLog(_log, clock)
        self._config = config
        self.pushes = f"{config.name}-pushes"
        self.documents = f"{config.name}-state"
        self.leases = f"{config.name}-leases"
        self.prefix = f"{config.name}.push."
        self._client: Client | None = None
        self._js: JetStreamContext | None = None
        self._is_ready = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether a server answers now."""
        return self._is_ready.is_set() and self._client is not None and self._client.is_connected

    def open(self) -> None:
        """Begin to look for a server."""
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def close(self) -> None:
        """End the connection."""
        if self._opening is not None:
            self._opening.cancel()
        client, self._client = self._client, None
        self._is_ready.clear()
        if client is not None:
            with suppress(NatsError, TimeoutError):
                await client.close()

    async def wait(self) -> None:
        """Wait until the stream and the buckets were there for the first time."""
        await self._is_ready.wait()

    async def append(self, token: str, content: bytes) -> int:
        """Add a push of a cluster to the stream; its number once as many servers as configured have it.

        Raises:
            PermanentError: It is too large for the servers.
            RetryableError: No server said that it has it; it may have it all the same.
        """
        with _translating():
            reply = await self._stream.publish(
                self.prefix + token, content, timeout=self._config.timeout / NS_PER_S
            )
            return reply.seq

    async def list_clusters(self) -> list[str]:
        """Tokens of the clusters of which the stream has pushes. Raises RetryableError."""
        with _translating():
            info = await self._stream.stream_info(self.pushes, subjects_filter=self.prefix + "*")
        return [subject.removeprefix(self.prefix) for subject in info.state.subjects or {}]

    async def find_last(self, token: str) -> int:
        """Number of a cluster's newest push; 0 when there is none. Raises RetryableError."""
        with _translating():
            try:
                found = await self._stream.get_last_msg(self.pushes, self.prefix + token)
            except NotFoundError:
                return 0
            return found.seq or 0

    async def read(self, bucket: str, key: str) -> StoredDocument | None:
        """A document; None when there is none. Raises RetryableError."""
        with _translating():
            try:
                found = await self._stream.get_last_msg(f"KV_{bucket}", f"$KV.{bucket}.{key}")
            except NotFoundError:
                return None
            return StoredDocument(found.data or b"", found.seq or 0)

    async def write(self, bucket: str, key: str, content: bytes, revision: int) -> int:
        """Replace a document by another; its revision.

        Raises:
            OvertakenError: The document has another revision than this; 0 is that there is none.
            RetryableError: No server said that it has it.
        """
        with _translating():
            reply = await self._stream.publish(
                f"$KV.{bucket}.{key}",
                content,
                timeout=self._config.timeout / NS_PER_S,
                headers={_LAST: str(revision)},
            )
            return reply.seq

    async def follow(self, stream: str, subject: str, seq: int) -> AsyncIterator[StoredMessage]:
        """Each message of a subject that the stream has and gets, in order, from this number on; without end.

        A gap, as after a broken connection, is read again.
        """
        while True:
            try:
                async for message in self._read_on(stream, subject, seq):
                    seq = message.seq + 1
                    yield message
            except (NatsError, TimeoutError, OSError, RetryableError) as error:
                self.log.write(
                    ("read", subject), logging.WARNING, "reading begins again",
                    subject=subject, seq=seq, error=_describe(error),
                )  # fmt: skip
            await asyncio.sleep(_RETRY_S)
            await self.wait()

    async def _read_on(self, stream: str, subject: str, seq: int) -> AsyncIterator[StoredMessage]:
        """The same until the consumer is gone or has left one out."""
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=max(seq, 1),
            ack_policy=AckPolicy.NONE,
            inactive_threshold=60.0,
            mem_storage=True,
            num_replicas=1,
        )
        subscription = await self._stream.subscribe(
            subject, stream=stream, config=config, manual_ack=True, flow_control=True,
            idle_heartbeat=1.0,
        )  # fmt: skip
        n_read = 0
        try:
            while True:
                try:
                    message = await subscription.next_msg(_IDLE_S)
                except TimeoutError:
                    await subscription.consumer_info()  # raises when there is none any more
                    continue
                place = _read_place(message)
                n_read += 1
                if place[1] != n_read:
                    return
                yield StoredMessage(message.subject, message.data, place[0], _read_time(message))
        finally:
            with suppress(NatsError, TimeoutError, OSError):
                await subscription.unsubscribe()

    @property
    def _stream(self) -> JetStreamContext:
        if self._js is None or not self.is_ready:
            raise RetryableError("no NATS server answers")
        return self._js

    async def _open(self) -> None:
        config = self._config
        context = None if config.tls is None else build_client_context(config.tls)
        while not self._is_ready.is_set():
            try:
                await self._open_once(context)
            except (NatsError, TimeoutError, OSError) as error:
                self.log.write(
                    "open", logging.WARNING, "no NATS server answers",
                    servers=", ".join(config.servers), error=_describe(error),
                )  # fmt: skip
                client, self._client = self._client, None
                if client is not None:
                    await client.close()
                await asyncio.sleep(_RETRY_S)

    async def _open_once(self, context: ssl.SSLContext | None) -> None:
        config = self._config
        self._client = client = await nats.connect(
            list(config.servers),
            token=None if config.token is None else config.token.get_secret_value(),
            tls=context,
            connect_timeout=2,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=_RETRY_S,
            error_cb=self._log_error,
            disconnected_cb=_log_loss,
            reconnected_cb=_log_return,
        )
        js = client.jetstream(timeout=config.timeout / NS_PER_S)
        await self._declare(js)
        self._js = js
        self._is_ready.set()
        _log.info("connected to %s", client.connected_url and client.connected_url.netloc)

    async def _log_error(self, error: Exception) -> None:
        self.log.write("client", logging.WARNING, "the NATS client reports", error=_describe(error))

    async def _declare(self, js: JetStreamContext) -> None:
        """Make the stream and the buckets, or bring the stream of an earlier start to these settings."""
        config = self._config
        stream = StreamConfig(
            name=self.pushes,
            subjects=[self.prefix + "*"],
            max_age=config.window / NS_PER_S,
            max_bytes=config.max_size,
            num_replicas=config.replicas,
            discard=DiscardPolicy.OLD,
            duplicate_window=min(120.0, config.window / NS_PER_S),
        )
        try:
            await js.stream_info(self.pushes)
        except NotFoundError:
            await js.add_stream(stream)
        else:
            await js.update_stream(stream)
        for bucket, ttl_s in ((self.documents, None), (self.leases, config.lease / NS_PER_S)):
            await js.create_key_value(
                KeyValueConfig(bucket=bucket, ttl=ttl_s, replicas=config.replicas)
            )


def _read_place(message: Msg) -> tuple[int, int]:
    """Number of a message in its stream, and among those of its consumer."""
    place = message.metadata.sequence
    return place.stream, place.consumer


def _read_time(message: Msg) -> int:
    """When the server stored a message, Unix nanoseconds, to the microsecond."""
    since = message.metadata.timestamp - _EPOCH
    return (since.days * 86_400 + since.seconds) * NS_PER_S + since.microseconds * NS_PER_US


@contextmanager
def _translating() -> Iterator[None]:
    """The client's errors as ours."""
    try:
        yield
    except MaxPayloadError as error:
        raise PermanentError("the push is larger than the NATS servers take") from error
    except APIError as error:
        if error.err_code in _WRONG_LAST:
            raise OvertakenError("another Fleet has written since") from error
        raise RetryableError(f"NATS refused: {error.description or error}") from error
    except (NatsError, TimeoutError, OSError) as error:
        raise RetryableError(f"NATS does not answer: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


async def _log_loss() -> None:
    _log.warning("connection lost; pushes are refused until a server answers")


async def _log_return() -> None:
    _log.info("connected again")
