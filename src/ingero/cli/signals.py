"""Signals as an orderly end: of a command that runs until then, and of one that has something to remove."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ingero.closing import set_in_handler


class StopSignals:
    """The signals that asked this process to end. Make one with `catch_stop`.

    Attributes:
        event: Set by the first.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self._received: list[int] = []

    def __call__(self) -> bool:
        """Whether there was one."""
        return bool(self._received)

    @property
    def first(self) -> int:
        """The number of the first; 0 for none."""
        return self._received[0] if self._received else 0

    @property
    def exit_status(self) -> int:
        """130 after Ctrl-C, 0 after SIGTERM or without a signal."""
        return 130 if signal.SIGINT in self._received else 0

    def note(self, number: int, _frame: FrameType | None) -> None:
        """The handler."""
        self._received.append(number)
        set_in_handler(self.event)


@contextmanager
def catch_stop() -> Iterator[StopSignals]:
    """Note signals instead of ending by them, while the context lasts."""
    stop = StopSignals()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, stop.note) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def unwind_on_end() -> Iterator[None]:
    """Have SIGTERM and SIGHUP unwind what runs, as Ctrl-C does, so that nothing temporary stays.

    The exit status is 128 and the number of the signal. Further ones do not interrupt that. One that is ignored, as
    SIGHUP behind nohup, stays ignored. Off the main thread it does nothing: signals are not received there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]

    def end(received: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + received)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
