"""`Intake`: one decoded request on its way to the disk: whose rows, may they be written, when are they durable."""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from ingero.echo.db.rows import Rows
from ingero.echo.db.store import Store
from ingero.echo.ingest.logs import add_logs
from ingero.echo.ingest.metrics import add_metrics
from ingero.echo.ingest.origin import Origins
from ingero.echo.ingest.spans import add_spans
from ingero.errors import IngeroError, PermanentError
from ingero.serving.bearer import Principal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.names import Signal
from ingero.wire.otlp import Export

_NODE_REPEAT_NS = 15 * NS_PER_S
_KNOWN_NODES = 100_000


class ForbiddenError(PermanentError):
    """The bearer may not write these rows."""


class Intake:
    """Turns exports into committed rows.

    Args:
        store: Where rows go.
        clock: Arrival times.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._local = threading.local()
        self._acks = LoopAcks()
        self._nodes: dict[tuple[str, str], tuple[int, int]] = {}
        self.refused_batches = 0

    def build(self, export: Export, principal: Principal, hint: str) -> tuple[Rows, int]:
        """Columns of an export, and the collective batches that could not be read. Any thread.

        Raises:
            ForbiddenError: Some row belongs to a cluster that the bearer may not touch.
        """
        rows = Rows()
        origins = getattr(self._local, "origins", None)
        if origins is None:
            origins = self._local.origins = Origins()
        now_ns = self._clock.wall_ns()
        n_refused = 0
        if export.signal is Signal.METRICS:
            add_metrics(rows, export, origins, hint, now_ns)
        elif export.signal is Signal.LOGS:
            n_refused = add_logs(rows, export, origins, hint, now_ns)
        else:
            add_spans(rows, export, origins, hint, now_ns)
        _check_clusters(rows, principal)
        self._drop_known_nodes(rows)
        self.refused_batches += n_refused
        return rows, n_refused

    async def write(self, rows: Rows) -> None:
        """Return once the rows are on disk.

        Raises:
            RetryableError: Not taken.
            StoreError: Not written.
        """
        if not rows.n_rows and not rows.nodes:
            return
        waiter = self._acks.waiter()
        self._store.put(rows, waiter.done)
        await waiter.future

    def _drop_known_nodes(self, rows: Rows) -> None:
        """Leave out what a node said in the last seconds already; the table is a summary, not a log."""
        now_ns = self._clock.mono_ns()
        known = self._nodes
        if len(known) > _KNOWN_NODES:
            known.clear()
        for key in list(rows.nodes):
            row = rows.nodes[key]
            said = hash(tuple(value for name, value in row.items() if name != "ts"))
            before = known.get(key)
            if before is not None and before[0] == said and now_ns - before[1] < _NODE_REPEAT_NS:
                del rows.nodes[key]
            else:
                known[key] = (said, now_ns)


def _check_clusters(rows: Rows, principal: Principal) -> None:
    if principal.clusters is None:
        return
    for table in rows.tables.values():
        seen = set(table.columns[1])
        for chunk in table.chunks:
            seen.update(chunk.batch.column("cluster_id").unique().to_pylist())
        if not seen <= principal.clusters:
            raise ForbiddenError("this bearer may not write to a cluster that the request names")


class Waiter:
    """One request that waits for its commit."""

    __slots__ = ("_acks", "error", "future")

    def __init__(self, acks: LoopAcks, future: asyncio.Future[None]) -> None:
        self._acks = acks
        self.future = future
        self.error: IngeroError | None = None

    def done(self, error: IngeroError | None) -> None:
        """Called on the writer's thread."""
        self.error = error
        self._acks.finish(self)


class LoopAcks:
    """Carries the writer's word to the event loop, one wake-up for a whole commit."""

    def __init__(self) -> None:
        self._finished: deque[Waiter] = deque()
        self._is_scheduled = False
        self._lock = threading.Lock()

    def waiter(self) -> Waiter:
        """A waiter of the running loop."""
        return Waiter(self, asyncio.get_running_loop().create_future())

    def finish(self, waiter: Waiter) -> None:
        """Queue a waiter that the writer is done with."""
        with self._lock:
            self._finished.append(waiter)
            if self._is_scheduled:
                return
            self._is_scheduled = True
        waiter.future.get_loop().call_soon_threadsafe(self._release)

    def _release(self) -> None:
        with self._lock:
            self._is_scheduled = False
            finished, self._finished = self._finished, deque()
        for waiter in finished:
            if waiter.future.done():
                continue  # the client went away; the rows are written all the same
            if waiter.error is None:
                waiter.future.set_result(None)
            else:
                waiter.future.set_exception(waiter.error)
