"""The streams of one connection: frames in their order become calls, and move what they send.

What costs work and brings no call is bounded: PING, SETTINGS, WINDOW_UPDATE, PRIORITY, CONTINUATION, empty DATA and
frames of unknown kinds (CVE-2019-9512, -9515, -9518, CVE-2024-27316), and calls that their client resets
(CVE-2023-44487).

Source: RFC 9113, sections 5 and 6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from ingero.serving.otlp.answers import AnswerStatus, OtlpAnswer, Reason, RequestRefusal
from ingero.serving.otlp.grpc_call import CallOwner, GrpcCall
from ingero.serving.otlp.grpc_calls import (
    EXPORT_PATHS,
    UNIMPLEMENTED,
    CallHead,
    read_head,
    write_http_status,
    write_refusal,
)
from ingero.serving.otlp.grpc_shared import (
    CONTROL_BURST,
    CONTROLS_PER_CALL,
    CONTROLS_PER_S,
    RESET_BURST,
    RESETS_PER_S,
    Allowance,
)
from ingero.serving.otlp.h2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FIRST_WINDOW_BYTES,
    MAX_STREAM_ID,
    MAX_WINDOW_BYTES,
    PADDED,
    PING,
    PRIORITY,
    SETTINGS,
    WINDOW_UPDATE,
    Frame,
    H2Code,
    H2Error,
    SettingId,
    read_settings,
    read_word,
    strip_padding,
    strip_priority,
    write_frame,
    write_settings,
    write_word,
)
from ingero.serving.otlp.h2_headers import BlockReader
from ingero.serving.otlp.h2_sender import Outflow
from ingero.serving.otlp.handler import OtlpRequest

WINDOW_BYTES: Final = 1 << 20
"""How much a client may send before WINDOW_UPDATE says that it was read; its calls have windows of their own."""


class StreamOwner(CallOwner, Protocol):
    """The connection, as its streams see it."""

    def on_pong(self, payload: bytes) -> None:
        """A ping was answered."""
        ...


@dataclass(slots=True)
class _OpenBlock:
    """A header block that goes on in CONTINUATION."""

    stream_id: int
    flags: int
    since_s: float
    parts: list[bytes]
    n_bytes: int


class StreamTable:
    """The streams of one connection.

    Args:
        owner: The connection.

    Attributes:
        calls: Those that are open, by their streams.
        last_id: The last stream that became a call, or was refused.
        is_final: No further stream becomes a call.
    """

    __slots__ = (
        "_block",
        "_blocks",
        "_controls",
        "_has_settings",
        "_loop",
        "_n_read",
        "_owner",
        "_resets",
        "calls",
        "is_final",
        "last_id",
    )

    def __init__(self, owner: StreamOwner) -> None:
        limits = owner.shared.settings.connections
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._blocks: BlockReader[CallHead] = BlockReader(limits.max_head_bytes, read_head)
        self._block: _OpenBlock | None = None
        self._controls = Allowance(CONTROL_BURST, "too many frames that bring no call")
        self._resets = Allowance(RESET_BURST, "too many calls that were reset")
        self._n_read = 0
        self._has_settings = False
        self.calls: dict[int, GrpcCall] = {}
        self.last_id = 0
        self.is_final = False

    @property
    def block_since_s(self) -> float | None:
        """Since when a header block has been arriving; None where none is."""
        return None if self._block is None else self._block.since_s

    def take(self, frame: Frame) -> None:
        """Do what one frame says.

        Raises:
            H2Error: The connection has to end.
        """
        kind = frame.kind
        block = self._block
        if block is not None and (kind != CONTINUATION or frame.stream_id != block.stream_id):
            raise H2Error(H2Code.PROTOCOL_ERROR, "a header block was interrupted")
        if not self._has_settings:
            if kind != SETTINGS or frame.flags & ACK:
                raise H2Error(H2Code.PROTOCOL_ERROR, "the first frame is not SETTINGS")
            self._has_settings = True
        if kind < len(_TAKE):
            _TAKE[kind](self, frame)
        else:
            self._controls.spend()  # section 5.5: frames of unknown kinds are ignored

    def refill(self, passed_s: float) -> None:
        """Time has passed."""
        self._controls.refill(CONTROLS_PER_S * passed_s)
        self._resets.refill(RESETS_PER_S * passed_s)

    def answered(self) -> None:
        """A call was answered."""
        self._controls.refill(CONTROLS_PER_CALL)
        self._resets.refill(1)

    def take_data(self, frame: Frame) -> None:
        """DATA: section 6.1."""
        stream_id, flags, payload = frame.stream_id, frame.flags, frame.payload
        n_bytes = len(payload)
        self._n_read += n_bytes
        if self._n_read > WINDOW_BYTES // 2:
            self._owner.sender.say(write_word(WINDOW_UPDATE, 0, self._n_read))
            self._n_read = 0
        ends = bool(flags & END_STREAM)
        call = self.calls.get(stream_id)
        if call is None:
            self._check_known(stream_id, "DATA")
            if not n_bytes:
                self._controls.spend()
            return  # it was answered, or reset
        if not call.take_window(n_bytes):
            self._reset(call, H2Code.FLOW_CONTROL_ERROR)
            return
        if call.is_ended:
            self._reset(call, H2Code.STREAM_CLOSED)
            return
        if flags & PADDED:
            payload = strip_padding(flags, payload)
            if not ends and n_bytes > len(payload):
                call.give_window(n_bytes - len(payload))
        if not payload and not ends:
            self._controls.spend()
        call.receive(payload, ends=ends)

    def take_headers(self, frame: Frame) -> None:
        """HEADERS: section 6.2."""
        stream_id, flags = frame.stream_id, frame.flags
        if not stream_id & 1:
            raise H2Error(H2Code.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}")
        block = strip_priority(flags, strip_padding(flags, frame.payload))
        if flags & END_HEADERS:
            self._begin(stream_id, flags, block)
        else:
            self._block = _OpenBlock(stream_id, flags, self._loop.time(), [block], len(block))

    def take_continuation(self, frame: Frame) -> None:
        """CONTINUATION: section 6.10."""
        block = self._block
        if block is None:
            raise H2Error(H2Code.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        self._controls.spend()
        block.parts.append(frame.payload)
        block.n_bytes += len(frame.payload)
        shared = self._owner.shared
        if block.n_bytes > shared.settings.connections.max_head_bytes:
            shared.admission.counters.large_heads += 1
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, "the header block is too large")
        if frame.flags & END_HEADERS:
            self._block = None
            self._begin(block.stream_id, block.flags, b"".join(block.parts))

    def _begin(self, stream_id: int, flags: int, block: bytes) -> None:
        """A header block is complete: a new call, or the trailers of one."""
        head = self._blocks.read(block)
        ends = bool(flags & END_STREAM)
        call = self.calls.get(stream_id)
        if call is not None:
            if ends and not call.is_ended:
                call.receive(b"", ends=True)
            else:
                self._reset(call, H2Code.STREAM_CLOSED if call.is_ended else H2Code.PROTOCOL_ERROR)
            return
        if stream_id <= self.last_id or self.is_final:
            self._controls.spend()  # trailers of a call that was answered, or a call after GOAWAY
            return
        self.last_id = stream_id
        if head.is_malformed or len(self.calls) >= self._owner.shared.settings.max_streams:
            self._resets.spend()
            code = H2Code.PROTOCOL_ERROR if head.is_malformed else H2Code.REFUSED_STREAM
            self._owner.sender.reset(stream_id, code)
            return
        self._open(stream_id, head, ends=ends)

    def _open(self, stream_id: int, head: CallHead, *, ends: bool) -> None:
        shared = self._owner.shared
        method = shared.methods.get(head.path)
        if head.http_status != 200 or (head.signal is None and method is None):
            self._resets.spend()
            _turn_away(self._owner, stream_id, head, ends=ends)
            return
        call = self.calls[stream_id] = GrpcCall(self._owner, stream_id, head, self._loop.time())
        call.is_ended = ends
        if method is not None:
            call.begin_service(head, method)
        else:
            call.begin_export(head)
        if ends:
            call.receive(b"", ends=True)

    def take_reset(self, frame: Frame) -> None:
        """RST_STREAM: section 6.4."""
        read_word(frame.payload, "RST_STREAM")
        self._check_known(frame.stream_id, "RST_STREAM")
        call = self.calls.pop(frame.stream_id, None)
        if call is None:
            self._controls.spend()
            return
        call.drop()
        self._owner.close_call(call)
        self._resets.spend()

    def take_settings(self, frame: Frame) -> None:
        """SETTINGS: section 6.5."""
        if frame.stream_id:
            raise H2Error(H2Code.PROTOCOL_ERROR, "SETTINGS on a stream")
        self._controls.spend()
        if frame.flags & ACK:
            if frame.payload:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, "an acknowledgement with SETTINGS")
            return
        sender = self._owner.sender
        window = read_settings(frame.payload).get(SettingId.INITIAL_WINDOW_SIZE)
        sender.say(write_frame(SETTINGS, ACK, 0, b""))
        if window is not None:
            more, sender.stream_window = window - sender.stream_window, window
            for call in list(self.calls.values()):
                self._widen(call, more)

    def take_ping(self, frame: Frame) -> None:
        """PING: section 6.7."""
        if frame.stream_id:
            raise H2Error(H2Code.PROTOCOL_ERROR, "PING on a stream")
        if len(frame.payload) != 8:
            raise H2Error(H2Code.FRAME_SIZE_ERROR, f"PING of {len(frame.payload)} bytes")
        self._controls.spend()
        if frame.flags & ACK:
            self._owner.on_pong(frame.payload)
        else:
            self._owner.sender.say(write_frame(PING, ACK, 0, frame.payload))

    def take_ignored(self, frame: Frame) -> None:
        """PRIORITY (section 6.3), which is deprecated, and GOAWAY (6.8): its client closes when it has its answers."""
        n_bytes, stream_id = len(frame.payload), frame.stream_id
        if bool(stream_id) is not (frame.kind == PRIORITY):
            raise H2Error(H2Code.PROTOCOL_ERROR, f"frame {frame.kind} on stream {stream_id}")
        if n_bytes != 5 if frame.kind == PRIORITY else n_bytes < 8:
            raise H2Error(H2Code.FRAME_SIZE_ERROR, f"frame {frame.kind} of {n_bytes} bytes")
        self._controls.spend()

    def take_window_update(self, frame: Frame) -> None:
        """WINDOW_UPDATE: section 6.9."""
        n_bytes = read_word(frame.payload, "WINDOW_UPDATE") & MAX_STREAM_ID
        self._controls.spend()
        sender = self._owner.sender
        if not frame.stream_id:
            if not n_bytes:
                raise H2Error(H2Code.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            sender.widen(n_bytes)
            for waiting in list(self.calls.values()):
                self._pump(waiting)
            return
        self._check_known(frame.stream_id, "WINDOW_UPDATE")
        call = self.calls.get(frame.stream_id)
        if call is not None:
            if n_bytes:
                self._widen(call, n_bytes)
            else:
                self._reset(call, H2Code.PROTOCOL_ERROR)

    def _widen(self, call: GrpcCall, n_bytes: int) -> None:
        call.out.window += n_bytes
        if call.out.window > MAX_WINDOW_BYTES:
            self._reset(call, H2Code.FLOW_CONTROL_ERROR)
        else:
            self._pump(call)

    def _pump(self, call: GrpcCall) -> None:
        if call.out.pending:
            self._owner.sender.pump(call.out)
            call.close_if_done()

    def _check_known(self, stream_id: int, kind: str) -> None:
        """Refuse a frame on a stream that nobody opened (section 5.1, idle)."""
        if (stream_id > self.last_id and not self.is_final) or not stream_id & 1:
            raise H2Error(H2Code.PROTOCOL_ERROR, f"{kind} on idle stream {stream_id}")

    def _reset(self, call: GrpcCall, code: H2Code) -> None:
        """End a call by an error of its stream."""
        self._resets.spend()
        self.reset(call, code)

    def reset(self, call: GrpcCall, code: H2Code) -> None:
        """End a call without an answer."""
        stream_id = call.out.stream_id
        self.calls.pop(stream_id, None)
        call.drop()
        self._owner.sender.reset(stream_id, code)
        self._owner.close_call(call)


def greet(owner: StreamOwner) -> None:
    """The server's preface: its settings, and a larger window for the connection."""
    settings = owner.shared.settings
    initial_settings = {
        SettingId.MAX_CONCURRENT_STREAMS: settings.max_streams,
        SettingId.MAX_HEADER_LIST_SIZE: settings.connections.max_head_bytes,
    }
    wider = write_word(WINDOW_UPDATE, 0, WINDOW_BYTES - FIRST_WINDOW_BYTES)
    owner.sender.say(write_settings(initial_settings) + wider)


