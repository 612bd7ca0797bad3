"""The judge's end: leases on clusters, their pushes from the stream, and answers for those who receive.

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
from ingero.fleet.jetstream.publishing import PUBLISH_INTERVAL_S, AnswerPublisher, StreamEndpoint
from ingero.fleet.jetstream.telemetry import (
    CLUSTERS,
    JUDGED,
    LEASES_LOST,
    TAKEOVER_SECONDS,
    TAKEOVERS,
)
from ingero.fleet.workers.messages import RelayedAnswer
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_BEHIND_S: Final = 0.02
_PAUSE_EVERY: Final = 64
"""Pushes of a replay after which other tasks of the loop have their turn."""
_log = logging.getLogger("ingero.fleet.nats")


@dataclass(slots=True)
class _JudgedCluster:
    """A cluster that this Fleet judges.

    Attributes:
        token: The cluster's.
        revision: Of the lease.
        renewed_ns: Monotonic time before which the lease surely was renewed.
        ledger: What was reported.
        cluster_id: Known with the first push.
        is_learned: Whether what came before the take-over was replayed.
        publisher: Tells receivers of it; None before the first push.
        tasks: Those that work for it.
    """

    token: str
    revision: int
    renewed_ns: int
    ledger: LedgerOfCluster
    cluster_id: str | None = None
    is_learned: bool = False
    publisher: AnswerPublisher | None = None
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
        self._endpoints: Sequence[StreamEndpoint] = ()
        self._learners: Sequence[Learner] = ()
        self._clusters: dict[str, _JudgedCluster] = {}
        self._running: asyncio.Task[None] | None = None
        judged = meter.counter(JUDGED)
        self._count = {one: judged.bound(outcome=one) for one in ("replayed", "live", "refused")}

    def start(self, endpoints: Sequence[StreamEndpoint], learners: Sequence[Learner]) -> None:
        """Begin to look for clusters.

        Args:
            endpoints: Receivers' protocols, in the order in which every Fleet of the site has them.
            learners: Components that judge.
        """
        self._endpoints, self._learners = endpoints, learners
        self._meter.counter(TAKEOVERS).bound()
        self._meter.counter(LEASES_LOST).bound()
        self._running = self._loop.create_task(self._run())

    def judges(self, cluster_id: str) -> bool:
        """Whether this Fleet judges a cluster now."""
        cluster = self._clusters.get(build_token(cluster_id))
        return cluster is not None and cluster.is_learned

    async def stop(self) -> None:
        """Write down what was reported, and hand every cluster to another Fleet."""
        if self._running is not None:
            self._running.cancel()
        for cluster in list(self._clusters.values()):
            self._end_tasks(cluster)
            self._forget(cluster)
            if cluster.is_learned:
                await cluster.ledger.settle()
            try:
                await self._write_lease(cluster, b"")
            except RetryableError as error:
                _log.warning("the lease of %s runs out by itself: %s", cluster.token, error.message)
        self._clusters.clear()

    def report(
        self, cluster_id: str, said: Mapping[str, str | None], send: Callable[[], object]
    ) -> None:
        """See `ReportLedger`."""
        self._loop.call_soon_threadsafe(self._report, cluster_id, said, send)

    def _report(
        self, cluster_id: str, said: Mapping[str, str | None], send: Callable[[], object]
    ) -> None:
        if self.judges(cluster_id):
            cluster = self._clusters[build_token(cluster_id)]
            cluster.ledger.report(said, send)

    async def _run(self) -> None:
        """Keep the leases there are, and take those that nobody has."""
        await self._connection.wait()
        pause_s = self._lease_ns / NS_PER_S / 5
        while True:
            try:
                await self._renew()
                for token in await self._connection.list_clusters():
                    if token not in self._clusters:
                        # A Fleet that has fewer is quicker.
                        await asyncio.sleep(0.01 * len(self._clusters))
                        await self._try_take(token)
            except RetryableError as error:
                self._connection.log.write(
                    "leases", logging.WARNING, "leases not looked at", error=error.message
                )
            self._connection.log.flush()
            self._meter.gauge(CLUSTERS).set(sum(one.is_learned for one in self._clusters.values()))
            await asyncio.sleep(pause_s)

    async def _renew(self) -> None:
        for cluster in list(self._clusters.values()):
            began_ns = self._clock.mono_ns()
            try:
                await self._write_lease(cluster, self._name.encode())
            except OvertakenError:
                self._lose(cluster, "another Fleet has its lease")
            except RetryableError as error:
                if self._clock.mono_ns() - cluster.renewed_ns > self._lease_ns:
                    self._lose(cluster, error.message)
            else:
                cluster.renewed_ns = began_ns
                if not cluster.ledger.is_open:
                    self._lose(cluster, "another Fleet has reported")

    async def _write_lease(self, cluster: _JudgedCluster, content: bytes) -> None:
        bucket = self._connection.leases
        cluster.revision = await self._connection.write(
            bucket, cluster.token, content, cluster.revision
        )

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
        cluster = _JudgedCluster(token, revision, began_ns, LedgerOfCluster(connection, token))
        self._clusters[token] = cluster
        cluster.tasks.append(self._loop.create_task(self._judge(cluster)))

    def _lose(self, cluster: _JudgedCluster, why: str) -> None:
        _log.error("cluster %s is judged elsewhere: %s", cluster.cluster_id or cluster.token, why)
        self._meter.counter(LEASES_LOST).add(1)
        cluster.ledger.is_open = False
        self._end_tasks(cluster)
        self._clusters.pop(cluster.token, None)
        self._forget(cluster)

    def _forget(self, cluster: _JudgedCluster) -> None:
        """Report no more of a cluster."""
        if cluster.cluster_id is not None:
            for learner in self._learners:
                learner.begin_replay(cluster.cluster_id)

    @staticmethod
    def _end_tasks(cluster: _JudgedCluster) -> None:
        for task in cluster.tasks:
            task.cancel()

    async def _judge(self, cluster: _JudgedCluster) -> None:
        """Replay a cluster, and apply what comes, for as long as the lease is ours."""
        began_ns = self._clock.mono_ns()
        try:
            said = await cluster.ledger.open()
            last_seq = await self._connection.find_last(cluster.token)
            stream, subject = self._connection.pushes, self._connection.prefix + cluster.token
            n_replayed = 0
            async for message in self._connection.follow(stream, subject, 1):
                await self._check_lease(cluster)
                await self._apply(cluster, message)
                n_replayed += 1
                if not cluster.is_learned and message.seq >= last_seq:
                    await self._end_replay(cluster, said)
                    took_s = (self._clock.mono_ns() - began_ns) / NS_PER_S
                    self._meter.gauge(TAKEOVER_SECONDS).set(took_s)
                    self._meter.counter(TAKEOVERS).add(1)
                    _log.info(
                        "judging cluster %s, of which %d pushes were replayed in %.2f s",
                        cluster.cluster_id, n_replayed, took_s,
                    )  # fmt: skip
                elif not n_replayed % _PAUSE_EVERY:
                    await asyncio.sleep(0)
        except (RetryableError, BadDataError) as error:
            self._lose(cluster, error.message)

    async def _check_lease(self, cluster: _JudgedCluster) -> None:
        """Wait until the lease is renewed, if it may be another's, as after a pause of the process."""
        while self._clock.mono_ns() - cluster.renewed_ns > self._lease_ns:  # noqa: ASYNC110 -- time passes, nobody tells
            await asyncio.sleep(_BEHIND_S)

    async def _catch_up(self, cluster_id: str) -> None:
        """Wait while too much of a cluster waits to be judged."""
        while any(learner.is_behind(cluster_id) for learner in self._learners):  # noqa: ASYNC110 -- on another thread
            await asyncio.sleep(_BEHIND_S)

    async def _end_replay(self, cluster: _JudgedCluster, said: Mapping[str, str]) -> None:
        cluster_id = cluster.cluster_id
        if cluster_id is None or cluster.publisher is None:  # nothing in the stream could be read
            return
        await self._catch_up(cluster_id)
        for learner in self._learners:
            learner.end_replay(cluster_id, said)
        cluster.is_learned = True
        cluster.tasks.append(self._loop.create_task(cluster.ledger.run(PUBLISH_INTERVAL_S)))
        cluster.tasks.append(self._loop.create_task(cluster.publisher.run()))

    async def _apply(self, cluster: _JudgedCluster, message: StoredMessage) -> None:
        try:
            logged = decode_push(message.data)
            endpoint = self._endpoints[logged.push.endpoint_idx]
        except (BadDataError, IndexError) as error:
            self._count["refused"](1)
            _log.error("push %d of %s not read: %r", message.seq, cluster.token, error)
            return
        cluster_id = logged.cluster_id
        if cluster.cluster_id is None:
            cluster.cluster_id = cluster_id
            cluster.publisher = AnswerPublisher(
                self._name, self._connection, self._endpoints, cluster_id
            )
            for learner in self._learners:
                learner.begin_replay(cluster_id)
        await self._catch_up(cluster_id)
        is_replay = message.seq <= cluster.ledger.passed_seq
        answer, node_id, cohort = await self._take(endpoint, logged, is_replay=is_replay)
        self._count["replayed" if is_replay else "live"](1)
        cluster.ledger.note_passed(message.seq)
        if cluster.publisher is not None:
            cluster.publisher.note(answer, node_id, cohort)

    async def _take(
        self, endpoint: StreamEndpoint, logged: LoggedPush, *, is_replay: bool
    ) -> tuple[RelayedAnswer, str, str]:
        """Apply a push, however long the pipelines want to wait: it was acknowledged."""
        while True:
            with self._clock.at(logged.received_wall_ns):
                try:
                    return endpoint.apply_logged(logged, is_replay=is_replay)
                except RetryableError as error:
                    self._connection.log.write(
                        "pipelines", logging.WARNING, "the pipelines take nothing",
                        error=error.message,
                    )  # fmt: skip
                except IngeroError as error:
                    self._count["refused"](1)
                    _log.error("a push was refused permanently: %s", error.message)
                    return RelayedAnswer(0, "PERMANENT", error.message), "", ""
            await asyncio.sleep(_BEHIND_S)
