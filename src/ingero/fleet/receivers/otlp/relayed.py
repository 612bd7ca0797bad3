"""A push that a worker receives and the judge applies: the receiver's part on both sides.

`RelayedIntake` is what a push meets in a worker: all that `PushIntake` does before the body is decoded.
`EndpointInJudge` gives the judge's `PushIntake` what the worker sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from ingero.errors import BadDataError, RetryableError
from ingero.fleet.component import PushAnswer, PushContext
from ingero.fleet.jetstream.messages import LoggedPush
from ingero.fleet.receivers.otlp.intake import PushIntake, add_question, write_headers
from ingero.fleet.receivers.otlp.telemetry import Tally, TransportLabel
from ingero.fleet.workers.link import PushRelay
from ingero.fleet.workers.messages import (
    RelayedAnswer,
    RelayedPush,
    Threshold,
    pack_threshold,
    unpack_threshold,
)
from ingero.otlp.names import Signal
from ingero.serving.otlp.answers import (
    OVERLOADED,
    RETRY_AFTER_S,
    AnswerStatus,
    OtlpAnswer,
    Reason,
    RequestRefusal,
)
from ingero.serving.otlp.encodings import TooLargeError, decompress
from ingero.serving.otlp.handler import AnswerHeaders, OtlpRequest

_NO_JUDGE: Final = OtlpAnswer(
    AnswerStatus.UNAVAILABLE, "Fleet is starting again; push again", RETRY_AFTER_S
)
_TAKEN: Final = AnswerStatus.TAKEN.name
_UNAVAILABLE: Final = AnswerStatus.UNAVAILABLE.name


@dataclass(slots=True)
class WorkerPush(PushContext):
    """What a worker knows of a push.

    Attributes:
        judged: What the judge answered; None while it has not.
    """

    judged: RelayedAnswer | None = None


class RelayedIntake:
    """One protocol's way to the judge, in a worker.

    Args:
        intake: Who may send; its answerer knows the thresholds of clusters.
        relay: The way to the judge.
        endpoint_idx: By which the judge knows this protocol of this receiver.
        tally: The protocol's counters.
        max_body_bytes: Largest body after decompression.
    """

    def __init__(
        self,
        intake: PushIntake,
        relay: PushRelay,
        endpoint_idx: int,
        tally: Tally,
        max_body_bytes: int,
    ) -> None:
        self._intake = intake
        self._relay = relay
        self._endpoint_idx = endpoint_idx
        self._tally = tally
        self._max_body_bytes = max_body_bytes

    def open(self, request: OtlpRequest) -> WorkerPush:
        """What is kept of a push."""
        return WorkerPush(cluster_hint=request.hint)

    def admit(self, request: OtlpRequest, *, is_full: bool) -> RequestRefusal | None:
        """As `PushIntake.admit`."""
        return self._intake.admit(request, is_full=is_full)

    def reserve(self, request: OtlpRequest) -> None:
        """Nothing: bodies are bounded by what is buffered."""

    def refused(self, request: OtlpRequest, refusal: RequestRefusal) -> None:
        """As `PushIntake.refused`."""
        self._intake.refused(request, refusal)

    def take(self, request: OtlpRequest, body: bytes) -> OtlpAnswer | Awaitable[OtlpAnswer]:
        """Decompress, and have the judge decode and apply it."""
        if request.encoding:
            try:
                body = decompress(body, request.encoding, self._max_body_bytes)
            except TooLargeError as error:
                self._tally.refuse_request(Reason.TOO_LARGE)
                return OtlpAnswer(AnswerStatus.TOO_LARGE, error.message)
            except BadDataError as error:
                self._tally.refuse_request(Reason.BAD_BODY)
                return OtlpAnswer(AnswerStatus.BAD_DATA, error.message)
        push: WorkerPush = request.context
        relayed = build_relayed(request, self._endpoint_idx, push.allowed_clusters, body)
        return self._submit(push, relayed)

    def _submit(self, push: WorkerPush, relayed: RelayedPush) -> OtlpAnswer | Awaitable[OtlpAnswer]:
        future: asyncio.Future[OtlpAnswer] = asyncio.get_running_loop().create_future()

        def answer(answer: RelayedAnswer | None) -> None:
            if not future.done():  # its connection may be gone
                future.set_result(_read(push, answer))

        if self._relay.submit(relayed, answer):
            return future
        self._tally.refuse_request(Reason.OVERLOADED)
        return OVERLOADED.answer

    def find_headers(self, request: OtlpRequest) -> AnswerHeaders | None:
        """What the judge sent for this push; the threshold of its cluster where the judge never saw it."""
        push: WorkerPush = request.context
        judged = push.judged
        if judged is None:
            return self._intake.find_headers(request)
        threshold = judged.threshold
        headers = None if threshold is None else _write_headers(threshold)
        return add_question(headers, judged.question)


def build_relayed(
    request: OtlpRequest, endpoint_idx: int, allowed: Collection[str] | None, body: bytes
) -> RelayedPush:
    """A push as another process takes it.

    Args:
        request: Its request; the context is a `PushContext`.
        endpoint_idx: The protocol by which it came.
        allowed: Clusters that its sender may push for; None where that is no matter to who takes it.
        body: Decompressed.
    """
    push: PushContext = request.context
    return RelayedPush(
        0,
        endpoint_idx,
        request.signal,
        request.content_type,
        push.cluster_hint,
        push.auth_subject,
        None if allowed is None else tuple(allowed),
        body,
    )


def _read(push: WorkerPush, answer: RelayedAnswer | None) -> OtlpAnswer:
    if answer is None:
        return _NO_JUDGE
    push.judged = answer
    status = AnswerStatus.TAKEN if answer.status == _TAKEN else AnswerStatus[answer.status]
    return OtlpAnswer(status, answer.message, answer.retry_after_s, answer.n_rejected)


@lru_cache(maxsize=1024)
def _write_headers(threshold: Threshold) -> AnswerHeaders:
    answer = unpack_threshold(threshold)
    assert answer is not None
    return write_headers(answer)


class EndpointInJudge:
    """One protocol of a receiver in the judge.

    Args:
        transport: Which.
        intake: The way into the pipelines.
    """

    def __init__(self, transport: TransportLabel, intake: PushIntake) -> None:
        self._transport = str(transport)
        self._intake = intake

    def apply(self, push: RelayedPush) -> tuple[RelayedAnswer, str]:
        """Take a push as if it had come here; also the cluster that it was of, empty where it is not known."""
        context = _build_context(push)
        return self._take(push, context), context.cluster_id or context.cluster_hint

    def apply_logged(
        self, logged: LoggedPush, *, is_replay: bool
    ) -> tuple[RelayedAnswer, str, str]:
        """Take a push from the stream; also the node that it was of and its cohort, empty where they are not known.

        Raises:
            RetryableError: The pipelines do not take it now.
        """
        context = _build_context(logged.push)
        context.only_cluster = logged.cluster_id if logged.is_shared else None
        context.allowed_clusters = None  # who received it has checked that
        context.is_replay = is_replay
        answer = self._take(logged.push, context)
        if answer.status == _UNAVAILABLE:
            raise RetryableError(answer.message)
        return answer, context.node_id or "", context.cohort

    def find_threshold_of(self, cluster_id: str, cohort: str) -> Threshold | None:
        """The threshold of a cohort, or the cluster's."""
        return pack_threshold(self._intake.find_threshold_of(cluster_id, cohort))

    def _take(self, push: RelayedPush, context: PushContext) -> RelayedAnswer:
        request = OtlpRequest(
            transport=self._transport,
            signal=_SIGNALS[push.signal],
            content_type=push.content_type,
            context=context,
        )
        status, message, retry_after_s, n_rejected = self._intake.take(request, push.body)
        answer = self._intake.find_sender_answer(context)
        return RelayedAnswer(
            push.number,
            status.name,
            message,
            retry_after_s,
            n_rejected,
            pack_threshold(answer.threshold),
            answer.question,
        )

    def find_threshold(self, cluster_id: str) -> PushAnswer | None:
        """The threshold for a sender of this cluster that says no more of itself; who it may be, its worker checks."""
        return self._intake.find_threshold_of(cluster_id)


def _build_context(push: RelayedPush) -> PushContext:
    allowed = push.clusters
    return PushContext(
        cluster_hint=push.hint,
        auth_subject=push.subject,
        allowed_clusters=None if allowed is None else frozenset(allowed),
    )


_SIGNALS: Final = {str(signal): signal for signal in Signal}