def _turn_away(owner: StreamOwner, stream_id: int, head: CallHead, *, ends: bool) -> None:
    """Answer and count what is no call of a method that is here."""
    shared, sender = owner.shared, owner.sender
    out = Outflow(stream_id, 0)
    if head.http_status != 200:
        status = AnswerStatus.METHOD if head.http_status == 405 else AnswerStatus.UNSUPPORTED
        message = "not a gRPC call: no POST of application/grpc"
        reason = Reason.METHOD if head.http_status == 405 else Reason.CONTENT_TYPE
        sender.finish(out, write_http_status(head.http_status))
    else:
        status, reason = AnswerStatus.NOT_FOUND, Reason.PATH
        served = ", ".join(path.decode() for path in (*EXPORT_PATHS, *shared.methods))
        message = f"nothing is served at {head.path.decode('latin-1')!r:.200}; here are {served}"
        sender.finish(out, write_refusal(UNIMPLEMENTED, message).trailers)
    if not ends:
        sender.reset(stream_id, H2Code.NO_ERROR)
    request = OtlpRequest(transport="grpc", peer=owner.peer)
    request.context = shared.handler.open(request)
    shared.handler.refused(request, RequestRefusal(OtlpAnswer(status, message), reason))


def _refuse_push(table: StreamTable, frame: Frame) -> None:
    """PUSH_PROMISE: section 8.4."""
    del table
    raise H2Error(H2Code.PROTOCOL_ERROR, f"PUSH_PROMISE on stream {frame.stream_id}")


_TAKE: Final[tuple[Callable[[StreamTable, Frame], None], ...]] = (
    StreamTable.take_data,
    StreamTable.take_headers,
    StreamTable.take_ignored,
    StreamTable.take_reset,
    StreamTable.take_settings,
    _refuse_push,
    StreamTable.take_ping,
    StreamTable.take_ignored,
    StreamTable.take_window_update,
    StreamTable.take_continuation,
)
"""By the kind of a frame."""
assert _TAKE[DATA] is StreamTable.take_data
