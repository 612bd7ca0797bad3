"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def wait_until(check: Callable[[], ResultT], timeout_s: float = 120.0) -> ResultT:
    """Call until the result is true; that result.

    Raises:
        TimeoutError: It was not within ``timeout_s``, which is a limit for hangs and not an expectation.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"not seen within {timeout_s} s")
        time.sleep(0.02)
