"""What one connection sends: frames in their order, and messages as far as the client's flow control lets them.

Source: RFC 9113, section 5.2 and 6.9.
"""

from __future__ import annotations

from collections.abc import Callable

from ingero.serving.otlp.h2_frames import (
    DATA,
    FIRST_WINDOW_BYTES,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    RST_STREAM,
    H2Code,
    H2Error,
    write_frame,
    write_headers,
    write_word,
)
from ingero.serving.otlp.h2_headers import NO_TABLE


class Outflow:
    """What one stream sends.

    Args:
        stream_id: Which.
        window: How much its client takes.

    Attributes:
        stream_id: Likewise.
        window: How much more its client takes.
        pending: What waits for the window.
        trailers: The last header block, which follows it; None where more may be added.
        stalled_s: Since when something waits, as the connection notices; None when nothing does.
        is_done: Whether everything was said.
    """

    __slots__ = ("is_done", "pending", "stalled_s", "stream_id", "trailers", "window")

    def __init__(self, stream_id: int, window: int) -> None:
        self.stream_id = stream_id
        self.window = window
        self.pending = b""
        self.trailers: bytes | None = None
        self.stalled_s: float | None = None
        self.is_done = False


class FrameSender:
    """What a connection sends.

    Args:
        flush_soon: Called when there is something to send.

    Attributes:
        unsent: Frames that were not given to the transport.
        window: How much more the client takes on the connection.
        stream_window: How much it takes first on each stream.
    """

    __slots__ = ("_flush_soon", "_is_first", "stream_window", "unsent", "window")

    def __init__(self, flush_soon: Callable[[], None]) -> None:
        self._flush_soon = flush_soon
        self._is_first = True
        self.unsent: list[bytes] = []
        self.window = FIRST_WINDOW_BYTES
        self.stream_window = FIRST_WINDOW_BYTES

    def say(self, frames: bytes) -> None:
        """Send soon, with what else is to be sent."""
        if not self.unsent:
            self._flush_soon()
        self.unsent.append(frames)

    def begin(self, out: Outflow, block: bytes) -> None:
        """The first header block of an answer that has messages."""
        self._say_block(out, block, ends=False)

    def add(self, out: Outflow, data: bytes, trailers: bytes | None = None) -> None:
        """Messages, and the last header block behind them."""
        out.pending = out.pending + data if out.pending else data
        out.trailers = trailers
        self.pump(out)

    def finish(self, out: Outflow, block: bytes) -> None:
        """The only or the last header block."""
        self._say_block(out, block, ends=True)
        out.is_done = True

    def pump(self, out: Outflow) -> None:
        """Send what the windows let through."""
        pending = out.pending
        n_sent, n_bytes = 0, len(pending)
        while n_sent < n_bytes:
            n = min(n_bytes - n_sent, self.window, out.window, MAX_FRAME_BYTES)
            if n <= 0:
                break
            self.say(write_frame(DATA, 0, out.stream_id, pending[n_sent : n_sent + n]))
            self.window -= n
            out.window -= n
            n_sent += n
        if n_sent < n_bytes:
            out.pending = pending[n_sent:]
            return
        out.pending = b""
        out.stalled_s = None
        if out.trailers is not None and not out.is_done:
            self.finish(out, out.trailers)

    def reset(self, stream_id: int, code: H2Code) -> None:
        """End a stream."""
        self.say(write_word(RST_STREAM, stream_id, code))

    def widen(self, n_bytes: int) -> None:
        """The client takes more on the connection.

        Raises:
            H2Error: More than there can be.
        """
        self.window += n_bytes
        if self.window > MAX_WINDOW_BYTES:
            raise H2Error(H2Code.FLOW_CONTROL_ERROR, "the connection's window is too large")

    def _say_block(self, out: Outflow, block: bytes, *, ends: bool) -> None:
        if self._is_first:
            self._is_first = False
            block = NO_TABLE + block
        self.say(write_headers(out.stream_id, block, ends=ends))
