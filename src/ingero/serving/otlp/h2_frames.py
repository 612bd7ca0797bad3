"""HTTP/2's frames as bytes: cut out of what arrives, and written. No sockets, no streams here.

Source: RFC 9113, sections 3.4 (preface), 4 (frames), 6 (their kinds) and 7 (error codes).
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final, NamedTuple

from ingero.errors import BadDataError

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = range(5)
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(5, 10)
END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
HAS_PRIORITY: Final = 0x20

MAX_FRAME_BYTES: Final = 1 << 14
"""SETTINGS_MAX_FRAME_SIZE where it is not set, here and at every peer."""
FIRST_WINDOW_BYTES: Final = (1 << 16) - 1
"""SETTINGS_INITIAL_WINDOW_SIZE where it is not set, and the first window of every connection."""
MAX_WINDOW_BYTES: Final = (1 << 31) - 1
MAX_STREAM_ID: Final = (1 << 31) - 1
_HEAD: Final = struct.Struct(">HBBBL")
_SETTING: Final = struct.Struct(">HL")
_WORD: Final = struct.Struct(">L")


class SettingId(IntEnum):
    """Those that matter here."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class H2Code(IntEnum):
    """Error codes."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    ENHANCE_YOUR_CALM = 11


class H2Error(BadDataError):
    """What a connection error is in RFC 9113: GOAWAY, and the end.

    Args:
        code: Its error code.
        message: For a person.
    """

    def __init__(self, code: H2Code, message: str) -> None:
        super().__init__(message)
        self.code = code


class Frame(NamedTuple):
    """One frame."""

    kind: int
    flags: int
    stream_id: int
    payload: bytes


class FrameReader:
    """Cuts what a client sends into frames.

    Attributes:
        has_begun: Whether the preface was read.
    """

    __slots__ = ("_rest", "has_begun")

    def __init__(self) -> None:
        self._rest = b""
        self.has_begun = False

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now.

        Raises:
            H2Error: It is no HTTP/2, or a frame is larger than was allowed.
        """
        if self._rest:
            data = self._rest + data
        offset, end = 0, len(data)
        if not self.has_begun:
            if not data.startswith(PREFACE[:end]):
                raise H2Error(H2Code.PROTOCOL_ERROR, "not HTTP/2 with prior knowledge")
            if end < len(PREFACE):
                self._rest = data
                return []
            self.has_begun = True
            offset = len(PREFACE)
        frames: list[Frame] = []
        while end - offset >= _HEAD.size:
            high, low, kind, flags, stream_id = _HEAD.unpack_from(data, offset)
            n_bytes = high << 8 | low
            if n_bytes > MAX_FRAME_BYTES:
                raise H2Error(H2Code.FRAME_SIZE_ERROR, f"a frame of {n_bytes} bytes")
            begin = offset + _HEAD.size
            if begin + n_bytes > end:
                break
            offset = begin + n_bytes
            frames.append(Frame(kind, flags, stream_id & MAX_STREAM_ID, data[begin:offset]))
        self._rest = data[offset:]
        return frames


def write_frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    """One frame; its payload is at most what the peer takes."""
    n_bytes = len(payload)
    return _HEAD.pack(n_bytes >> 8, n_bytes & 0xFF, kind, flags, stream_id) + payload


def write_headers(stream_id: int, block: bytes, *, ends: bool) -> bytes:
    """A header block: HEADERS, and CONTINUATION where it is long."""
    end_stream = END_STREAM if ends else 0
    if len(block) <= MAX_FRAME_BYTES:
        return write_frame(HEADERS, END_HEADERS | end_stream, stream_id, block)
    parts = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    last = len(parts) - 1
    return b"".join(
        write_frame(
            CONTINUATION if number else HEADERS,
            (END_HEADERS if number == last else 0) | (0 if number else end_stream),
            stream_id,
            part,
        )
        for number, part in enumerate(parts)
    )


def write_settings(settings: dict[SettingId, int]) -> bytes:
    """SETTINGS."""
    return write_frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*one) for one in settings.items()))


def write_word(kind: int, stream_id: int, value: int) -> bytes:
    """RST_STREAM with its error code, or WINDOW_UPDATE with its increment."""
    return write_frame(kind, 0, stream_id, _WORD.pack(value))


def write_goaway(last_stream_id: int, code: int, message: str = "") -> bytes:
    """GOAWAY."""
    detail = message.encode("ascii", "replace")[:256]
    return write_frame(GOAWAY, 0, 0, _WORD.pack(last_stream_id) + _WORD.pack(code) + detail)


def strip_padding(flags: int, payload: bytes) -> bytes:
    """A payload without its padding.

    Raises:
        H2Error: The padding is longer than the payload.
    """
    if not flags & PADDED:
        return payload
    n_padding = payload[0] if payload else 0
    if n_padding >= len(payload):
        raise H2Error(H2Code.PROTOCOL_ERROR, "more padding than payload")
    return payload[1 : len(payload) - n_padding]


def strip_priority(flags: int, payload: bytes) -> bytes:
    """A HEADERS payload, without padding, without the deprecated priority.

    Raises:
        H2Error: It is too short for one.
    """
    if not flags & HAS_PRIORITY:
        return payload
    if len(payload) < 5:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, "HEADERS too short for its priority")
    return payload[5:]


def read_word(payload: bytes, kind: str) -> int:
    """A payload of four bytes.

    Raises:
        H2Error: It has another length.
    """
    if len(payload) != _WORD.size:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, f"{kind} of {len(payload)} bytes")
    (value,) = _WORD.unpack(payload)
    return int(value)


def read_settings(payload: bytes) -> dict[int, int]:
    """The settings of a peer, also those that mean nothing here; of one that is there twice, the last.

    Raises:
        H2Error: One has a value that it cannot have.
    """
    if len(payload) % _SETTING.size:
        raise H2Error(H2Code.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes")
    settings = dict(_SETTING.iter_unpack(payload))
    if settings.get(SettingId.ENABLE_PUSH, 0) > 1:
        raise H2Error(H2Code.PROTOCOL_ERROR, "SETTINGS_ENABLE_PUSH is neither 0 nor 1")
    if settings.get(SettingId.INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW_BYTES:
        raise H2Error(H2Code.FLOW_CONTROL_ERROR, "SETTINGS_INITIAL_WINDOW_SIZE is too large")
    if not MAX_FRAME_BYTES <= settings.get(SettingId.MAX_FRAME_SIZE, MAX_FRAME_BYTES) < 1 << 24:
        raise H2Error(H2Code.PROTOCOL_ERROR, "SETTINGS_MAX_FRAME_SIZE is out of its range")
    return settings
