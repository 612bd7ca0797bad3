"""Several Fleets that act as one: a push goes to the one that took the last, and to the next when it is away."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ingero.agent.health.cache import HeaderOutcome
from ingero.agent.health.transport import PushReply, PushTransport
from ingero.otlp.codec import Export


class FailoverTransport:
    """A `PushTransport` over several.

    A Fleet that does not answer, asks to come again later, or is away by the word of its proxy, is passed over: the
    others are tried at once, each at most once, as long as that takes no longer than one may.

    Args:
        transports: In order of preference.
        timeout_ns: Longest wait for one answer.
        now_ns: Monotonic time.
    """

    def __init__(
        self, transports: Sequence[PushTransport], timeout_ns: int, now_ns: Callable[[], int]
    ) -> None:
        self._transports = tuple(transports)
        self._timeout_ns = timeout_ns
        self._now_ns = now_ns
        self._at = 0

    def send(self, export: Export, wall_ns: int) -> PushReply:
        """Send until a Fleet takes it; the last answer, with the threshold of one before where it has none."""
        began_ns = self._now_ns()
        reply = self._transports[self._at].send(export, wall_ns)
        known = reply.headers
        for _ in self._transports[1:]:
            if reply.is_settled:
                break
            self._at = (self._at + 1) % len(self._transports)
            if self._now_ns() - began_ns >= self._timeout_ns:
                break
            reply = self._transports[self._at].send(export, wall_ns)
            if reply.headers.outcome is not HeaderOutcome.MISS:
                known = reply.headers
        return reply if reply.headers is known else reply._replace(headers=known)

    def close(self) -> None:
        """Release connections."""
        for transport in self._transports:
            transport.close()
