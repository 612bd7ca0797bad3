"""What becomes of one call: an export meets the handler, another method its own code.

An exchange is settled when nothing more of its client's message is wanted: it is refused, or being answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from ingero.errors import BadDataError
from ingero.otlp.names import SIGNAL_PATHS, ContentType, Signal
from ingero.serving.otlp.answers import (
    CUT_SHORT,
    AnswerStatus,
    OtlpAnswer,
    Reason,
    RequestRefusal,
)
from ingero.serving.otlp.encodings import TooLargeError, decompress
from ingero.serving.otlp.grpc_calls import (
    GRPC_ENCODINGS,
    HEAD,
    UNIMPLEMENTED,
    CallAnswer,
    CallHead,
    write_answer,
    write_message,
    write_refusal,
    write_status,
)
from ingero.serving.otlp.grpc_shared import GrpcShared, ServiceMethod
from ingero.serving.otlp.h2_sender import Outflow
from ingero.serving.otlp.handler import OtlpRequest
from ingero.units import NS_PER_S

_LOG: Final = logging.getLogger(__name__)
_PROTOBUF: Final = str(ContentType.PROTOBUF)
_MAX_SERVICE_BYTES: Final = 64 << 10
_RESOURCE_EXHAUSTED, _INVALID_ARGUMENT, _DEADLINE_EXCEEDED, _INTERNAL_CODE = 8, 3, 4, 13


def _refusal(status: AnswerStatus, message: str, reason: Reason) -> RequestRefusal:
    return RequestRefusal(OtlpAnswer(status, message), reason)


INTERNAL: Final = _refusal(AnswerStatus.PERMANENT, "internal error; see the log", Reason.INTERNAL)
TIMEOUT: Final = _refusal(
    AnswerStatus.TIMEOUT, "the message did not arrive in time", Reason.TIMEOUT
)
BROKEN: Final = _refusal(
    AnswerStatus.PERMANENT, "the call has no message, or a part of one", Reason.BAD_BODY
)
TOO_MANY: Final = _refusal(
    AnswerStatus.PERMANENT, "the call has more than one message", Reason.BAD_BODY
)
_BAD_FLAG: Final = _refusal(
    AnswerStatus.PERMANENT, "the message is compressed, and grpc-encoding is not there", Reason.BAD_BODY
)  # fmt: skip
_LATE: Final = OtlpAnswer(AnswerStatus.TIMEOUT, "not answered by the client's deadline")


class Exchange(Protocol):
    """What becomes of one call."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing more of its message is wanted."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether there is no room for its message yet."""
        ...

    def begin(self) -> None:
        """Its head has come."""
        ...

    def declare(self, flag: int, n_bytes: int) -> None:
        """The prefix of its message has come: whether it is compressed, and how long it is."""
        ...

    def take(self, body: bytes) -> None:
        """Its message has come."""
        ...

    def refuse(self, refusal: RequestRefusal) -> None:
        """It gets no further."""
        ...

    def drop(self) -> None:
        """Its client does not wait for an answer any more."""
        ...

    def expire(self) -> None:
        """Its client's deadline has passed while it was being answered."""
        ...


class AnsweredCall(Protocol):
    """A stream, as what becomes of its call sees it.

    Attributes:
        out: What it sends.
        is_closed: Whether nothing is sent any more.
    """

    out: Outflow
    is_closed: bool

    @property
    def peer(self) -> str:
        """Address of its client."""
        ...

    @property
    def peer_names(self) -> tuple[str, ...]:
        """Who its client's certificate is of."""
        ...

    def go_on(self) -> None:
        """There is room for the message."""
        ...

    def release(self) -> None:
        """Keep nothing of the message."""
        ...

    def answer(self, answer: CallAnswer) -> None:
        """Send an answer; nothing follows it."""
        ...

    def send(self, head: bytes | None, message: bytes) -> None:
        """Send one message of several."""
        ...

    def finish(self, trailers: bytes) -> None:
        """Send the status behind all messages."""
        ...


