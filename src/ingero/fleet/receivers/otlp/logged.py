"""A push that is answered when the stream has it: what it meets in a Fleet whose pushes go to NATS JetStream.

All that `PushIntake` refuses before its pipelines is refused here too. What the pipelines would refuse is not known
yet: an answer never says that a part was rejected.
"""

from __future__ import annotations

from collections.abc import Awaitable

from ingero.errors import BadDataError, DeliveryError, PermanentError
from ingero.fleet.component import PushContext
from ingero.fleet.jetstream.receiving import PushLog
from ingero.fleet.receivers.otlp.intake import ExaminedPush, PushIntake
from ingero.fleet.receivers.otlp.relayed import build_relayed
from ingero.fleet.receivers.otlp.telemetry import Tally
from ingero.fleet.workers.messages import RelayedPush
from ingero.otlp.names import Signal
from ingero.serving.otlp.answers import (
    RETRY_AFTER_S,
    TAKEN,
    AnswerStatus,
    OtlpAnswer,
    RequestRefusal,
)
from ingero.serving.otlp.encodings import TooLargeError, decompress
from ingero.serving.otlp.handler import AnswerHeaders, OtlpRequest
from ingero.telemetry.clock import Clock


class LoggedIntake:
    """One protocol's way to the stream.

    Args:
        intake: Who may send, and what can be read.
        log: The way to the stream.
        endpoint_idx: By which the judge, in any Fleet, knows this protocol of this receiver.
        tally: The protocol's counters.
        max_body_bytes: Largest body after decompression.
        clock: When a push came.
    """

    def __init__(
        self,
        intake: PushIntake,
        log: PushLog,
        endpoint_idx: int,
        tally: Tally,
        max_body_bytes: int,
        clock: Clock,
    ) -> None:
        self._intake = intake
        self._log = log
        self._endpoint_idx = endpoint_idx
        self._tally = tally
        self._max_body_bytes = max_body_bytes
        self._clock = clock

    def open(self, request: OtlpRequest) -> PushContext:
        """As `PushIntake.open`."""
        return self._intake.open(request)

    def admit(self, request: OtlpRequest, *, is_full: bool) -> RequestRefusal | None:
        """As `PushIntake.admit`."""
        return self._intake.admit(request, is_full=is_full)

    def reserve(self, request: OtlpRequest) -> None:
        """Nothing: bodies are bounded by what is buffered."""

    def refused(self, request: OtlpRequest, refusal: RequestRefusal) -> None:
        """As `PushIntake.refused`."""
        self._intake.refused(request, refusal)

    def take(self, request: OtlpRequest, body: bytes) -> OtlpAnswer | Awaitable[OtlpAnswer]:
        """Check a body and store it."""
        limit_bytes = self._max_body_bytes
        try:
            body = decompress(body, request.encoding, limit_bytes) if request.encoding else body
        except (TooLargeError, BadDataError):
            examined = self._intake.examine(request, body)  # which says so
        else:
            request.encoding = ""
            examined = self._intake.examine(request, body)
        if isinstance(examined, OtlpAnswer):
            return examined
        if not examined.n_items:
            return TAKEN  # senders probe with it
        relayed = build_relayed(request, self._endpoint_idx, None, body)
        return self._store(examined, relayed)

    async def _store(self, examined: ExaminedPush, relayed: RelayedPush) -> OtlpAnswer:
        try:
            await self._log.append(examined.clusters, relayed, self._clock.wall_ns())
        except DeliveryError as error:
            return self._refuse(error, relayed, examined)
        return self._accept(relayed, examined)

    def _accept(self, relayed: RelayedPush, examined: ExaminedPush) -> OtlpAnswer:
        self._tally.accept(Signal(relayed.signal), examined.n_items)
        return TAKEN

    def _refuse(
        self, error: DeliveryError, relayed: RelayedPush, examined: ExaminedPush
    ) -> OtlpAnswer:
        self._tally.refuse(Signal(relayed.signal), examined.n_items)
        if isinstance(error, PermanentError):
            return OtlpAnswer(AnswerStatus.TOO_LARGE, error.message)
        return OtlpAnswer(AnswerStatus.UNAVAILABLE, error.message, RETRY_AFTER_S)

    def find_headers(self, request: OtlpRequest) -> AnswerHeaders | None:
        """What the cluster's judge last said of thresholds, and what it asks the node."""
        return self._intake.find_headers(request, self._log.find_question)
