"""When a cap is reached and when it no longer is: a refusal per push becomes a beginning and an end."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
_MAX_KEYS: Final = 4096


class CapWatch(Generic[KeyT]):
    """Which caps refuse now. The owner locks.

    Args:
        quiet_ns: A cap that refused nothing for this long is over.
    """

    def __init__(self, quiet_ns: int) -> None:
        self._quiet_ns = quiet_ns
        self._active: dict[KeyT, tuple[int, int]] = {}

    def refuse(self, key: KeyT, now_ns: int) -> bool:
        """Note a refusal; True when the cap was not known to refuse."""
        known = self._active.get(key)
        if known is None and len(self._active) >= _MAX_KEYS:
            return False
        self._active[key] = (now_ns, 1 if known is None else known[1] + 1)
        return known is None

    def take_ended(self, now_ns: int) -> list[tuple[KeyT, int]]:
        """Caps that refuse no longer, each with how often it had."""
        over = [
            (key, n_refused)
            for key, (last_ns, n_refused) in self._active.items()
            if now_ns - last_ns > self._quiet_ns
        ]
        for key, _ in over:
            del self._active[key]
        return over
