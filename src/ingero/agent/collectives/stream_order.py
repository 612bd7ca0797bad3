"""What a wait of the host ends, on which stream: CUDA's events, and streams that wait for them.

A wait for a stream ends what was enqueued on it before. It also ends what another stream had been given when an event
was recorded there, if the first stream was made to wait for that event (cudaStreamWaitEvent) before. PyTorch runs
collectives on streams of their own and makes the current stream wait for them so: `loss.item()` then waits for the
current stream alone. Source: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution", Streams and Events; the
newest record of an event when a call waits for it is the one that counts (CUDA Runtime API, cudaEventRecord).

Bounded, and what is beyond a bound ends nothing: `_MAX_EVENTS` events, `_MAX_STREAMS` streams, the last `_N_MARKS`
records of an event and the last `_N_ORDERS` orders between two streams, chains of `_MAX_DEPTH` streams. Not followed
are events of the driver's interface and what the legacy default stream orders by itself; the default streams of several
devices are taken for one.
"""

from __future__ import annotations

from collections import deque
from typing import Final

_MAX_EVENTS: Final = 4096
_MAX_STREAMS: Final = 256
_N_MARKS: Final = 8
_N_ORDERS: Final = 64
_MAX_DEPTH: Final = 4


class StreamOrder:
    """Events and streams of one process. Times are those of the calls' beginnings, on one clock."""

    def __init__(self) -> None:
        self._marks: dict[int, deque[tuple[int, int]]] = {}
        self._orders: dict[int, dict[int, deque[tuple[int, int]]]] = {}

    def record(self, event: int, stream: int, at_ns: int) -> None:
        """An event was recorded on a stream."""
        if event not in self._marks and len(self._marks) >= _MAX_EVENTS:
            self._marks.clear()
        self._marks.setdefault(event, deque(maxlen=_N_MARKS)).append((at_ns, stream))

    def order(self, stream: int, event: int, at_ns: int) -> None:
        """A stream was made to wait for an event."""
        mark = self.find_mark(event, at_ns)
        if mark is None or mark[0] == stream:
            return
        first, upto_ns = mark
        if stream not in self._orders and len(self._orders) >= _MAX_STREAMS:
            self._orders.clear()
        known = self._orders.setdefault(stream, {})
        if first not in known and len(known) >= _MAX_STREAMS:
            known.clear()
        known.setdefault(first, deque(maxlen=_N_ORDERS)).append((at_ns, upto_ns))

    def find_mark(self, event: int, at_ns: int) -> tuple[int, int] | None:
        """The stream on which an event was recorded last, and when; None where that is not known."""
        found = _find_newest(self._marks.get(event, ()), at_ns)
        return None if found is None else (found[1], found[0])

    def find_ended(self, stream: int, at_ns: int) -> list[tuple[int, int]]:
        """What is over when everything is that a stream had been given by then.

        Returns:
            Streams, each with the time until which what it was given is over; the stream itself first.
        """
        ended: dict[int, int] = {}
        waiting = [(stream, at_ns, 0)]
        while waiting:
            one, upto_ns, depth = waiting.pop()
            if ended.get(one, -1) >= upto_ns:
                continue
            ended[one] = upto_ns
            for first, orders in self._orders.get(one, {}).items() if depth < _MAX_DEPTH else ():
                found = _find_newest(orders, upto_ns)
                if found is not None:
                    waiting.append((first, found[1], depth + 1))
        return list(ended.items())


def _find_newest(timed: deque[tuple[int, int]] | tuple[()], at_ns: int) -> tuple[int, int] | None:
    """The newest entry that is not later than a time."""
    return next((one for one in reversed(timed) if one[0] <= at_ns), None)
