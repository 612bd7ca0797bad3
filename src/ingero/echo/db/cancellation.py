"""`Cancellation`: ends work on another thread whose result is not wanted any more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ingero.echo.db.errors import DeadlineError


class Cancellation:
    """That of one query. What works for it says how it is stopped; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._actions: list[Callable[[], None]] = []
        self._is_set = False

    @property
    def is_set(self) -> bool:
        """The result is not wanted."""
        return self._is_set

    def set(self) -> None:
        """Stop what runs, and what begins later."""
        with self._lock:
            self._is_set = True
            for action in self._actions:
                action()

    @contextmanager
    def calls(self, action: Callable[[], None]) -> Iterator[None]:
        """Within, `set` calls ``action``; never after it, so that it may use what is closed then.

        Raises:
            DeadlineError: It is set already.
        """
        with self._lock:
            if self._is_set:
                raise DeadlineError("cannot answer: the client has gone")
            self._actions.append(action)
        try:
            yield
        finally:
            with self._lock:
                self._actions.remove(action)
