"""What both protocols do with a body: decode, hand to the pipeline, say how it went and what the threshold is.

Knows neither HTTP nor gRPC. Safe on any thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ingero.errors import BadDataError, PermanentError, RetryableError
from ingero.fleet.component import (
    WITHHELD,
    Authenticator,
    ClusterBound,
    ComponentId,
    Host,
    PushAnswer,
    PushAnswerer,
    PushContext,
)
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.receivers.otlp.telemetry import Reason, Tally
from ingero.otlp.codec import Export, decode_export
from ingero.otlp.names import Signal
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.push import ResourceCache, list_resources, read_resource

RETRY_AFTER_S: Final = 2
"""Default delay to ask for. Agents add it to their interval, and above 20 s together they lose their mode for a tick."""
MAX_RETRY_AFTER_S: Final = 10
_FLUSH_NS: Final = 10 * NS_PER_S
_log = logging.getLogger("ingero.fleet.receiver")
_LEAST_THRESHOLD: Final = 0.1
_MOST_THRESHOLD: Final = 0.99
_WITHHELD: Final = ("", "true")


class AnswerStatus(Enum):
    """How a push went: HTTP status and gRPC code."""

    TAKEN = (200, 0)
    BAD_DATA = (400, 3)  # INVALID_ARGUMENT
    UNAUTHENTICATED = (401, 16)
    FORBIDDEN = (403, 7)  # PERMISSION_DENIED
    NOT_FOUND = (404, 12)  # UNIMPLEMENTED
    METHOD = (405, 12)
    TIMEOUT = (408, 4)  # DEADLINE_EXCEEDED
    TOO_LARGE = (413, 8)  # RESOURCE_EXHAUSTED
    UNSUPPORTED = (415, 3)
    OVERLOADED = (429, 8)
    HEAD_TOO_LARGE = (431, 3)
    PERMANENT = (500, 13)  # INTERNAL: the Collector's answer to a permanent consumer error
    UNAVAILABLE = (503, 14)

    @property
    def http(self) -> int:
        """HTTP status."""
        return self.value[0]

    @property
    def grpc(self) -> int:
        """google.rpc.Code."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """The answer to a push, before it is written.

    Attributes:
        verdict: How it went.
        message: For a person; empty when taken.
        retry_after_s: Whole seconds to wait, or 0.
        n_rejected: Items of a taken export that a processor refused.
    """

    verdict: AnswerStatus
    message: str = ""
    retry_after_s: int = 0
    n_rejected: int = 0


TAKEN: Final = PushOutcome(AnswerStatus.TAKEN)
DRAINING: Final = PushOutcome(AnswerStatus.UNAVAILABLE, "shutting down; push again", RETRY_AFTER_S)
OVERLOADED: Final = PushOutcome(
    AnswerStatus.OVERLOADED, "too many pushes at once; push again", RETRY_AFTER_S
)


class PushIntake:
    """One protocol's way into the pipelines.

    Args:
        host: The running service.
        outputs: A consumer for each signal that a pipeline wants.
        tally: The protocol's counters.
        authenticator: Who checks credentials, or None.
        answerers: Who may know the threshold, asked in turn.
    """

    def __init__(
        self,
        host: Host,
        outputs: Mapping[Signal, Consumer],
        tally: Tally,
        authenticator: Authenticator | None,
        answerers: Sequence[PushAnswerer],
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._outputs = outputs
        self._tally = tally
        self._authenticator = authenticator
        self._answerers = tuple(answerers)
        self._log = RateLimitedLog(_log, host.clock)
        host.every(_FLUSH_NS, self._log.flush)
        self._resources = ResourceCache()
        self._told: tuple[PushAnswer | None, tuple[str, str]] = (None, ("", ""))

    @property
    def draining(self) -> bool:
        """Whether the service was told to stop."""
        return self._host.draining

    @property
    def is_open(self) -> bool:
        """Whether anybody may push, without credentials."""
        return self._authenticator is None

    def accepts(self, signal: Signal) -> bool:
        """Whether any pipeline wants this signal."""
        return signal in self._outputs

    def authenticate(self, authorization: str | None, push: PushContext) -> bool:
        """Whether the sender may push; notes who it is."""
        if self._authenticator is None:
            return True
        subject = self._authenticator.authenticate(authorization)
        if subject is None:
            return False
        push.auth_subject = subject
        if isinstance(self._authenticator, ClusterBound):
            push.allowed_clusters = self._authenticator.find_clusters(subject)
        return True

    def tell_refused(self, peer: str, push: PushContext) -> None:
        """Say who was refused for its credentials: a line a minute for each host.

        Args:
            peer: Address of the sender, without its port.
            push: What it said of itself.
        """
        self._log.write(
            peer,
            logging.WARNING,
            "push refused: missing or wrong credentials",
            peer=peer,
            cluster_hint=push.cluster_hint or None,
        )

    def take(
        self, body: bytes, signal: Signal, content_type: str, push: PushContext
    ) -> PushOutcome:
        """Decode a body and hand it on; when this returns, the push is applied."""
        try:
            export = decode_export(body, signal, content_type)
        except BadDataError as error:
            self._tally.refuse_request(Reason.BAD_BODY)
            return PushOutcome(AnswerStatus.BAD_DATA, error.message)
        n_items = export.n_items
        if not n_items:  # an empty request is a success; senders probe with it
            return TAKEN
        if push.allowed_clusters is not None:
            foreign = self._find_foreign(export, push, push.allowed_clusters)
            if foreign is not None:
                return self._forbid(foreign, push)
        batch = Batch(signal, export, self._clock.wall_ns(), push)
        refusal = self._offer(batch)
        if refusal is not None:
            self._tally.refuse(signal, n_items)
            return refusal
        if push.n_rejected:
            n_rejected = min(push.n_rejected, n_items)
            self._tally.accept(signal, n_items - n_rejected)
            self._tally.refuse(signal, n_rejected)
            return PushOutcome(AnswerStatus.TAKEN, push.rejected_why, n_rejected=n_rejected)
        self._tally.accept(signal, n_items)
        return TAKEN

    def _find_foreign(
        self, export: Export, push: PushContext, allowed: frozenset[str]
    ) -> str | None:
        """A cluster of the export that its sender may not speak for, empty where none is named; None when it may."""
        for entry in list_resources(export):
            facts = read_resource(entry, self._resources, is_message=export.is_message)
            cluster_id = facts.cluster_id or push.cluster_hint
            if cluster_id not in allowed:
                return cluster_id
        return None

    def _forbid(self, cluster_id: str, push: PushContext) -> PushOutcome:
        """Count, log and answer a push for a cluster that is not the sender's."""
        self._tally.refuse_request(Reason.FORBIDDEN_CLUSTER)
        self._log.write(
            ("forbidden", push.auth_subject, cluster_id),
            logging.WARNING,
            "push refused: the token is not for this cluster",
            subject=push.auth_subject,
            cluster=cluster_id[:256],
        )
        named = f"{cluster_id!r:.200}" if cluster_id else "a push that names no cluster"
        return PushOutcome(AnswerStatus.FORBIDDEN, f"the token is not for {named}")

    def _offer(self, batch: Batch) -> PushOutcome | None:
        """Hand a batch on; None when it was taken."""
        try:
            self._outputs[batch.signal].consume(batch)
        except RetryableError as refusal:
            return PushOutcome(AnswerStatus.UNAVAILABLE, refusal.message, _retry_after_s(refusal))
        except BadDataError as refusal:
            return PushOutcome(AnswerStatus.BAD_DATA, refusal.message)
        except PermanentError as refusal:
            return PushOutcome(AnswerStatus.PERMANENT, refusal.message)
        return None

    def find_threshold(self, push: PushContext) -> tuple[str, str] | None:
        """The two header values for this push, or None when there is no threshold to tell.

        The first is empty when there is one that nobody is to compare with now: the second then says panic. A value that agents would reject (outside 0.1 to 0.99, not finite) is not told at all: it would silence the
        fallback poller too.
        """
        allowed = push.allowed_clusters
        if allowed is not None and (push.cluster_id or push.cluster_hint) not in allowed:
            return None
        for answerer in self._answerers:
            answer = answerer.answer(push)
            if answer is WITHHELD:
                return _WITHHELD
            if answer is not None and _LEAST_THRESHOLD <= answer.threshold <= _MOST_THRESHOLD:
                told, texts = self._told
                if (
                    answer is told
                ):  # nodes of one cohort are told one object until the bar is computed again
                    return texts
                texts = (f"{answer.threshold:.6f}", "true" if answer.quorum_met else "false")
                self._told = (answer, texts)
                return texts
        return None


def _retry_after_s(refusal: RetryableError) -> int:
    if refusal.retry_after_ns is None:
        return RETRY_AFTER_S
    return min(max(math.ceil(refusal.retry_after_ns / NS_PER_S), 1), MAX_RETRY_AFTER_S)


def get_component(text: str) -> ComponentId:
    """``type/name`` as a component id."""
    kind, _, name = text.partition("/")
    return ComponentId(kind, name)