class ExportExchange:
    """One call of an OTLP service's ``Export``.

    Args:
        call: Its stream.
        shared: The listener's.
        head: What it asks.
        signal: What it exports.
    """

    __slots__ = (
        "_call",
        "_encoding",
        "_is_over",
        "_refusal",
        "_request",
        "_room",
        "_shared",
        "is_settled",
    )

    def __init__(
        self, call: AnsweredCall, shared: GrpcShared, head: CallHead, signal: Signal
    ) -> None:
        self._call = call
        self._shared = shared
        self._encoding = head.encoding
        self._refusal: RequestRefusal | None = None
        self._room: asyncio.Future[RequestRefusal | None] | None = None
        self._is_over = False
        self.is_settled = False
        self._request = OtlpRequest(
            transport="grpc",
            method="Export",
            path=SIGNAL_PATHS[signal],
            peer=call.peer,
            peer_names=call.peer_names,
            hint=head.hint,
            authorization=head.authorization,
            signal=signal,
            content_type=_PROTOBUF,
        )

    @property
    def is_waiting(self) -> bool:
        """Whether the handler has no room for the message yet."""
        return self._room is not None

    def begin(self) -> None:
        """Ask the handler whether its message is wanted."""
        shared, request = self._shared, self._request
        request.context = shared.handler.open(request)
        is_full = shared.is_full
        shared.n_in_flight += 1
        refusal = shared.handler.admit(request, is_full=is_full) or self._check_encoding()
        if refusal is not None:
            self.refuse(refusal)

    def _check_encoding(self) -> RequestRefusal | None:
        if not self._encoding or self._encoding in GRPC_ENCODINGS:
            return None
        names = ", ".join(sorted({"identity", *GRPC_ENCODINGS}))
        message = f"grpc-encoding {self._encoding!r:.80}; accepted: {names}"
        return _refusal(AnswerStatus.UNKNOWN_ENCODING, message, Reason.CONTENT_ENCODING)

    def declare(self, flag: int, n_bytes: int) -> None:
        """Have room for the message."""
        request, shared = self._request, self._shared
        if flag > 1 or (flag and not self._encoding):
            self.refuse(_BAD_FLAG)
            return
        if n_bytes > shared.settings.max_message_bytes:
            self.refuse(shared.too_large)
            return
        request.encoding = (
            self._encoding if flag and n_bytes else ""
        )  # snappy's stream of nothing is nothing
        request.n_declared_bytes = n_bytes
        room = shared.handler.reserve(request)
        if room is not None:
            self._room = asyncio.ensure_future(room)
            self._room.add_done_callback(self._on_room)

    def _on_room(self, room: asyncio.Future[RequestRefusal | None]) -> None:
        self._room = None
        if room.cancelled() or self.is_settled:
            return
        fault = room.exception()
        if fault is not None:
            _LOG.error("a call could not be handled", exc_info=fault)
        refusal = room.result() if fault is None else INTERNAL
        if refusal is not None:
            self.refuse(refusal)
        else:
            self._call.go_on()

    def take(self, body: bytes) -> None:
        """Hand the message to the handler."""
        self.is_settled = True
        try:
            answer = self._shared.handler.take(self._request, body)
        except Exception as error:  # noqa: BLE001 - one call's defect must not end the others of its connection
            _LOG.error("a call could not be handled", exc_info=error)
            self._shared.handler.refused(self._request, INTERNAL)
            self._finish(INTERNAL.answer)
            return
        if isinstance(answer, OtlpAnswer):
            self._finish(answer)
        else:
            self._hold(answer)

    def _hold(self, answer: Awaitable[OtlpAnswer]) -> None:
        task = asyncio.ensure_future(answer)
        self._shared.tasks.add(task)
        task.add_done_callback(self._on_answer)

    def _on_answer(self, task: asyncio.Future[OtlpAnswer]) -> None:
        self._shared.tasks.discard(task)
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            _LOG.error("a call could not be handled", exc_info=fault)
        if task.cancelled() or fault is not None:
            self._shared.handler.refused(self._request, INTERNAL)
            self._finish(INTERNAL.answer)
        else:
            self._finish(task.result())

    def refuse(self, refusal: RequestRefusal) -> None:
        """Answer with a refusal, later where it says so."""
        self.is_settled = True
        self._refusal = refusal
        self._call.release()
        if self._room is not None:
            self._room.cancel()
        if refusal.delay_ns:
            loop = asyncio.get_running_loop()
            loop.call_later(refusal.delay_ns / NS_PER_S, self._refuse_now)
        else:
            self._refuse_now()

    def _refuse_now(self) -> None:
        refusal = self._refusal
        if refusal is not None and not self._is_over:
            self._shared.handler.refused(self._request, refusal)
            self._finish(refusal.answer)

    def drop(self) -> None:
        """Count it, unless the handler has it: then it is applied, and nobody reads the answer."""
        if self._room is not None:
            self._room.cancel()
        if not self.is_settled or (self._refusal is not None and not self._is_over):
            self.is_settled = True
            self._shared.handler.refused(self._request, self._refusal or CUT_SHORT)
            self._end()

    def expire(self) -> None:
        """Answer; what the handler makes of it, it makes."""
        if not self._is_over and self._refusal is None:
            self._call.answer(write_answer(_LATE, self._request.signal))

    def _finish(self, answer: OtlpAnswer) -> None:
        self._end()
        call = self._call
        if call.is_closed:
            return
        headers = self._shared.handler.find_headers(self._request)
        metadata = () if headers is None else headers.metadata
        call.answer(write_answer(answer, self._request.signal, metadata))

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._shared.n_in_flight -= 1


