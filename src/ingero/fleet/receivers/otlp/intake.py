"""What both protocols do with a push: who may send it, decode, hand to the pipeline, and the threshold on its answer.

An `ingero.serving.otlp.handler.OtlpHandler`, which knows neither HTTP nor gRPC. Safe on any thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from ingero.errors import BadDataError, PermanentError, RetryableError
from ingero.fleet.component import (
    WITHHELD,
    Authenticator,
    ClusterBound,
    Host,
    PushAnswer,
    PushAnswerer,
    PushContext,
    QuestionSource,
)
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.receivers.otlp.telemetry import Tally
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal
from ingero.serving.otlp.answers import (
    DRAINING,
    OVERLOADED,
    RETRY_AFTER_S,
    TAKEN,
    AnswerStatus,
    OtlpAnswer,
    Reason,
    RequestRefusal,
)
from ingero.serving.otlp.encodings import TooLargeError
from ingero.serving.otlp.handler import AnswerHeaders, OtlpRequest
from ingero.telemetry.limited import RateLimitedLog
from ingero.units import NS_PER_S
from ingero.wire.names import Header
from ingero.wire.push import (
    ResourceCache,
    build_export,
    list_resources,
    read_push,
    read_resource,
)

MAX_RETRY_AFTER_S: Final = 10
_FLUSH_NS: Final = 10 * NS_PER_S
_log = logging.getLogger("ingero.fleet.receiver")
_MIN_THRESHOLD: Final = 0.1
_MAX_THRESHOLD: Final = 0.99
_PANIC: Final = AnswerHeaders(
    f"{Header.PANIC}: true\r\n".encode(), ((str(Header.GRPC_PANIC), "true"),)
)


class ExaminedPush(NamedTuple):
    """A body that can be taken.

    Attributes:
        clusters: Whose resources it has, each once; empty for an empty body.
        n_items: Its points, records or spans.
    """

    clusters: tuple[str, ...]
    n_items: int


FindQuestion = Callable[[str, str], str | None]
"""Cluster, node → what the node is asked."""


class SenderAnswer(NamedTuple):
    """What rides an answer.

    Attributes:
        threshold: To compare with; None where there is none.
        question: What the node is asked; None where nothing is.
    """

    threshold: PushAnswer | None = None
    question: str | None = None


_NO_ANSWER: Final = SenderAnswer()
_NOTHING: Final = AnswerHeaders(b"", ())


class PushIntake:
    """One protocol's way into the pipelines.

    Args:
        host: The running service.
        outputs: A consumer for each signal that a pipeline wants.
        tally: The protocol's counters.
        authenticator: Who checks credentials, or None.
        answerers: Who may know the threshold, asked in turn.
        max_body_bytes: Largest body after decompression.
    """

    def __init__(
        self,
        host: Host,
        outputs: Mapping[Signal, Consumer],
        tally: Tally,
        authenticator: Authenticator | None,
        answerers: Sequence[PushAnswerer],
        max_body_bytes: int,
    ) -> None:
        self._host = host
        self._clock = host.clock
        self._outputs = outputs
        self._tally = tally
        self._authenticator = authenticator
        self._answerers = tuple(answerers)
        self._max_body_bytes = max_body_bytes
        self._log = RateLimitedLog(_log, host.clock)
        host.every(_FLUSH_NS, self._log.flush)
        self._resources = ResourceCache()
        self._headers: tuple[PushAnswer, AnswerHeaders] = (WITHHELD, _PANIC)
        self._questions: tuple[QuestionSource, ...] | None = None

    def open(self, request: OtlpRequest) -> PushContext:
        """What processors and answerers learn of a push."""
        return PushContext(cluster_hint=request.hint)

    def admit(self, request: OtlpRequest, *, is_full: bool) -> RequestRefusal | None:
        """Refuse while the service ends, a signal that nobody takes, too much at once, and unknown senders."""
        unknown = self._authenticate(request)
        if self._host.draining:
            return DRAINING
        if request.signal not in self._outputs:
            message = f"no pipeline takes {request.signal} from this receiver"
            return RequestRefusal(OtlpAnswer(AnswerStatus.NOT_FOUND, message), Reason.NO_PIPELINE)
        if is_full:
            return OVERLOADED
        return unknown

    def reserve(self, request: OtlpRequest) -> None:
        """Nothing: bodies are bounded by what is buffered."""

    def refused(self, request: OtlpRequest, refusal: RequestRefusal) -> None:
        """Count a refusal, and log one for its credentials: a line a minute for each host."""
        self._tally.refuse_request(refusal.reason)
        if refusal is _UNKNOWN:
            self._log.write(
                request.peer,
                logging.WARNING,
                "push refused: missing or wrong credentials",
                peer=request.peer,
                cluster_hint=request.hint or None,
            )

    def _authenticate(self, request: OtlpRequest) -> RequestRefusal | None:
        """Why the sender may not push; otherwise notes who it is."""
        if self._authenticator is None:
            return None
        try:
            subject = self._authenticator.authenticate(request.authorization)
        except RetryableError as error:
            return RequestRefusal(_ask_again(error), Reason.OVERLOADED)
        if subject is None:
            return _UNKNOWN
        push: PushContext = request.context
        push.auth_subject = subject
        if isinstance(self._authenticator, ClusterBound):
            push.allowed_clusters = self._authenticator.find_clusters(subject)
        return None

    def take(self, request: OtlpRequest, body: bytes) -> OtlpAnswer:
        """Decode a body and hand it on; when this returns, the push is applied."""
        export = _decode(request, body, self._max_body_bytes, self._tally)
        if isinstance(export, OtlpAnswer):
            return export
        # An empty request is a success: senders probe with it.
        return self._apply(export, request.context) if export.n_items else TAKEN

    def examine(self, request: OtlpRequest, body: bytes) -> ExaminedPush | OtlpAnswer:
        """What `take` would refuse, and otherwise what there is; notes who sent it. Nothing is handed on."""
        export = _decode(request, body, self._max_body_bytes, self._tally)
        if isinstance(export, OtlpAnswer):
            return export
        push: PushContext = request.context
        refusal = self._check_clusters(export, push)
        if refusal is not None:
            return refusal
        senders = [
            read_resource(entry, self._resources, is_message=export.is_message)
            for entry in list_resources(export)
        ]
        clusters = tuple(dict.fromkeys(one.cluster_id or push.cluster_hint for one in senders))
        if len(senders) == 1:
            push.cluster_id, push.node_id = clusters[0], senders[0].node_id or None
            if request.signal is Signal.METRICS:
                push.cohort = read_push(export, self._resources)[0].cohort
        elif len(clusters) == 1:
            push.cluster_id = clusters[0]
        return ExaminedPush(clusters, export.n_items)

    def _check_clusters(self, export: Export, push: PushContext) -> OtlpAnswer | None:
        """Refuse a push of a cluster that its sender may not speak for."""
        if push.allowed_clusters is None:
            return None
        foreign = self._find_foreign(export, push, push.allowed_clusters)
        return None if foreign is None else self._forbid(foreign, push)

    def _apply(self, export: Export, push: PushContext) -> OtlpAnswer:
        refusal = self._check_clusters(export, push)
        if refusal is not None:
            return refusal
        if push.only_cluster is not None:
            export = self._keep_cluster(export, push, push.only_cluster)
        signal, n_items = export.signal, export.n_items
        batch = Batch(signal, export, self._clock.wall_ns(), push)
        refusal = self._offer(batch)
        if refusal is not None:
            self._tally.refuse(signal, n_items)
            return refusal
        if push.n_rejected:
            n_rejected = min(push.n_rejected, n_items)
            self._tally.accept(signal, n_items - n_rejected)
            self._tally.refuse(signal, n_rejected)
            return OtlpAnswer(AnswerStatus.TAKEN, push.rejected_why, n_rejected=n_rejected)
        self._tally.accept(signal, n_items)
        return TAKEN

    def _keep_cluster(self, export: Export, push: PushContext, cluster_id: str) -> Export:
        """The export with this cluster's resources alone."""
        kept = [
            entry
            for entry in list_resources(Export.from_tree(export.signal, export.tree))
            if (
                read_resource(entry, self._resources, is_message=False).cluster_id
                or push.cluster_hint
            )
            == cluster_id
        ]
        return build_export(export.signal, kept)

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

    def _forbid(self, cluster_id: str, push: PushContext) -> OtlpAnswer:
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
        return OtlpAnswer(AnswerStatus.FORBIDDEN, f"the token is not for {named}")

    def _offer(self, batch: Batch) -> OtlpAnswer | None:
        """Hand a batch on; None when it was taken."""
        try:
            self._outputs[batch.signal].consume(batch)
        except RetryableError as refusal:
            return _ask_again(refusal)
        except BadDataError as refusal:
            return OtlpAnswer(AnswerStatus.BAD_DATA, refusal.message)
        except PermanentError as refusal:
            return OtlpAnswer(AnswerStatus.PERMANENT, refusal.message)
        return None

    def find_headers(
        self, request: OtlpRequest, find_question: FindQuestion | None = None
    ) -> AnswerHeaders | None:
        """What `find_sender_answer` finds, as headers; None where there is nothing to say."""
        answer = self.find_sender_answer(request.context, find_question)
        return add_question(self._write_threshold(answer.threshold), answer.question)

    def find_sender_answer(
        self, push: PushContext, find_question: FindQuestion | None = None
    ) -> SenderAnswer:
        """What the answer to a push carries: nothing for a sender that is not known.

        Args:
            push: The push.
            find_question: Who asks nodes; None for the components here.
        """
        if self._authenticator is not None and not push.auth_subject:
            return _NO_ANSWER
        allowed = push.allowed_clusters
        if allowed is not None and (push.cluster_id or push.cluster_hint) not in allowed:
            return _NO_ANSWER
        question = None
        if push.cluster_id and push.node_id:
            question = (find_question or self._find_question)(push.cluster_id, push.node_id)
        return SenderAnswer(self._find_threshold(push), question)

    def find_threshold_of(self, cluster_id: str, cohort: str = "") -> PushAnswer | None:
        """The threshold for a sender of this cluster that says no more of itself than its cohort."""
        return self._find_threshold(PushContext(cluster_hint=cluster_id, cohort=cohort))

    def _find_question(self, cluster_id: str, node_id: str) -> str | None:
        """What the node that just pushed is asked."""
        if self._questions is None:  # pushes come when every processor has started
            self._questions = tuple(self._host.find(QuestionSource))
        for source in self._questions:
            question = source.find_question(cluster_id, node_id)
            if question is not None:
                return question
        return None

    def _find_threshold(self, push: PushContext) -> PushAnswer | None:
        """The threshold for this push.

        A value that agents would reject (outside 0.1 to 0.99, not finite) is not sent at all: it would silence the
        fallback poller too.
        """
        for answerer in self._answerers:
            answer = answerer.answer(push)
            if answer is WITHHELD:
                return answer
            if answer is not None and _MIN_THRESHOLD <= answer.threshold <= _MAX_THRESHOLD:
                return answer
        return None

    def _write_threshold(self, answer: PushAnswer | None) -> AnswerHeaders | None:
        if answer is None:
            return None
        known, headers = self._headers
        if answer is known:  # nodes of one cohort get one object until the next computation
            return headers
        headers = write_headers(answer)
        self._headers = (answer, headers)
        return headers


