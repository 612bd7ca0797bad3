"""`ByteBudget`: the bytes of bodies that all requests together may hold, and the share that one bearer may."""

from __future__ import annotations

import asyncio
from collections import Counter


class ByteBudget:
    """Bytes that are reserved before they are read. One event loop owns it.

    Args:
        total_bytes: Of all bearers.
        share_bytes: Of one bearer.
    """

    def __init__(self, total_bytes: int, share_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._share_bytes = share_bytes
        self._by_key: Counter[str] = Counter()
        self._n_bytes = 0
        self._freed = asyncio.Event()

    def try_take(self, key: str, n_bytes: int) -> bool:
        """Reserve if there is room; also what is larger than the share, if its owner holds nothing else."""
        own = self._by_key.get(key, 0)
        if own and own + n_bytes > self._share_bytes:
            return False
        if self._n_bytes and self._n_bytes + n_bytes > self._total_bytes:
            return False
        self._by_key[key] += n_bytes
        self._n_bytes += n_bytes
        return True

    async def take(self, key: str, n_bytes: int) -> None:
        """Reserve, waiting until there is room; the caller sets the time limit."""
        while not self.try_take(key, n_bytes):
            await self._freed.wait()

    def give_back(self, key: str, n_bytes: int) -> None:
        """Free what was reserved."""
        self._n_bytes -= n_bytes
        self._by_key[key] -= n_bytes
        if not self._by_key[key]:
            del self._by_key[key]
        self._freed.set()  # every waiter looks again
        self._freed.clear()
