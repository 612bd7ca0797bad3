"""One cluster's pushes from the stream, applied in their order by its judge, and by a standby up to where that is.

A standby learns what the judge knows and reports nothing. It stops at the ledger's mark, because what comes after it
may not have been passed on; when it becomes the judge, that is all that is left to apply.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ingero.errors import BadDataError, IngeroError, RetryableError
from ingero.fleet.component import Learner, ReportSender
from ingero.fleet.jetstream.clock import StreamClock
from ingero.fleet.jetstream.connection import NatsConnection, StoredMessage
from ingero.fleet.jetstream.ledger import LEDGER_KEY, LedgerOfCluster
from ingero.fleet.jetstream.messages import LoggedPush, decode_ledger, decode_push
from ingero.fleet.jetstream.publishing import PUBLISH_INTERVAL_S, AnswerPublisher, StreamEndpoint
from ingero.fleet.jetstream.telemetry import JUDGED, TAKEOVER_SECONDS, TAKEOVERS
from ingero.fleet.workers.messages import RelayedAnswer
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_BEHIND_S: Final = 0.02
_SAFE_SHARE: Final = 0.5
"""Of a lease, in which a report may leave: the rest is for confirming it before another Fleet may read the ledger."""
_PAUSE_EVERY: Final = 64
"""Pushes of a replay after which other tasks of the loop have their turn."""
_log = logging.getLogger("ingero.fleet.nats")


@dataclass(slots=True)
class Lease:
    """A key that this Fleet holds: to judge a cluster, or to be its standby.

    Attributes:
        key: In the bucket of leases.
        revision: Of the document.
        renewed_ns: Monotonic time before which it surely was renewed.
    """

    key: str
    revision: int
    renewed_ns: int


@dataclass(frozen=True, slots=True)
class JudgingContext:
    """What all clusters of a Fleet share.

    Attributes:
        name: Of this Fleet, for people.
        connection: The way to the servers.
        lease_ns: After which a silent judge is replaced.
        clock: Set to a push's time while it is applied.
        meter: Where is counted.
        endpoints: Receivers' protocols.
        learners: Components that judge.
        senders: Of reports, by their names.
    """

    name: str
    connection: NatsConnection
    lease_ns: int
    clock: StreamClock
    meter: MeterRegistry
    endpoints: Sequence[StreamEndpoint]
    learners: Sequence[Learner]
    senders: Mapping[str, ReportSender]


class StreamCluster:
    """A cluster that this Fleet judges or follows. On the loop.

    Args:
        token: The cluster's.
        lease: By which this Fleet judges it, or is its standby.
        context: What all clusters share.
        fail: Called with what ends its tasks.

    Attributes:
        token: The cluster's.
        lease: The one that is held now.
        ledger: What was reported.
        cluster_id: Known with the first push.
        is_learned: Whether it knows what its predecessor knew, so that it reports and answers.
    """

    def __init__(
        self,
        token: str,
        lease: Lease,
        context: JudgingContext,
        fail: Callable[[StreamCluster, str], None],
    ) -> None:
        self.token = token
        self.lease = lease
        self.ledger = LedgerOfCluster(context.connection, token, self._is_leased, context.senders)
        self.cluster_id: str | None = None
        self.is_learned = False
        self._context = context
        self._fail = fail
        self._tasks: list[asyncio.Task[None]] = []
        self._following: asyncio.Task[None] | None = None
        self._reader = _StreamReader(context)
        self._publisher: AnswerPublisher | None = None
        self._said: Mapping[str, str] = {}

    @property
    def is_judge(self) -> bool:
        """Whether this Fleet has the judge's lease."""
        return self.lease.key == self.token

    def _is_leased(self) -> bool:
        """Whether a report may leave: the lease holds, and surely for some time."""
        context = self._context
        return context.clock.mono_ns() - self.lease.renewed_ns <= _SAFE_SHARE * context.lease_ns

    def follow(self) -> None:
        """Begin to apply what its judge has passed on."""
        self._following = self._start(self._follow_mark())
        self._start(self._read())

    def judge(self, lease: Lease) -> None:
        """Begin to judge it, or go on with that from following it."""
        self.lease = lease
        self._start(self._take_over())
        if self._following is None:
            self._start(self._read())
        else:
            self._following.cancel()

    def end(self) -> None:
        """Apply nothing more, and report nothing of it."""
        for task in self._tasks:
            task.cancel()
        if self.cluster_id is not None:
            for learner in self._context.learners:
                learner.begin_replay(self.cluster_id, {})

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._guard(work))
        self._tasks.append(task)
        return task

    async def _guard(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except (RetryableError, BadDataError) as error:
            self._fail(self, error.message)

    async def _follow_mark(self) -> None:
        """Learn how far the judge is."""
        connection = self._context.connection
        bucket = connection.documents
        subject = f"$KV.{bucket}.{LEDGER_KEY}{self.token}"
        async for message in connection.follow(f"KV_{bucket}", subject, 1):
            ledger = decode_ledger(message.data)
            self._said = self._said or ledger.restore()
            self._reader.allow(ledger.passed_seq)

    async def _take_over(self) -> None:
        """Open the ledger, and judge as soon as all is applied that the stream has now."""
        reader, context = self._reader, self._context
        began_ns = context.clock.mono_ns()
        async with reader.lock:
            self._said = await self.ledger.open()
            last_seq = await context.connection.find_last(self.token)
            reader.begin_judging(began_ns, last_seq)
            await self._end_replay_if_done()

    async def _read(self) -> None:
        """Apply each push as soon as this Fleet may."""
        reader, connection = self._reader, self._context.connection
        n_read = 0
        subject = connection.prefix + self.token
        async for message in connection.follow(connection.pushes, subject, 1):
            await reader.wait_for_turn(message.seq)
            await self._check_lease()
            async with reader.lock:
                await self._apply(message)
                reader.note_applied(message.seq)
                await self._end_replay_if_done()
            n_read += 1
            if not self.is_learned and not n_read % _PAUSE_EVERY:
                await asyncio.sleep(0)

    async def _check_lease(self) -> None:
        """Wait until the lease is renewed, if it may be another's, as after a pause of the process."""
        context = self._context
        while (  # noqa: ASYNC110 -- time passes, nobody tells
            self.is_judge and context.clock.mono_ns() - self.lease.renewed_ns > context.lease_ns
        ):
            await asyncio.sleep(_BEHIND_S)

    async def _end_replay_if_done(self) -> None:
        """Report from here on, where all is applied that came before the take-over."""
        cluster_id, publisher, context = self.cluster_id, self._publisher, self._context
        if self.is_learned or not self._reader.is_done or cluster_id is None or publisher is None:
            return
        await self._reader.catch_up(cluster_id)
        for learner in context.learners:
            learner.end_replay(cluster_id, self._said)
        self.is_learned = True
        self._start(self.ledger.run(PUBLISH_INTERVAL_S))
        self._start(publisher.run())
        took_s = self._reader.find_took_s()
        context.meter.gauge(TAKEOVER_SECONDS).set(took_s)
        context.meter.counter(TAKEOVERS).add(1)
        _log.info(
            "judging cluster %s, of which %d pushes were replayed in %.2f s",
            cluster_id, self._reader.n_applied, took_s,
        )  # fmt: skip

    async def _apply(self, message: StoredMessage) -> None:
        reader, context = self._reader, self._context
        try:
            logged = decode_push(message.data)
            endpoint = context.endpoints[logged.push.endpoint_idx]
        except (BadDataError, IndexError) as error:
            reader.count["refused"](1)
            _log.error("push %d of %s not read: %r", message.seq, self.token, error)
            return
        if self._publisher is None:
            self.cluster_id = logged.cluster_id
            self._publisher = AnswerPublisher(
                context.name, context.connection, context.endpoints, logged.cluster_id
            )
            for learner in context.learners:
                learner.begin_replay(logged.cluster_id, self._said)
        await reader.catch_up(logged.cluster_id)
        is_replay = not reader.is_judging or message.seq <= self.ledger.passed_seq
        at_ns = reader.date(message)
        for learner in context.learners:
            learner.note_stored(logged.cluster_id, message.stored_wall_ns, at_ns)
        answer, node_id, cohort = await reader.take(endpoint, logged, at_ns, is_replay=is_replay)
        if reader.is_judging:
            self.ledger.note_passed(message.seq)
        self._publisher.note(answer, node_id, cohort)


class _StreamReader:
    """How far a cluster's pushes are applied, and how far they may be."""

    def __init__(self, context: JudgingContext) -> None:
        self.lock = asyncio.Lock()
        self.n_applied = 0
        self._context = context
        self._applied_seq = 0
        self._dated_ns = 0
        self._allowed_seq: float = 0
        self._last_seq = 0
        self._began_ns: int | None = None
        self._has_turn = asyncio.Event()
        judged = context.meter.counter(JUDGED)
        self.count = {one: judged.bound(outcome=one) for one in ("replayed", "live", "refused")}

    @property
    def is_judging(self) -> bool:
        """Whether the ledger is open, and pushes are passed on."""
        return self._began_ns is not None

    @property
    def is_done(self) -> bool:
        """Whether all is applied that the stream had when the cluster was taken over."""
        return self._began_ns is not None and self._applied_seq >= self._last_seq

    def allow(self, seq: int) -> None:
        """Pushes up to this one were passed on by the judge."""
        self._allowed_seq = max(seq, self._allowed_seq)
        self._has_turn.set()

    def begin_judging(self, began_ns: int, last_seq: int) -> None:
        """Every push may be applied; up to this one, they came before."""
        self._began_ns, self._last_seq, self.n_applied = began_ns, last_seq, 0
        self._allowed_seq = float("inf")
        self._has_turn.set()

    def find_took_s(self) -> float:
        """Seconds since the take-over began."""
        assert self._began_ns is not None
        return (self._context.clock.mono_ns() - self._began_ns) / NS_PER_S

    def note_applied(self, seq: int) -> None:
        """A push was applied."""
        self._applied_seq = seq
        self.n_applied += 1

    async def wait_for_turn(self, seq: int) -> None:
        """Wait until a push may be applied."""
        while seq > self._allowed_seq:
            self._has_turn.clear()
            await self._has_turn.wait()

    async def catch_up(self, cluster_id: str) -> None:
        """Wait while too much of a cluster waits to be judged."""
        learners = self._context.learners
        while any(learner.is_behind(cluster_id) for learner in learners):  # noqa: ASYNC110 -- on another thread
            await asyncio.sleep(_BEHIND_S)

    def date(self, message: StoredMessage) -> int:
        """When a push was stored, on the monotonic clock."""
        clock, is_live = self._context.clock, self.is_judging and message.seq > self._last_seq
        self._dated_ns = clock.date(message.stored_wall_ns, self._dated_ns, is_live=is_live)
        return self._dated_ns

    async def take(
        self, endpoint: StreamEndpoint, logged: LoggedPush, at_ns: int, *, is_replay: bool
    ) -> tuple[RelayedAnswer, str, str]:
        """Apply a push, however long the pipelines want to wait: it was acknowledged."""
        log = self._context.connection.log
        while True:
            with self._context.clock.at(at_ns):
                try:
                    taken = endpoint.apply_logged(logged, is_replay=is_replay)
                except RetryableError as error:
                    log.write(
                        "pipelines", logging.WARNING, "the pipelines take nothing",
                        error=error.message,
                    )  # fmt: skip
                except IngeroError as error:
                    self.count["refused"](1)
                    _log.error("a push was refused permanently: %s", error.message)
                    return RelayedAnswer(0, "PERMANENT", error.message), "", ""
                else:
                    self.count["replayed" if is_replay else "live"](1)
                    return taken
            await asyncio.sleep(_BEHIND_S)
