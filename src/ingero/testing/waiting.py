"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def wait_until(check: Callable[[], ResultT], timeout_s: float = 120.0) -> ResultT:
    """Call until the result is true; that result.

    The longer it takes, the longer are the pauses, up to a tenth of a second: what is called may ask a program for a
    whole page.

    Raises:
        TimeoutError: It was not within ``timeout_s``, which is a limit for hangs and not an expectation.
    """
    began = time.monotonic()
    while True:
        found = check()
        if found:
            return found
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise TimeoutError(f"not seen within {timeout_s} s")
        time.sleep(min(max(waited_s / 20, 0.01), 0.1))
