"""What the exporters with a sending queue share: everything but the protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from pydantic import Field

from ingero.errors import BadDataError, PermanentError, RetryableError
from ingero.fleet.component import Authenticator, ComponentId, Host
from ingero.fleet.consumer import Batch
from ingero.fleet.helpers.clients import ClientConfig, ConnectionConfig, find_authenticator, reveal
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig
from ingero.fleet.helpers.sending import Sender
from ingero.fleet.helpers.sending_report import REJECTED
from ingero.otlp.client.reply import OtlpSender
from ingero.otlp.names import Signal

MakeHeaders: TypeAlias = Callable[[], Mapping[str, str]]


class OtlpClientConfig(ClientConfig):
    """Where batches wait, and what happens to those that were refused."""

    sending_queue: QueueConfig = Field(QueueConfig(), description="Where batches wait.")
    retry_on_failure: RetryConfig = Field(
        RetryConfig(), description="What happens after a refusal."
    )

    @property
    def waiting(self) -> tuple[QueueConfig, RetryConfig]:
        """Settings of its queue and retries."""
        return self.sending_queue, self.retry_on_failure


class OpenClient:
    """A connection that is closed once no request is under way on it any more: a cut one may have been taken."""

    def __init__(self, sender: OtlpSender) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._n_uses = 0
        self._is_closed = False

    @contextmanager
    def use(self) -> Iterator[OtlpSender]:
        """Send on it. Raises RetryableError when no more is sent."""
        with self._lock:
            if self._is_closed:
                raise RetryableError("the exporter is stopped")
            self._n_uses += 1
        try:
            yield self._sender
        finally:
            self._end_use()

    def close(self) -> None:
        """Send no more; what is under way has its answer first."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._n_uses += 1
        self._end_use()

    def _end_use(self) -> None:
        with self._lock:
            self._n_uses -= 1
            is_unused = self._is_closed and not self._n_uses
        if is_unused:
            self._sender.close()


class QueuedOtlpExporter:
    """Sends batches through a queue.

    Args:
        component: Its id.
        config: Settings of its connection.
        waiting: Those of its queue and retries.
        open_sender: Opens the connection; is given what makes the headers of each request. Raises IngeroError.
        find_destination: Where a signal goes, for messages; raises BadDataError when there is nowhere.
    """

    def __init__(
        self,
        component: ComponentId,
        config: ConnectionConfig,
        waiting: tuple[QueueConfig, RetryConfig],
        open_sender: Callable[[Host, MakeHeaders], OtlpSender],
        find_destination: Callable[[Signal], str],
    ) -> None:
        self._name = str(component)
        self._config = config
        self._open_sender = open_sender
        self._find_destination = find_destination
        self._queue = Sender(component, self._deliver, *waiting)
        self._auth: Authenticator | None = None
        self._client: OpenClient | None = None

    async def start(self, host: Host) -> None:
        """Open the connection. Raises IngeroError for unusable TLS files or an unknown authenticator."""
        self._clock = host.clock
        self._auth = find_authenticator(host, self._config.auth)
        self._client = OpenClient(self._open_sender(host, self._make_headers))
        self._rejected = host.meter.counter(REJECTED).bound(exporter=self._name)
        self._queue.start(host)

    async def stop(self) -> None:
        """Send what waits, then close the connection."""
        try:
            await self._queue.stop()
        finally:
            if self._client is not None:
                self._client.close()

    def consume(self, batch: Batch) -> None:
        """Queue a batch; see `Sender.consume`."""
        self._queue.consume(batch)

    def find_refusal(self, batch: Batch) -> RetryableError | None:
        """Whether its queue is full; see `Sender.find_refusal`."""
        del batch
        return self._queue.find_refusal()

    def _make_headers(self) -> dict[str, str]:
        own = self._auth.client_headers() if self._auth else {}
        return reveal(self._config.headers) | dict(own)

    def _deliver(self, batch: Batch) -> None:
        assert self._client is not None
        try:
            destination = self._find_destination(batch.signal)
            with self._client.use() as sender:
                reply = sender.send(batch.export, self._clock.wall_ns())
        except BadDataError as error:
            raise PermanentError(error.message) from error
        if not reply.is_taken:
            message = f"{destination}: {reply.words}"
            if reply.is_retryable:
                raise RetryableError(message, retry_after_ns=reply.retry_after_ns)
            raise PermanentError(message)
        if reply.n_rejected:
            self._rejected(reply.n_rejected)
