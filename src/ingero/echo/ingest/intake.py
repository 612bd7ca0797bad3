"""`Intake`: one decoded request on its way to the disk: whose rows, may they be written, when are they durable."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import numpy as np

from ingero.echo.db.rows import NodeKey, Rows
from ingero.echo.db.store import Store
from ingero.echo.ingest.limits import RecordLimits, RefusalReason, Refusals
from ingero.echo.ingest.logs import add_logs
from ingero.echo.ingest.metrics import add_metrics
from ingero.echo.ingest.origin import Origins
from ingero.echo.ingest.quotas import SeriesMeter
from ingero.echo.ingest.spans import add_spans
from ingero.echo.ingest.undated import date_rows
from ingero.echo.schema.tables import EVENTS, HISTOGRAMS
from ingero.errors import BadDataError, IngeroError, PermanentError
from ingero.otlp.codec import Export
from ingero.otlp.names import Signal
from ingero.serving.bearer import Principal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S, NS_PER_US

_LOG: Final = logging.getLogger("ingero.echo")
_NODE_REPEAT_NS: Final = 15 * NS_PER_S
_NODE_REPEAT: Final = timedelta(microseconds=_NODE_REPEAT_NS // NS_PER_US)
_KNOWN_NODES: Final = 50_000
_SAY_EVERY_NS: Final = 10 * NS_PER_S


class ForbiddenError(PermanentError):
    """The bearer may not write these rows.

    Args:
        clusters: The foreign ones, for the audit log.
    """

    def __init__(self, clusters: Iterable[str]) -> None:
        super().__init__("this bearer may not write to a cluster that the request names")
        self.clusters = frozenset(clusters)


@dataclass(frozen=True, slots=True)
class Built:
    """A decoded request.

    Attributes:
        rows: What is to be written.
        refusals: Records that will not be.
    """

    rows: Rows
    refusals: Refusals


_ADD: Final = {Signal.METRICS: add_metrics, Signal.LOGS: add_logs, Signal.TRACES: add_spans}


class Intake:
    """Turns exports into committed rows.

    Args:
        store: Where rows go.
        clock: Arrival times.
        limits: What one record may hold.

    Attributes:
        series: What bearers with a quota of series have used of it.
    """

    def __init__(self, store: Store, clock: Clock, limits: RecordLimits | None = None) -> None:
        self._store = store
        self._clock = clock
        self._origins = Origins(limits or RecordLimits())
        self._acks = LoopAcks()
        self.series = SeriesMeter(clock)
        self._nodes: dict[NodeKey, tuple[int, int, datetime]] = {}
        self._next_say_ns = 0

    def build(self, export: Export, principal: Principal, hint: str) -> Built:
        """Columns of an export, and the records that cannot be kept. Any thread.

        Raises:
            ForbiddenError: Some row belongs to a cluster that the bearer may not touch.
            BadDataError: Nothing of it can be read.
        """
        rows = Rows(n_bytes=export.size_bytes)
        now_ns = self._clock.wall_ns()
        try:
            refusals = _ADD[export.signal](rows, export, self._origins, hint, now_ns)
        except RecursionError as error:
            raise BadDataError("values are nested too deeply") from error
        except Exception as error:  # whatever a body holds, it alone is refused
            self._say(error)
            raise BadDataError("it cannot be read") from error
        date_rows(rows, now_ns)
        rows.name_cluster(hint)
        _check_clusters(rows, principal)
        rows.bearer = principal.label
        if principal.quota.max_series is not None:
            self._hold_to_series(rows, refusals, principal)
        self._drop_known_nodes(rows)
        return Built(rows, refusals)

    def _hold_to_series(self, rows: Rows, refusals: Refusals, principal: Principal) -> None:
        """Leave out rows of series that are more than the bearer may have, and nodes of which no row is kept."""
        n_before = rows.n_rows
        for name in (EVENTS.name, HISTOGRAMS.name):
            table = rows.tables.get(name)
            if table is None or not table.series:
                continue
            is_kept = self.series.admit(principal, np.array(table.series, dtype=np.uint64))
            n_refused = len(is_kept) - int(is_kept.sum())
            if n_refused:
                table.keep_listed(is_kept)
                rows.n_rows -= n_refused
                refusals.add_many(
                    RefusalReason.QUOTA,
                    n_refused,
                    f"new series beyond this bearer's max_series of {principal.quota.max_series}",
                )
        if rows.n_rows < n_before:
            kept = {
                key
                for table in rows.tables.values()
                for key in zip(table.columns[1], table.columns[2], strict=True)
            }
            rows.nodes = {key: row for key, row in rows.nodes.items() if key in kept}

    def _say(self, error: Exception) -> None:
        """A body that meets a defect of ours: its place in the code, once in ten seconds."""
        if self._clock.mono_ns() >= self._next_say_ns:
            self._next_say_ns = self._clock.mono_ns() + _SAY_EVERY_NS
            _LOG.error("an OTLP body was refused because of a defect", exc_info=error)

    def find_stored_bytes(self, principal: Principal) -> int:
        """Bytes of values that a bearer's clusters have stored."""
        return self._store.usage.find_stored_bytes(principal.clusters)

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
        if len(known) + len(rows.nodes) > _KNOWN_NODES:
            known.clear()
        for key in list(rows.nodes):
            said = rows.nodes[key]
            newest = said[-1]["ts"]
            content_hash = hash(
                tuple(tuple(value for name, value in row.items() if name != "ts") for row in said)
            )
            before = known.get(key)
            if (
                before is not None
                and before[0] == content_hash
                and now_ns - before[1] < _NODE_REPEAT_NS
                and newest - before[2] < _NODE_REPEAT
            ):
                del rows.nodes[key]
            else:
                known[key] = (content_hash, now_ns, newest)


def _check_clusters(rows: Rows, principal: Principal) -> None:
    """Hold everything that a request names or would write to be the bearer's: rows of every table, and nodes."""
    if principal.clusters is None:
        return
    seen = rows.clusters | {cluster_id for cluster_id, _ in rows.nodes}
    for table in rows.tables.values():
        seen.update(table.columns[1])
        for chunk in table.chunks:
            seen.update(chunk.batch.column("cluster_id").unique().to_pylist())
    if not seen <= principal.clusters:
        raise ForbiddenError(seen - principal.clusters)


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
        with suppress(RuntimeError):  # the loop is over, and with it the one that waited
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