def _decode(
    request: OtlpRequest, body: bytes, max_body_bytes: int, tally: Tally
) -> Export | OtlpAnswer:
    """A body, or why it is refused, which is counted."""
    try:
        return request.decode(body, max_body_bytes)
    except TooLargeError as error:
        tally.refuse_request(Reason.TOO_LARGE)
        return OtlpAnswer(AnswerStatus.TOO_LARGE, error.message)
    except BadDataError as error:
        tally.refuse_request(Reason.BAD_BODY)
        return OtlpAnswer(AnswerStatus.BAD_DATA, error.message)


def add_question(headers: AnswerHeaders | None, question: str | None) -> AnswerHeaders | None:
    """Headers with what a sender is asked."""
    if question is None:
        return headers
    lines, metadata = headers or _NOTHING
    return AnswerHeaders(
        lines + f"{Header.DIAGNOSE}: {question}\r\n".encode("ascii"),
        (*metadata, (str(Header.GRPC_DIAGNOSE), question)),
    )


_UNKNOWN: Final = RequestRefusal(
    OtlpAnswer(AnswerStatus.UNAUTHENTICATED, "missing or wrong credentials"), Reason.UNAUTHENTICATED
)


def write_headers(answer: PushAnswer) -> AnswerHeaders:
    """An answer as headers and as metadata."""
    if answer is WITHHELD:
        return _PANIC
    threshold, quorum_met = f"{answer.threshold:.6f}", "true" if answer.quorum_met else "false"
    return AnswerHeaders(
        f"{Header.THRESHOLD}: {threshold}\r\n{Header.QUORUM_MET}: {quorum_met}\r\n".encode(),
        ((str(Header.GRPC_THRESHOLD), threshold), (str(Header.GRPC_QUORUM_MET), quorum_met)),
    )


def _ask_again(refusal: RetryableError) -> OtlpAnswer:
    return OtlpAnswer(AnswerStatus.UNAVAILABLE, refusal.message, _retry_after_s(refusal))


def _retry_after_s(refusal: RetryableError) -> int:
    if refusal.retry_after_ns is None:
        return RETRY_AFTER_S
    return min(max(math.ceil(refusal.retry_after_ns / NS_PER_S), 1), MAX_RETRY_AFTER_S)
