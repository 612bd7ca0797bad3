"""Whether a pickle may be loaded: what it makes is bounded before anything of it is made.

A pickle refers to its own values, so a few bytes can stand for more than any memory holds, or for what takes for ever
to walk or to hash. Its operations are gone through here with sizes in place of values, in time and memory that are
linear in its length.

Source: `pickletools` of CPython 3.11 for the operations and their arguments. PyTorch writes those of protocol 2.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Final

from ingero.errors import BadDataError

_MAX_VALUES: Final = (1 << 20, 32)
_MAX_TEXT: Final = (1 << 26, 1024)
"""How many values, and bytes of text, a dump stands for: at most the first number and, for each byte of it, the second.

A frame of code is 7 values and some 100 bytes; PyTorch writes it once, and refers to it in 2 to 5 bytes.
"""
_MAX_DEPTH: Final = 100
"""Containers in containers; a dump has six. Python's own walks fail, or end the process, at depths from 1000 on."""
_PLAIN: Final = (
    (pickle.NONE, 0), (pickle.NEWTRUE, 0), (pickle.NEWFALSE, 0), (pickle.BININT1, 1), (pickle.BININT2, 2),
    (pickle.BININT, 4), (pickle.BINFLOAT, 8),
)  # fmt: skip
"""Operations that make one plain value, and how many bytes their argument has."""
_LENGTHS: Final = ((pickle.SHORT_BINUNICODE, 1), (pickle.BINUNICODE, 4), (pickle.BINUNICODE8, 8))
"""Operations that make a text, and how many bytes say how long it is."""
_END: Final = -1


class PickledContainer:
    """What stands for a list, a tuple or a mapping.

    Attributes:
        n_values: In it, and it, as if it were written out without references.
        n_text_bytes: Of the texts in it, likewise.
        depth: Containers in each other, this one included.
        is_final: Whether something refers to it, so that it may not grow.
    """

    __slots__ = ("depth", "is_final", "n_text_bytes", "n_values")

    def __init__(self) -> None:
        self.n_values = 1
        self.n_text_bytes = 0
        self.depth = 1
        self.is_final = False


Stacked = PickledContainer | int | None
"""A container, the length of a text in bytes, or None for any other value."""


