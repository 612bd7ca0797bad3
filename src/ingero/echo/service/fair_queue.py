"""`FairQueue`: places that tenants share, so that no tenant's first query waits for another's second."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ingero.errors import RetryableError
from ingero.serving.bearer import Principal
from ingero.units import NS_PER_S


class QueueFullError(RetryableError):
    """The tenant has too many questions waiting already."""


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
        what: What a place is for, in the message to who got none.
        n_places: Queries being answered.
        per_tenant: Of these, one tenant's at most.
        wait_ns: Longest wait.
        max_waiting: Queries of one tenant that may wait.
    """

    def __init__(
        self, what: str, n_places: int, per_tenant: int, wait_ns: int, max_waiting: int = 16
    ) -> None:
        self._what = what
        self._n_places = n_places
        self._per_tenant = per_tenant
        self._wait_ns = wait_ns
        self._max_waiting = max_waiting
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
        queue = self._waiting.setdefault(tenant, deque())
        if len(queue) >= self._max_waiting:
            raise QueueFullError(
                f"{len(queue)} of your questions wait for {self._what} already",
                retry_after_ns=self._wait_ns,
            )
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.append(place)
        self._serve()
        try:
            async with asyncio.timeout(self._wait_ns / NS_PER_S):
                await place
        except TimeoutError:
            self._give_up(tenant, place)
            raise RetryableError(
                f"every place for {self._what} is taken", retry_after_ns=self._wait_ns
            ) from None
        except asyncio.CancelledError:
            self._give_up(tenant, place)
            raise

    def release(self, tenant: str) -> None:
        """Give the place back."""
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._serve()

    def _give_up(self, tenant: str, place: asyncio.Future[None]) -> None:
        if place.done() and not place.cancelled():
            self.release(tenant)  # the place came in the same moment
            return
        queue = self._waiting.get(tenant)
        if queue is not None and place in queue:
            queue.remove(place)
        self._forget_idle()

    def _serve(self) -> None:
        while self._running.total() < self._n_places:
            tenants = [
                tenant
                for tenant, queue in self._waiting.items()
                if queue and self._running[tenant] < self._per_tenant
            ]
            if not tenants:
                break
            tenant = min(tenants, key=lambda one: (self._running[one], self._served.get(one, 0)))
            place = self._waiting[tenant].popleft()
            if place.done():  # cancelled while it waited
                continue
            self._n_served += 1
            self._served[tenant] = self._n_served
            self._running[tenant] += 1
            place.set_result(None)
        self._forget_idle()

    def _forget_idle(self) -> None:
        for tenant in [tenant for tenant, queue in self._waiting.items() if not queue]:
            del self._waiting[tenant]
