"""Whose question is answered next: places that tenants share, so that none of them waits for another's second question."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ingero.errors import RetryableError
from ingero.serving.bearer import Principal
from ingero.units import NS_PER_S


class QueueFullError(RetryableError):
    """The tenant has too many questions waiting already."""


@dataclass(frozen=True, slots=True)
class FairQueueSettings:
    """How many at once.

    Attributes:
        n_places: Questions being answered.
        per_tenant: Of these, one tenant's at most.
        max_waiting: Questions of one tenant that may wait.
        wait_ns: Longest wait.
    """

    n_places: int
    per_tenant: int
    max_waiting: int = 16
    wait_ns: int = 10 * NS_PER_S


def tenant_of(principal: Principal) -> str:
    """Bearers with the same list of clusters are one tenant; each that may read everything is its own."""
    if principal.clusters is None:
        return principal.digest
    return ",".join(sorted(principal.clusters))


class FairQueue:
    """Places, and who waits for one. One event loop owns it.

    A free place goes to the waiting tenant that has the fewest, among those to the one that was served longest ago, and
    there to its oldest question.

    Args:
        settings: How many.
        what: What a place is for, in the message to who got none.
    """

    def __init__(self, settings: FairQueueSettings, what: str) -> None:
        self._settings = settings
        self._what = what
        self._running: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._served: dict[str, int] = {}
        self._n_served = 0

    @property
    def n_waiting(self) -> int:
        """Questions that wait."""
        return sum(len(queue) for queue in self._waiting.values())

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a place and hold it.

        Raises:
            QueueFullError: Too many of this tenant's wait.
            RetryableError: None was free in time.
        """
        await self.acquire(tenant)
        try:
            yield
        finally:
            self.release(tenant)

    async def acquire(self, tenant: str) -> None:
        """Wait for a place; see `take`."""
        settings = self._settings
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= settings.max_waiting:
            raise QueueFullError(
                f"{len(queue)} of your questions wait for {self._what} already",
                retry_after_ns=settings.wait_ns,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(turn)
        self._serve()
        try:
            async with asyncio.timeout(settings.wait_ns / NS_PER_S):
                await turn
        except TimeoutError:
            self._give_up(tenant, turn)
            raise RetryableError(
                f"every place for {self._what} is taken", retry_after_ns=settings.wait_ns
            ) from None
        except asyncio.CancelledError:
            self._give_up(tenant, turn)
            raise

    def release(self, tenant: str) -> None:
        """Give the place back."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._serve()

    def _give_up(self, tenant: str, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            self.release(tenant)  # the place came in the same moment
            return
        queue = self._waiting.get(tenant)
        if queue is not None and turn in queue:
            queue.remove(turn)
        self._forget_idle()

    def _serve(self) -> None:
        settings = self._settings
        while self._running.total() < settings.n_places:
            tenants = [
                tenant
                for tenant, queue in self._waiting.items()
                if queue and self._running[tenant] < settings.per_tenant
            ]
            if not tenants:
                break
            tenant = min(tenants, key=lambda one: (self._running[one], self._served.get(one, 0)))
            turn = self._waiting[tenant].popleft()
            if turn.done():  # cancelled while it waited
                continue
            self._n_served += 1
            self._served[tenant] = self._n_served
            self._running[tenant] += 1
            turn.set_result(None)
        self._forget_idle()

    def _forget_idle(self) -> None:
        for tenant in [tenant for tenant, queue in self._waiting.items() if not queue]:
            del self._waiting[tenant]
