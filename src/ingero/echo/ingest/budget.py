"""`ByteBudget`: the bytes of bodies that all requests together may hold, and the share that one bearer may."""

from __future__ import annotations

import asyncio
from collections import Counter


class ByteBudget:
    """Bytes that are reserved before they are read. One event loop owns it.

    Args:
        total_bytes: Of everybody.
        share_bytes: Of one bearer.
    """

    def __init__(self, total_bytes: int, share_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._share_bytes = share_bytes
        self._by_key: Counter[str] = Counter()
        self._n_bytes = 0
        self._freed = asyncio.Condition()

    @property
    def n_bytes(self) -> int:
        """Bytes reserved."""
        return self._n_bytes

    async def take(self, key: str, n_bytes: int) -> None:
        """Reserve, waiting until there is room; the caller sets the time limit."""
        if not self._has_room(key, n_bytes):
            async with self._freed:
                await self._freed.wait_for(lambda: self._has_room(key, n_bytes))
        self._by_key[key] += n_bytes
        self._n_bytes += n_bytes

    async def give_back(self, key: str, n_bytes: int) -> None:
        """Free what was reserved."""
        self._n_bytes -= n_bytes
        self._by_key[key] -= n_bytes
        if not self._by_key[key]:
            del self._by_key[key]
        async with self._freed:
            self._freed.notify_all()

    def _has_room(self, key: str, n_bytes: int) -> bool:
        """Also for what is larger than the share, if its owner holds nothing else."""
        own = self._by_key.get(key, 0)
        if own and own + n_bytes > self._share_bytes:
            return False
        return not self._n_bytes or self._n_bytes + n_bytes <= self._total_bytes
