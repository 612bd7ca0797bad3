"""What a ``with`` statement needs of a class that has to be closed."""

from __future__ import annotations

from typing import Protocol, Self


class _Closable(Protocol):
    def close(self) -> None: ...


class Closing:
    """Makes ``with`` call a class's own ``close`` at the end."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closable, *_: object) -> None:
        self.close()
