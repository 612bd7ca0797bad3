"""The end of things: what a ``with`` statement needs of a class, and an event that a signal sets."""

from __future__ import annotations

import _thread
import threading
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


def set_in_handler(event: threading.Event) -> None:
    """Set an event from within a signal's handler, in a thread of its own.

    A handler may interrupt its own thread while that holds the event's lock, for it begins to wait: to set it there
    would wait for ever. Source: Python's documentation of ``signal``, "Signals and threads".
    """
    _thread.start_new_thread(event.set, ())