class PickleCheck:
    """Goes through one pickle.

    Args:
        body: The pickle.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._max_values, self._max_text_bytes = (
            free + times * len(body) for free, times in (_MAX_VALUES, _MAX_TEXT)
        )
        self._stack: list[Stacked] = []
        self._marks: list[int] = []
        self._memo: dict[int, Stacked] = {}
        self._steps: list[Callable[[int], int]] = [self._refuse] * 256
        for code, n_bytes in _PLAIN:
            self._steps[code[0]] = self._build_plain(n_bytes)
        for code, n_bytes in _LENGTHS:
            self._steps[code[0]] = self._build_text(n_bytes)
        for n_values, code in enumerate((pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3), start=1):
            self._steps[code[0]] = self._build_tuple(n_values)
        for code, step in self._list_steps():
            self._steps[code[0]] = step

    def run(self) -> None:
        """Go through it, to its end or to the first class that it asks for, which no unpickler of ours gives.

        Raises:
            BadDataError: It makes other than plain values, or more of them than its length explains.
            IndexError: No whole pickle.
            KeyError: Likewise.
        """
        steps, body, at = self._steps, self._body, 0
        while at >= 0:
            at = steps[body[at]](at + 1)

    def _list_steps(self) -> tuple[tuple[bytes, Callable[[int], int]], ...]:
        """Operations; each takes where its argument begins and gives where it ends."""
        return (
            (pickle.PROTO, lambda at: at + 1),
            (pickle.FRAME, lambda at: at + 8),
            *((code, lambda _: _END) for code in (pickle.STOP, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.INST)),
            (pickle.MARK, self._mark),
            (pickle.LONG1, lambda at: self._push_number(at, 1)),
            (pickle.LONG4, lambda at: self._push_number(at, 4)),
            *((code, self._push_container) for code in (pickle.EMPTY_LIST, pickle.EMPTY_DICT, pickle.EMPTY_TUPLE)),
            (pickle.TUPLE, lambda at: self._make_tuple(at, self._marks.pop())),
            (pickle.APPEND, lambda at: self._add(at, len(self._stack) - 1)),
            (pickle.APPENDS, lambda at: self._add(at, self._marks.pop())),
            (pickle.SETITEM, lambda at: self._set(at, len(self._stack) - 2)),
            (pickle.SETITEMS, lambda at: self._set(at, self._marks.pop())),
            (pickle.BINGET, lambda at: self._get(at + 1, self._body[at])),
            (pickle.LONG_BINGET, lambda at: self._get(at + 4, self._read(at, 4))),
            (pickle.BINPUT, lambda at: self._put(at + 1, self._body[at])),
            (pickle.LONG_BINPUT, lambda at: self._put(at + 4, self._read(at, 4))),
            (pickle.MEMOIZE, lambda at: self._put(at, len(self._memo))),
        )  # fmt: skip

    def _read(self, at: int, n_bytes: int) -> int:
        return int.from_bytes(self._body[at : at + n_bytes], "little")

    def _build_plain(self, n_bytes: int) -> Callable[[int], int]:
        push = self._stack.append

        def step(at: int) -> int:
            push(None)
            return at + n_bytes

        return step

    def _build_text(self, n_bytes: int) -> Callable[[int], int]:
        def step(at: int) -> int:
            length = self._read(at, n_bytes)
            self._stack.append(length)
            return at + n_bytes + length

        return step

    def _build_tuple(self, n_values: int) -> Callable[[int], int]:
        return lambda at: self._make_tuple(at, len(self._stack) - n_values)

    def _refuse(self, at: int) -> int:
        raise BadDataError(
            f"no plain values: the operation {self._body[at - 1 : at]!r} is in no Flight Recorder dump"
        )

    def _mark(self, at: int) -> int:
        self._marks.append(len(self._stack))
        return at

    def _push_number(self, at: int, n_bytes: int) -> int:
        length = self._read(at, n_bytes)
        if length > 8:  # products of such numbers take for ever
            raise BadDataError("the dump holds a number of more than 64 bits")
        self._stack.append(None)
        return at + n_bytes + length

    def _push_container(self, at: int) -> int:
        self._stack.append(PickledContainer())
        return at

    def _make_tuple(self, at: int, start: int) -> int:
        self._stack.insert(start, PickledContainer())
        return self._add(at, start + 1)

    def _add(self, at: int, start: int) -> int:
        """Put what is on the stack from `start` on into the container before it."""
        container = self._stack[start - 1] if start > 0 else None
        if not isinstance(container, PickledContainer):
            raise IndexError("no container to add to")
        if container.is_final:
            raise BadDataError("the dump adds to a value that is part of another one")
        container.n_values += len(self._stack) - start
        for value in self._stack[start:]:
            if isinstance(value, PickledContainer):
                value.is_final = True
                container.n_values += value.n_values - 1
                container.n_text_bytes += value.n_text_bytes
                container.depth = max(container.depth, value.depth + 1)
            elif value:
                container.n_text_bytes += value
        del self._stack[start:]
        is_larger = container.n_text_bytes > self._max_text_bytes
        if is_larger or container.n_values > self._max_values:
            raise BadDataError(f"the dump stands for far more than its {len(self._body)} bytes")
        if container.depth > _MAX_DEPTH:
            raise BadDataError(f"the dump nests more than {_MAX_DEPTH} values in each other")
        return at

    def _set(self, at: int, start: int) -> int:
        # Chosen numbers may all meet in one place, and a tuple is hashed with all in it; a text's hash is secret.
        if not all(isinstance(name, int) for name in self._stack[start::2]):
            raise BadDataError("the dump has a mapping whose names are not text")
        return self._add(at, start)

    def _get(self, at: int, number: int) -> int:
        value = self._memo[number]
        if isinstance(value, PickledContainer):
            value.is_final = True
        self._stack.append(value)
        return at

    def _put(self, at: int, number: int) -> int:
        if number > len(self._body):  # the unpickler makes room for every number up to it
            raise BadDataError(f"the dump numbers a value {number} in {len(self._body)} bytes")
        self._memo[number] = self._stack[-1]
        return at


def check_pickle(body: bytes) -> None:
    """Refuse a pickle that is not safe to load. Linear in its length: some 0.5 µs an operation of 1 to 9 bytes.

    Raises:
        BadDataError: It makes other than plain values, or more of them than its length explains.
        IndexError: No whole pickle.
        KeyError: Likewise.
    """
    PickleCheck(body).run()
