"""The receivers' end: pushes go to the stream, and what judges say of thresholds is kept at hand."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from ingero.errors import BadDataError, DeliveryError, RetryableError
from ingero.fleet.component import PushAnswer, PushContext
from ingero.fleet.jetstream.messages import (
    ClusterAnswers,
    LoggedPush,
    build_token,
    decode_answers,
    encode_push,
)
from ingero.fleet.jetstream.publishing import ANSWERS_KEY
from ingero.fleet.jetstream.telemetry import STORED
from ingero.fleet.workers.link import MAX_WAITING_BYTES
from ingero.fleet.workers.messages import RelayedPush, unpack_threshold
from ingero.telemetry.metrics import MeterRegistry

# A Fleet without a stream has no use for NATS's client, which takes long to import.
if TYPE_CHECKING:
    from ingero.fleet.jetstream.connection import NatsConnection


class PushLog(Protocol):
    """Capability where pushes go to a stream: receivers that find it answer a push when the stream has it."""

    async def append(
        self, clusters: Sequence[str], push: RelayedPush, received_wall_ns: int
    ) -> None:
        """Store a push under each of its clusters.

        Raises:
            PermanentError: It is too large.
            RetryableError: It may not be stored; its sender is to send it again.
        """
        ...

    def answer(self, push: PushContext) -> PushAnswer | None:
        """The threshold for the sender of a push, as its cluster's judge last said."""
        ...

    def find_question(self, cluster_id: str, node_id: str) -> str | None:
        """What the judge asks a node."""
        ...


class StreamRelay:
    """A `PushLog`.

    Args:
        connection: The way to the servers.
        meter: Where pushes are counted.
        is_ours: Whether this Fleet judges a cluster, and so has nothing to learn of it.
    """

    def __init__(
        self, connection: NatsConnection, meter: MeterRegistry, is_ours: Callable[[str], bool]
    ) -> None:
        self._connection = connection
        self._is_ours = is_ours
        self._loop = asyncio.get_running_loop()
        stored = meter.counter(STORED)
        self._count = {one: stored.bound(outcome=one) for one in ("stored", "refused")}
        self._n_waiting_bytes = 0
        self._answers: dict[str, ClusterAnswers] = {}
        self._following: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow what judges say."""
        self._following = self._loop.create_task(self._follow())

    async def stop(self) -> None:
        """No longer follow what judges say."""
        if self._following is not None:
            self._following.cancel()

    async def append(
        self, clusters: Sequence[str], push: RelayedPush, received_wall_ns: int
    ) -> None:
        """See `PushLog`."""
        n_bytes = len(push.body)
        if self._n_waiting_bytes and self._n_waiting_bytes + n_bytes > MAX_WAITING_BYTES:
            self._count["refused"](1)
            raise RetryableError("too many pushes wait for the stream")
        self._n_waiting_bytes += n_bytes
        try:
            for cluster_id in clusters:
                logged = LoggedPush(cluster_id, len(clusters) > 1, received_wall_ns, push)
                await self._connection.append(build_token(cluster_id), encode_push(logged))
        except DeliveryError:
            self._count["refused"](1)
            raise
        finally:
            self._n_waiting_bytes -= n_bytes
        self._count["stored"](1)

    def answer(self, push: PushContext) -> PushAnswer | None:
        """See `PushLog`."""
        return self._find_threshold(push.cluster_id or push.cluster_hint, push.cohort)

    def find_answer(
        self, cluster_id: str, cohort_hash: str = "", node_id: str | None = None
    ) -> PushAnswer | None:
        """As a `ThresholdSource`, for nodes that ask: of clusters that another Fleet judges."""
        del node_id
        return None if self._is_ours(cluster_id) else self._find_threshold(cluster_id, cohort_hash)

    def _find_threshold(self, cluster_id: str, cohort: str) -> PushAnswer | None:
        answers = self._answers.get(cluster_id)
        if answers is None:
            return None
        return unpack_threshold(answers.thresholds.get(cohort) or answers.thresholds.get(""))

    def find_question(self, cluster_id: str, node_id: str) -> str | None:
        """See `PushLog`."""
        answers = self._answers.get(cluster_id)
        return None if answers is None else answers.questions.get(node_id)

    async def _follow(self) -> None:
        connection = self._connection
        await connection.wait()
        bucket = connection.documents
        subject = f"$KV.{bucket}.{ANSWERS_KEY}*"
        async for message in connection.follow(f"KV_{bucket}", subject, 1):
            try:
                answers = decode_answers(message.data)
            except BadDataError as error:
                connection.log.write(
                    ("unread", message.subject), logging.WARNING, "answers of a cluster not read",
                    error=error.message,
                )  # fmt: skip
                continue
            self._answers[answers.cluster_id] = answers