class ServiceExchange:
    """One call of another method; what the method sees of it.

    Args:
        call: Its stream.
        encoding: Of a compressed message; empty for none.
        method: What answers.

    Attributes:
        on_end: Called when the call has ended, however it did.
    """

    __slots__ = (
        "_call",
        "_encoding",
        "_has_begun",
        "_method",
        "is_settled",
        "is_waiting",
        "on_end",
    )

    def __init__(self, call: AnsweredCall, encoding: str, method: ServiceMethod) -> None:
        self._call = call
        self._encoding = encoding
        self._method = method
        self._has_begun = False
        self.is_settled = False
        self.is_waiting = False
        self.on_end: Callable[[], None] | None = None

    @property
    def n_waiting_bytes(self) -> int:
        """What its client's flow control has not let through."""
        return len(self._call.out.pending)

    def begin(self) -> None:
        """Nobody has to be known."""
        if self._encoding and self._encoding not in GRPC_ENCODINGS:
            self.end(UNIMPLEMENTED, f"grpc-encoding {self._encoding!r:.80} is not known")

    def declare(self, flag: int, n_bytes: int) -> None:
        """Questions are small."""
        if flag > 1 or (flag and not self._encoding):
            self.refuse(_BAD_FLAG)
        elif n_bytes > _MAX_SERVICE_BYTES:
            self.end(_RESOURCE_EXHAUSTED, f"the message is over {_MAX_SERVICE_BYTES} bytes")
        elif not flag:
            self._encoding = ""

    def take(self, body: bytes) -> None:
        """Ask the method."""
        self.is_settled = True
        if self._encoding:
            try:
                body = decompress(body, self._encoding, _MAX_SERVICE_BYTES)
            except TooLargeError as error:
                self.end(_RESOURCE_EXHAUSTED, error.message)
                return
            except BadDataError as error:
                self.end(_INVALID_ARGUMENT, error.message)
                return
        self._method(self, body)

    def send(self, message: bytes) -> None:
        """Send one message."""
        self._call.send(None if self._has_begun else HEAD, write_message(message))
        self._has_begun = True

    def end(self, code: int, message: str = "") -> None:
        """Send the status."""
        self.is_settled = True
        self._call.release()
        if self._call.is_closed:
            return
        if self._has_begun:
            self._call.finish(write_status(code, message))
        else:
            self._call.answer(write_refusal(code, message))

    def refuse(self, refusal: RequestRefusal) -> None:
        """Answer with a refusal."""
        self.end(refusal.answer.status.grpc, refusal.answer.message)

    def drop(self) -> None:
        """It has ended."""
        self.is_settled = True
        if self.on_end is not None:
            on_end, self.on_end = self.on_end, None
            on_end()

    def expire(self) -> None:
        """Its client's deadline has passed."""
        self.end(_DEADLINE_EXCEEDED, _LATE.message)
