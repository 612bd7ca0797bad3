"""Bodies that differ from good ones: cut, spliced, repeated, and with values that break what counts on them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Final

MAX_BYTES: Final = 1 << 20
_GROWN_BYTES: Final = 1 << 16
"""A body grows to this, or to twice the longest seed."""

_NUMBERS: Final = (
    0,
    1,
    -1,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**63 - 1,
    -(2**63),
)
TOKENS: Final = (
    *(struct.pack("<q", number) for number in _NUMBERS),
    *(struct.pack("<I", number & 0xFFFF_FFFF) for number in _NUMBERS),
    *(struct.pack("<d", number) for number in (float("nan"), float("inf"), -0.0, 1e308, 5e-324)),
    *(str(number).encode() for number in (*_NUMBERS, 2**64, 10**400)),
    *(b"\xff" * 9 + b"\x01", b"\x80" * 10, b"\xff\xff\xff\xff\x0f"),  # the largest and too long varints
    *(b"\x0b" * 200, b"\x0c" * 200, b"\x0a\x00" * 100),  # groups of a protobuf, and empty messages
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"null", b"true", b'""', b"[]", b"{}", b"\\ud800", b"\\u0000"),
    *(b"[" * 3000, b'{"a":' * 1000, b"- " * 1000, b"*a", b"&a [*a,*a]", b"!!python/object:os.system", b"${env:HOME}"),
    *(b"\x00", b"\xff", b"\xc3\x28", b"\xed\xa0\x80", b"\xf0\x9f\x92\xa5", b"\n", b"\r\n", b"'; DROP TABLE events--"),
)  # fmt: skip


class Mutator:
    """Makes bodies of good ones.

    Args:
        seeds: Bodies to begin with.
        random: Chooses.
    """

    def __init__(self, seeds: Sequence[bytes], random: Random) -> None:
        self.pool = list(seeds)
        self._random = random
        self._max_bytes = min(MAX_BYTES, max(_GROWN_BYTES, *(2 * len(seed) for seed in seeds)))
        self._ways: tuple[Callable[[bytearray], None], ...] = (
            self._flip, self._flip, self._set_byte, self._cut_out, self._cut_off, self._repeat, self._overwrite,
            self._insert, self._splice, self._replace_number,
        )  # fmt: skip

    def make(self) -> bytes:
        """The next body."""
        random = self._random
        body = bytearray(random.choice(self.pool))
        for _ in range(1 + int(random.expovariate(1.6))):
            random.choice(self._ways)(body)
        return bytes(body[: self._max_bytes])

    def _place(self, body: bytearray) -> int:
        return self._random.randrange(len(body)) if body else 0

    def _range(self, body: bytearray) -> tuple[int, int]:
        start = self._place(body)
        return start, min(len(body), start + 1 + int(self._random.expovariate(1 / 16)))

    def _flip(self, body: bytearray) -> None:
        if body:
            body[self._place(body)] ^= 1 << self._random.randrange(8)

    def _set_byte(self, body: bytearray) -> None:
        if body:
            body[self._place(body)] = self._random.choice(b'\x00\x01\x7f\x80\xff "[]{},:0-')

    def _cut_out(self, body: bytearray) -> None:
        start, end = self._range(body)
        del body[start:end]

    def _cut_off(self, body: bytearray) -> None:
        if self._random.random() < 0.3:
            del body[self._place(body) :]

    def _repeat(self, body: bytearray) -> None:
        start, end = self._range(body)
        times = self._random.choice((1, 1, 2, 8, 200))
        body[end:end] = body[start:end] * times

    def _overwrite(self, body: bytearray) -> None:
        token = self._random.choice(TOKENS)
        start = self._place(body)
        body[start : start + len(token)] = token

    def _insert(self, body: bytearray) -> None:
        start = self._place(body)
        body[start:start] = self._random.choice(TOKENS)

    def _splice(self, body: bytearray) -> None:
        other = self._random.choice(self.pool)
        start = self._random.randrange(len(other)) if other else 0
        end = start + 1 + int(self._random.expovariate(1 / 64))
        place = self._place(body)
        replaced = self._random.choice((0, end - start))
        body[place : place + replaced] = other[start:end]

    def _replace_number(self, body: bytearray) -> None:
        """Digits, where the body is text."""
        start = self._place(body)
        while start < len(body) and not 48 <= body[start] <= 57:
            start += 1
        end = start
        while end < len(body) and 48 <= body[end] <= 57:
            end += 1
        if end > start:
            body[start:end] = str(self._random.choice((*_NUMBERS, 10**30))).encode()
