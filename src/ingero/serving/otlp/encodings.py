"""Content encodings of request bodies.

Decompression is bounded: it stops at the limit, whatever the compressed size promised.

Source of the names of encodings: opentelemetry-collector ``config/configcompression``; ``snappy`` is one block, or
the framed format where a sender of Collectors before 0.126 calls that ``snappy``.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Final

import zstandard

from ingero.errors import BadDataError

_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS
_AUTO_WINDOW: Final = 32 + zlib.MAX_WBITS
INFLATE_STEP_BYTES: Final = 1 << 16
"""Taken at once: the end of a member copies what of it follows."""
MAX_MEMBERS: Final = 1024
"""Of one body. A member of nothing is 20 bytes, so that no limit of what comes out bounds their number."""
_ZSTD_WINDOW_BYTES: Final = 8 << 20
"""RFC 8878 section 3.1.1.1.2 recommends to support 8 MiB; larger windows are refused, as they are memory."""
_ZSTD_STEP_BYTES: Final = 256
"""Taken at once. A block is at least 4 bytes and at most 128 KiB decompressed (RFC 8878 section 3.1.1.2), so 8 MiB are
the most that can come out beyond the limit."""


class TooLargeError(BadDataError):
    """A body over the limit, before or after decompression."""


def decompress(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """Undo a Content-Encoding.

    Args:
        body: As received.
        encoding: One of `ENCODINGS`; anything else is a programming error.
        limit_bytes: Most bytes that may come out.

    Raises:
        TooLargeError: More came out.
        BadDataError: It is not such data, or is cut short.
    """
    return _DECOMPRESSORS[encoding](body, limit_bytes)


def _inflate(window: int) -> Callable[[bytes, int], bytes]:
    def inflate(body: bytes, limit_bytes: int) -> bytes:
        parts: list[bytes] = []
        view = memoryview(body)
        room, offset, n_members = limit_bytes + 1, 0, 0
        while offset < len(view):  # gzip allows several members, one after the other
            n_members += 1
            if n_members > MAX_MEMBERS:
                raise BadDataError(f"the compressed body has more than {MAX_MEMBERS} members")
            stream = zlib.decompressobj(window)
            while not stream.eof:
                taken = view[offset : offset + INFLATE_STEP_BYTES]
                if not taken:
                    raise BadDataError("the compressed body is cut short")
                try:
                    part = stream.decompress(taken, room)
                except zlib.error as error:
                    raise BadDataError(f"the body cannot be decompressed: {error}") from error
                offset += len(taken) - len(stream.unused_data)
                room -= len(part)
                if room <= 0:
                    raise TooLargeError(_OVER.format(limit_bytes))
                parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return inflate


def _unzstd(body: bytes, limit_bytes: int) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
    parts: list[bytes] = []
    room, offset = limit_bytes, 0
    try:
        while offset < len(body):  # a body may be several frames, one after the other
            frame = decompressor.decompressobj()
            while not frame.eof:
                taken = body[offset : offset + _ZSTD_STEP_BYTES]
                if not taken:
                    raise BadDataError("the compressed body is cut short")
                part = frame.decompress(taken)
                offset += len(taken) - len(frame.unused_data)
                room -= len(part)
                if room < 0:
                    raise TooLargeError(_OVER.format(limit_bytes))
                parts.append(part)
    except zstandard.ZstdError as error:
        raise BadDataError(f"the body cannot be decompressed: {error}") from error
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _into(
    fill: Callable[[bytes, bytearray], int],
) -> Callable[[bytes, int], bytes]:
    """A decompressor that fills a buffer: one byte more than the limit tells that there was more."""

    def decompress_into(body: bytes, limit_bytes: int) -> bytes:
        if not body:
            raise BadDataError("the compressed body is empty")
        import cramjam  # noqa: PLC0415 -- 1.6 MB, for encodings that few senders use

        buffer = bytearray(limit_bytes + 1)  # pages that are not written take no memory
        try:
            n_bytes = fill(body, buffer)
        except cramjam.DecompressionError as error:
            if any(sign in str(error) for sign in _NO_ROOM):
                raise TooLargeError(_OVER.format(limit_bytes)) from error
            raise BadDataError(f"the body cannot be decompressed: {error}") from error
        if n_bytes > limit_bytes:
            raise TooLargeError(_OVER.format(limit_bytes))
        return bytes(memoryview(buffer)[:n_bytes])

    return decompress_into


def _fill_snappy(body: bytes, buffer: bytearray) -> int:
    import cramjam  # noqa: PLC0415

    if body.startswith(_SNAPPY_STREAM):
        return _fill_snappy_stream(body, buffer)
    return cramjam.snappy.decompress_raw_into(body, buffer)


def _fill_snappy_stream(body: bytes, buffer: bytearray) -> int:
    import cramjam  # noqa: PLC0415

    return cramjam.snappy.decompress_into(body, buffer)


def _fill_lz4(body: bytes, buffer: bytearray) -> int:
    import cramjam  # noqa: PLC0415

    return cramjam.lz4.decompress_into(body, buffer)


_OVER: Final = "the body is over {} bytes after decompression"
_NO_ROOM: Final = ("failed to write whole buffer", "output buffer")
_SNAPPY_STREAM: Final = b"\xff\x06\x00\x00sNaPpY"
"""Stream identifier. Source: google/snappy, framing_format.txt, section 4.1."""

_DECOMPRESSORS: Final[dict[str, Callable[[bytes, int], bytes]]] = {
    "gzip": _inflate(_GZIP_WINDOW),
    "zlib": _inflate(_AUTO_WINDOW),
    "deflate": _inflate(_AUTO_WINDOW),
    "zstd": _unzstd,
    "snappy": _into(_fill_snappy),
    "x-snappy-framed": _into(_fill_snappy_stream),
    "lz4": _into(_fill_lz4),
}
ENCODINGS: Final = frozenset(_DECOMPRESSORS)
"""Names of the encodings that can be undone."""
