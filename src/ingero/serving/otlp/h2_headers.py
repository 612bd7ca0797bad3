"""Header blocks: read with hpack and remembered by their bytes, and written without the dynamic table.

A gRPC client whose table is warm sends the same block again and again. What a block means depends on its bytes and on
the dynamic table alone, so a block that left the table as it was means the same until one changes it.

Source: RFC 7541.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.table import HeaderTable
from typing_extensions import override

from ingero.serving.otlp.h2_frames import H2Code, H2Error

Fields = tuple[tuple[bytes, bytes], ...]
ReadT = TypeVar("ReadT")

_MAX_KNOWN: Final = 16
_MAX_KNOWN_BYTES: Final = 2048
NO_TABLE: Final = b"\x20"
"""Dynamic table size update to 0: before the first block, so that no setting of the peer's asks for another."""
STATUS_200: Final = b"\x88"
_SIZE_UPDATE: Final = 0x20
_SIZE_UPDATE_MASK: Final = 0xE0


class _CountingTable(HeaderTable):
    """A dynamic table that knows how often it was added to."""

    n_added = 0

    @override
    def add(self, name: bytes, value: bytes) -> None:
        self.n_added += 1
        super().add(name, value)


class BlockReader(Generic[ReadT]):
    """Reads the header blocks of one connection, each once and in their order.

    Args:
        max_bytes: Largest list of fields, as RFC 9113 section 6.5.2 counts it.
        build: What is made of a block's fields, and remembered.
    """

    __slots__ = ("_build", "_decoder", "_known", "_table")

    def __init__(self, max_bytes: int, build: Callable[[Fields], ReadT]) -> None:
        self._build = build
        self._decoder = Decoder(max_bytes)
        self._table = self._decoder.header_table = _CountingTable()
        self._known: dict[bytes, ReadT] = {}

    def read(self, block: bytes) -> ReadT:
        """What `build` made of the block.

        Raises:
            H2Error: It cannot be read, or its list is too large.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        n_added = self._table.n_added
        try:
            fields = tuple((bytes(name), bytes(value)) for name, value in self._decode(block))
        except OversizedHeaderListError as error:
            raise H2Error(H2Code.ENHANCE_YOUR_CALM, "the header list is too large") from error
        except HPACKError as error:
            raise H2Error(H2Code.COMPRESSION_ERROR, f"not HPACK: {error!s:.100}") from error
        read = self._build(fields)
        is_resized = bool(block) and block[0] & _SIZE_UPDATE_MASK == _SIZE_UPDATE
        if is_resized or self._table.n_added != n_added:
            self._known.clear()  # each may mean something else now, this one too
        elif len(block) <= _MAX_KNOWN_BYTES:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[block] = read
        return read

    def _decode(self, block: bytes) -> Iterable[tuple[bytes, bytes]]:
        return self._decoder.decode(block, raw=True)


def write_block(fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Fields as literals without indexing (RFC 7541, section 6.2.2), without Huffman coding."""
    return b"".join(
        b"\x00" + _write_length(name) + name + _write_length(value) + value
        for name, value in fields
    )


def _write_length(text: bytes) -> bytes:
    """The length of a string: seven bits, and more where they are full (RFC 7541, section 5.1)."""
    rest = len(text)
    if rest < 0x7F:
        return bytes((rest,))
    rest -= 0x7F
    made = bytearray((0x7F,))
    while rest >= 0x80:
        made.append(rest & 0x7F | 0x80)
        rest >>= 7
    made.append(rest)
    return bytes(made)
