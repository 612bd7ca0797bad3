"""What a judge sends to the receivers of a cluster: thresholds, and questions to nodes, when they change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ingero.errors import RetryableError
from ingero.fleet.jetstream.messages import (
    ClusterAnswers,
    LoggedPush,
    build_token,
    encode_document,
)
from ingero.fleet.workers.messages import RelayedAnswer, Threshold

# A Fleet without a stream has no use for NATS's client, which takes long to import.
if TYPE_CHECKING:
    from ingero.fleet.jetstream.connection import NatsConnection

ANSWERS_KEY: Final = "answers."
PUBLISH_INTERVAL_S: Final = 0.2
_MAX_COHORTS: Final = 1024
"""Further ones are answered with the threshold of the cluster."""


class StreamEndpoint(Protocol):
    """One protocol of a receiver: applies what any Fleet received by it."""

    def apply_logged(
        self, logged: LoggedPush, *, is_replay: bool
    ) -> tuple[RelayedAnswer, str, str]:
        """Take a push from the stream.

        Returns:
            The answer, the node that sent it and its cohort, both empty where they are not known.

        Raises:
            RetryableError: The pipelines do not take it now.
        """
        ...

    def find_threshold_of(self, cluster_id: str, cohort: str) -> Threshold | None:
        """The threshold of a cohort, or the cluster's."""
        ...


class AnswerPublisher:
    """Tells of one cluster. What there was before stays until there is another threshold. On the loop.

    Args:
        judge: Who tells.
        connection: The way to the servers.
        endpoints: Ask for thresholds.
        cluster_id: The cluster.
    """

    def __init__(
        self,
        judge: str,
        connection: NatsConnection,
        endpoints: Sequence[StreamEndpoint],
        cluster_id: str,
    ) -> None:
        self._judge = judge
        self._connection = connection
        self._endpoints = endpoints
        self._cluster_id = cluster_id
        self._cohorts = {""}
        self._questions: dict[str, str] = {}

    def note(self, answer: RelayedAnswer, node_id: str, cohort: str) -> None:
        """Note that a node pushed."""
        if len(self._cohorts) < _MAX_COHORTS:
            self._cohorts.add(cohort)
        if answer.question is None:
            self._questions.pop(node_id, None)
        else:
            self._questions[node_id] = answer.question

    async def run(self) -> None:
        """Write down what is new, each `PUBLISH_INTERVAL_S`."""
        connection, key = self._connection, ANSWERS_KEY + build_token(self._cluster_id)
        bucket = connection.documents
        written: ClusterAnswers | None = None
        revision: int | None = None
        while True:
            answers = self._build()
            is_fresh = answers != written and (
                answers.thresholds or answers.questions or written is not None
            )
            try:
                if is_fresh and revision is None:
                    stored = await connection.read(bucket, key)
                    revision = 0 if stored is None else stored.revision
                if is_fresh and revision is not None:
                    revision = await connection.write(
                        bucket, key, encode_document(answers), revision
                    )
                    written = answers
            except RetryableError as error:
                revision = None  # that of an earlier judge, or of a write whose answer was lost
                connection.log.write(
                    ("answers", key), logging.WARNING, "thresholds not written",
                    cluster_id=self._cluster_id, error=error.message,
                )  # fmt: skip
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    def _build(self) -> ClusterAnswers:
        thresholds: dict[str, Threshold] = {}
        for cohort in sorted(self._cohorts):
            for endpoint in self._endpoints:
                threshold = endpoint.find_threshold_of(self._cluster_id, cohort)
                if threshold is not None:
                    thresholds[cohort] = threshold
                    break
        return ClusterAnswers(self._cluster_id, thresholds, dict(self._questions), self._judge)
