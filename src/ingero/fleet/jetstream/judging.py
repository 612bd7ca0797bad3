"""The judge's end: leases on clusters, their pushes from the stream, and news for those who receive.

A lease is a key that the bucket forgets unless it is renewed. The Fleet that holds a cluster's lease has all of its
pushes applied again from the beginning of the stream, while nothing of it is reported; then it goes on from the ledger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ingero.errors import BadDataError, IngeroError, RetryableError
from ingero.fleet.component import Learner
from ingero.fleet.jetstream.clock import StreamClock
from ingero.fleet.jetstream.connection import NatsConnection, OvertakenError, StoredMessage
from ingero.fleet.jetstream.ledger import LedgerOfCluster
from ingero.fleet.jetstream.messages import LoggedPush, build_token, decode_push
from ingero.fleet.jetstream.telemetry import (
    CLUSTERS,
    JUDGED,
    LEASES_LOST,
    TAKEOVER_SECONDS,
    TAKEOVERS,
)
from ingero.fleet.jetstream.telling import NEWS_INTERVAL_S, NewsTeller, StreamSeat
from ingero.fleet.workers.messages import RelayedAnswer
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_BEHIND_S: Final = 0.02
_PAUSE_EVERY: Final = 64
"""Pushes of a replay after which other tasks of the loop have their turn."""
_log = logging.getLogger("ingero.fleet.nats")


@dataclass(slots=True)
class _Case:
    """A cluster that this Fleet judges.

    Attributes:
        token: The cluster's.
        revision: Of the lease.
        renewed_ns: Monotonic time before which the lease surely was renewed.
        ledger: What was reported.
        cluster_id: Known with the first push.
        is_learned: Whether what came before the take-over was replayed.
        teller: Tells receivers of it; None before the first push.
        tasks: Those that work for it.
    """

    token: str
    revision: int
    renewed_ns: int
    ledger: LedgerOfCluster
    cluster_id: str | None = None
    is_learned: bool = False
    teller: NewsTeller | None = None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class StreamJudge:
    """Judges clusters by turns with other Fleets; a `ReportLedger`. Everything but `report` runs on the loop.

    Args:
        name: Of this Fleet, for people.
        connection: The way to the servers.
        lease_ns: After which a silent judge is replaced.
        clock: Set to a push's time while it is applied.
        meter: Where is counted.
    """

    def __init__(
        self,
        name: str,
        connection: NatsConnection,
        lease_ns: int,
        clock: StreamClock,
        meter: MeterRegistry,
    ) -> None:
        self._name = name
        self._connection = connection
        self._lease_ns = lease_ns
        self._clock = clock
        self._meter = meter
        self._loop = asyncio.get_running_loop()
        self._seats: Sequence[StreamSeat] = ()
        self._learners: Sequence[Learner] = ()
        self._cases: dict[str, _Case] = {}
        self._running: asyncio.Task[None] | None = None
        judged = meter.counter(JUDGED)
        self._count = {one: judged.bound(outcome=one) for one in ("replayed", "live", "refused")}

    def start(self, seats: Sequence[StreamSeat], learners: Sequence[Learner]) -> None:
        """Begin to look for clusters.

        Args:
            seats: Receivers' protocols, in the order in which every Fleet of the site has them.
            learners: Components that judge.
        """
        self._seats, self._learners = seats, learners
        self._meter.counter(TAKEOVERS).bound()
        self._meter.counter(LEASES_LOST).bound()
        self._running = self._loop.create_task(self._run())

    def judges(self, cluster_id: str) -> bool:
        """Whether this Fleet judges a cluster now."""
        case = self._cases.get(build_token(cluster_id))
        return case is not None and case.is_learned

    async def stop(self) -> None:
        """Write down what was reported, and hand every cluster to another Fleet."""
        if self._running is not None:
            self._running.cancel()
        for case in list(self._cases.values()):
            self._end_tasks(case)
            self._forget(case)
            if case.is_learned:
                await case.ledger.settle()
            try:
                await self._write_lease(case, b"")
            except RetryableError as error:
                _log.warning("the lease of %s runs out by itself: %s", case.token, error.message)
        self._cases.clear()

    def report(
        self, cluster_id: str, said: Mapping[str, str | None], send: Callable[[], object]
    ) -> None:
        """See `ReportLedger`."""
        self._loop.call_soon_threadsafe(self._report, cluster_id, said, send)

    def _report(
        self, cluster_id: str, said: Mapping[str, str | None], send: Callable[[], object]
    ) -> None:
        if self.judges(cluster_id):
            case = self._cases[build_token(cluster_id)]
            case.ledger.report(said, send)

    async def _run(self) -> None:
        """Keep the leases there are, and take those that nobody has."""
        await self._connection.wait()
        pause_s = self._lease_ns / NS_PER_S / 5
        while True:
            try:
                await self._renew()
                for token in await self._connection.list_clusters():
                    if token not in self._cases:
                        # A Fleet that has fewer is quicker.
                        await asyncio.sleep(0.01 * len(self._cases))
                        await self._try_take(token)
            except RetryableError as error:
                _log.warning("leases not looked at: %s", error.message)
            self._meter.gauge(CLUSTERS).set(sum(one.is_learned for one in self._cases.values()))
            await asyncio.sleep(pause_s)

    async def _renew(self) -> None:
        for case in list(self._cases.values()):
            began_ns = self._clock.mono_ns()
            try:
                await self._write_lease(case, self._name.encode())
            except OvertakenError:
                self._lose(case, "another Fleet has its lease")
            except RetryableError as error:
                if self._clock.mono_ns() - case.renewed_ns > self._lease_ns:
                    self._lose(case, error.message)
            else:
                case.renewed_ns = began_ns
                if not case.ledger.is_open:
                    self._lose(case, "another Fleet has reported")

    async def _write_lease(self, case: _Case, content: bytes) -> None:
        bucket = self._connection.leases
        case.revision = await self._connection.write(bucket, case.token, content, case.revision)

    async def _try_take(self, token: str) -> None:
        connection, began_ns = self._connection, self._clock.mono_ns()
        held = await connection.read(connection.leases, token)
        if held is not None and held.content:
            return
        free = 0 if held is None else held.revision
        try:
            revision = await connection.write(connection.leases, token, self._name.encode(), free)
        except OvertakenError:
            return
        case = _Case(token, revision, began_ns, LedgerOfCluster(connection, token))
        self._cases[token] = case
        case.tasks.append(self._loop.create_task(self._judge(case)))

    def _lose(self, case: _Case, why: str) -> None:
        _log.error("cluster %s is judged elsewhere: %s", case.cluster_id or case.token, why)
        self._meter.counter(LEASES_LOST).add(1)
        case.ledger.is_open = False
        self._end_tasks(case)
        self._cases.pop(case.token, None)
        self._forget(case)

    def _forget(self, case: _Case) -> None:
        """Report no more of a cluster."""
        if case.cluster_id is not None:
            for learner in self._learners:
                learner.begin_replay(case.cluster_id)

    @staticmethod
    def _end_tasks(case: _Case) -> None:
        for task in case.tasks:
            task.cancel()

    async def _judge(self, case: _Case) -> None:
        """Replay a cluster, and apply what comes, for as long as the lease is ours."""
        began_ns = self._clock.mono_ns()
        try:
            said = await case.ledger.open()
            last_seq = await self._connection.find_last(case.token)
            stream, subject = self._connection.pushes, self._connection.prefix + case.token
            n_replayed = 0
            async for message in self._connection.follow(stream, subject, 1):
                await self._check_lease(case)
                await self._apply(case, message)
                n_replayed += 1
                if not case.is_learned and message.seq >= last_seq:
                    await self._end_replay(case, said)
                    took_s = (self._clock.mono_ns() - began_ns) / NS_PER_S
                    self._meter.gauge(TAKEOVER_SECONDS).set(took_s)
                    self._meter.counter(TAKEOVERS).add(1)
                    _log.info(
                        "judging cluster %s, of which %d pushes were replayed in %.2f s",
                        case.cluster_id, n_replayed, took_s,
                    )  # fmt: skip
                elif not n_replayed % _PAUSE_EVERY:
                    await asyncio.sleep(0)
        except (RetryableError, BadDataError) as error:
            self._lose(case, error.message)

    async def _check_lease(self, case: _Case) -> None:
        """Wait until the lease is renewed, if it may be another's, as after a pause of the process."""
        while self._clock.mono_ns() - case.renewed_ns > self._lease_ns:  # noqa: ASYNC110 -- time passes, nobody tells
            await asyncio.sleep(_BEHIND_S)

    async def _catch_up(self, cluster_id: str) -> None:
        """Wait while too much of a cluster waits to be judged."""
        while any(learner.is_behind(cluster_id) for learner in self._learners):  # noqa: ASYNC110 -- on another thread
            await asyncio.sleep(_BEHIND_S)

    async def _end_replay(self, case: _Case, said: Mapping[str, str]) -> None:
        cluster_id = case.cluster_id
        if cluster_id is None or case.teller is None:  # nothing in the stream could be read
            return
        await self._catch_up(cluster_id)
        for learner in self._learners:
            learner.end_replay(cluster_id, said)
        case.is_learned = True
        case.tasks.append(self._loop.create_task(case.ledger.run(NEWS_INTERVAL_S)))
        case.tasks.append(self._loop.create_task(case.teller.run()))

    async def _apply(self, case: _Case, message: StoredMessage) -> None:
        try:
            logged = decode_push(message.data)
            seat = self._seats[logged.push.seat]
        except (BadDataError, IndexError) as error:
            self._count["refused"](1)
            _log.error("push %d of %s not read: %r", message.seq, case.token, error)
            return
        cluster_id = logged.cluster_id
        if case.cluster_id is None:
            case.cluster_id = cluster_id
            case.teller = NewsTeller(self._name, self._connection, self._seats, cluster_id)
            for learner in self._learners:
                learner.begin_replay(cluster_id)
        await self._catch_up(cluster_id)
        is_replay = message.seq <= case.ledger.passed_seq
        answer, node_id, cohort = await self._take(seat, logged, is_replay=is_replay)
        self._count["replayed" if is_replay else "live"](1)
        case.ledger.note_passed(message.seq)
        if case.teller is not None:
            case.teller.note(answer, node_id, cohort)

    async def _take(
        self, seat: StreamSeat, logged: LoggedPush, *, is_replay: bool
    ) -> tuple[RelayedAnswer, str, str]:
        """Apply a push, however long the pipelines want to wait: it was acknowledged."""
        while True:
            with self._clock.at(logged.received_wall_ns):
                try:
                    return seat.apply_logged(logged, is_replay=is_replay)
                except RetryableError as error:
                    _log.warning("the pipelines take nothing: %s", error.message)
                except IngeroError as error:
                    self._count["refused"](1)
                    _log.error("a push was refused permanently: %s", error.message)
                    return RelayedAnswer(0, "PERMANENT", error.message), "", ""
            await asyncio.sleep(_BEHIND_S)
