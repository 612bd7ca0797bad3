"""What the connections of one OTLP/gRPC listener share, and how much of what costs work one of them may send."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.grpc_calls import OtlpGrpcSettings
from ingero.serving.otlp.h2_frames import H2Code, H2Error
from ingero.serving.otlp.handler import OtlpHandler, OtlpRequest
from ingero.serving.otlp.open_connections import OpenConnections

CONTROL_BURST: Final = 2048
CONTROLS_PER_CALL: Final = 8
CONTROLS_PER_S: Final = 256
RESET_BURST: Final = 256
RESETS_PER_S: Final = 64


class ServiceCall(Protocol):
    """A call of a method that is no export, as its method sees it."""

    on_end: Callable[[], None] | None

    @property
    def n_waiting_bytes(self) -> int:
        """What its client's flow control has not let through."""
        ...

    def send(self, message: bytes) -> None:
        """Send one message."""
        ...

    def end(self, code: int, message: str = "") -> None:
        """Send the status; nothing follows it."""
        ...


ServiceMethod = Callable[[ServiceCall, bytes], None]
"""Called with a call and its one message, on the event loop."""


class Allowance:
    """How much of something a client may still send: so much at once, and what comes back with time and use.

    Args:
        burst: The most.
        reason: What is said when there is none left.
    """

    __slots__ = ("_burst", "_left", "_reason")

    def __init__(self, burst: int, reason: str) -> None:
        self._burst = burst
        self._left: float = burst
        self._reason = reason

    def spend(self) -> None:
        """Take one.

        Raises:
            H2Error: There is none left.
        """
        self._left -= 1
        if self._left < 0:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, self._reason)

    def refill(self, n: float) -> None:
        """Give some back."""
        left = self._left + n
        self._left = min(self._burst, left)


class GrpcShared(OpenConnections):
    """What the connections of one listener share. One event loop owns it.

    Args:
        settings: Limits.
        handler: Who may send, and what becomes of it.
        methods: What else is served, by path.

    Attributes:
        settings: Likewise.
        handler: Likewise.
        methods: Likewise.
        n_in_flight: Exports that have no answer yet.
        n_buffered_bytes: What they hold of messages that are not complete.
        too_large: The refusal of a message over the limit.
    """

    def __init__(
        self,
        settings: OtlpGrpcSettings,
        handler: OtlpHandler,
        methods: Mapping[bytes, ServiceMethod],
    ) -> None:
        super().__init__(settings.connections)
        self.settings = settings
        self.handler = handler
        self.methods = methods
        self.n_in_flight = 0
        self.n_buffered_bytes = 0
        message = f"the message is over {settings.max_message_bytes} bytes"
        self.too_large = RequestRefusal(
            OtlpAnswer(AnswerStatus.TOO_LARGE, message), Reason.TOO_LARGE
        )

    @property
    def is_full(self) -> bool:
        """Whether no further export may be received now."""
        return self.n_in_flight >= self.settings.max_in_flight

    def buffer(self, n_bytes: int) -> bool:
        """Count what an unfinished message holds; False when all of them together are too much."""
        self.n_buffered_bytes += n_bytes
        limit = self.settings.max_buffered_bytes
        return limit is None or self.n_buffered_bytes <= limit

    def count_broken(self, peer: str, reason: Reason, message: str) -> None:
        """Count a connection that ends for what its client sent, or did not send."""
        request = OtlpRequest(transport="grpc", peer=peer)
        request.context = self.handler.open(request)
        refusal = RequestRefusal(OtlpAnswer(AnswerStatus.BAD_DATA, message), reason)
        self.handler.refused(request, refusal)
