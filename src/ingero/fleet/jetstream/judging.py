"""The judge's end: leases on clusters, and which of them this Fleet judges or follows.

A lease is a key that the bucket forgets unless it is renewed. The Fleet that holds a cluster's lease judges it; one
other may hold the standby's key, and is the one to take the lease when its holder is silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from ingero.errors import BadDataError, RetryableError
from ingero.fleet.component import Learner, ReportSender
from ingero.fleet.jetstream.clock import StreamClock
from ingero.fleet.jetstream.cluster import JudgingContext, Lease, StreamCluster
from ingero.fleet.jetstream.connection import NatsConnection, OvertakenError
from ingero.fleet.jetstream.ledger import LEDGER_KEY
from ingero.fleet.jetstream.messages import (
    WrittenReport,
    build_token,
    decode_ledger,
    write_report,
)
from ingero.fleet.jetstream.publishing import StreamEndpoint
from ingero.fleet.jetstream.telemetry import CLUSTERS, FOLLOWED, LEASES_LOST, TAKEOVERS
from ingero.otlp.codec import Export
from ingero.telemetry.metrics import MeterRegistry
from ingero.units import NS_PER_S

_STANDBY_KEY: Final = "standby."
_log = logging.getLogger("ingero.fleet.nats")


class StreamJudge:
    """Judges clusters by turns with other Fleets; a `ReportLedger`. Everything but `report` runs on the loop.

    Args:
        name: Of this Fleet, for people.
        connection: The way to the servers.
        lease_ns: After which a silent judge is replaced.
        clock: Set to a push's time while it is applied.
        meter: Where is counted.
        is_standby: Whether it follows clusters that others judge.
    """

    def __init__(
        self,
        name: str,
        connection: NatsConnection,
        lease_ns: int,
        clock: StreamClock,
        meter: MeterRegistry,
        *,
        is_standby: bool,
    ) -> None:
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._is_standby = is_standby
        self._context = JudgingContext(name, connection, lease_ns, clock, meter, (), (), {})
        self._clusters: dict[str, StreamCluster] = {}
        self._running: asyncio.Task[None] | None = None

    def start(
        self,
        endpoints: Sequence[StreamEndpoint],
        learners: Sequence[Learner],
        senders: Sequence[ReportSender],
    ) -> None:
        """Begin to look for clusters.

        Args:
            endpoints: Receivers' protocols, in the order in which every Fleet of the site has them.
            learners: Components that judge.
            senders: Components that report.
        """
        self._context = replace(
            self._context,
            endpoints=endpoints,
            learners=learners,
            senders={sender.name: sender for sender in senders},
        )
        self._context.meter.counter(TAKEOVERS).bound()
        self._context.meter.counter(LEASES_LOST).bound()
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
            cluster.end()
            if cluster.is_learned:
                await self._renew(cluster)  # nothing leaves without a lease
                await cluster.ledger.settle(is_last=True)
            await self._free(cluster.lease)
        self._clusters.clear()

    def report(
        self, cluster_id: str, reported: Mapping[str, str | None], sender: ReportSender, export: Export | None
    ) -> None:  # fmt: skip
        """See `ReportLedger`."""
        written = None if export is None else write_report(sender.name, reported, export)
        send = partial(sender.try_send, export)
        self._loop.call_soon_threadsafe(self._report, cluster_id, reported, send, written)

    def _report(
        self,
        cluster_id: str,
        reported: Mapping[str, str | None],
        send: Callable[[], bool],
        written: WrittenReport | None,
    ) -> None:
        if self.judges(cluster_id):
            self._clusters[build_token(cluster_id)].ledger.report(reported, send, written)

    async def _run(self) -> None:
        """Keep the leases there are, and take those that nobody has."""
        await self._connection.wait()
        meter, pause_s = self._context.meter, self._context.lease_ns / NS_PER_S / 5
        while True:
            try:
                for cluster in list(self._clusters.values()):
                    await self._renew(cluster)
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
            meter.gauge(CLUSTERS).set(sum(one.is_learned for one in self._clusters.values()))
            meter.gauge(FOLLOWED).set(sum(not one.is_judge for one in self._clusters.values()))
            await asyncio.sleep(pause_s)

    async def _renew(self, cluster: StreamCluster) -> None:
        """Renew the lease on a cluster; a standby's also becomes the judge's when nobody has that."""
        lease, context = cluster.lease, self._context
        began_ns = context.clock.mono_ns()
        try:
            lease.revision = await self._connection.write(
                self._connection.leases, lease.key, context.name.encode(), lease.revision
            )
        except OvertakenError:
            # A standby may be late, as after a pause: nothing that it learned is wrong for that.
            again = None if cluster.is_judge else await self._try_lease(lease.key)
            if again is None:
                self._lose(cluster, "another Fleet has its lease")
                return
            lease.revision = again.revision
        except RetryableError as error:
            if cluster.is_judge and context.clock.mono_ns() - lease.renewed_ns > context.lease_ns:
                self._lose(cluster, error.message)
            return
        lease.renewed_ns = began_ns
        if not cluster.ledger.is_open:
            self._lose(cluster, "another Fleet has reported")
        elif not cluster.is_judge:
            taken = await self._try_lease(cluster.token)
            if taken is not None:
                cluster.judge(taken)
                await self._free(lease)

    async def _try_take(self, token: str) -> None:
        """Judge a cluster that nobody judges, or follow one that nobody follows."""
        connection = self._connection
        stored = await connection.read(connection.documents, LEDGER_KEY + token)
        try:
            if stored is not None:
                decode_ledger(stored.content)
        except BadDataError as error:
            connection.log.write(
                ("ledger", token), logging.WARNING, "a cluster is left to other Fleets",
                cluster=token, error=error.message,
            )  # fmt: skip
            return
        if await self._is_held(_STANDBY_KEY + token):
            return  # by a Fleet that takes the judge's lease itself when that is free
        lease = await self._try_lease(token)
        if lease is not None:
            self._add(token, lease).judge(lease)
        elif self._is_standby:
            lease = await self._try_lease(_STANDBY_KEY + token)
            if lease is not None:
                self._add(token, lease).follow()

    def _add(self, token: str, lease: Lease) -> StreamCluster:
        cluster = StreamCluster(token, lease, self._context, self._lose)
        self._clusters[token] = cluster
        return cluster

    async def _is_held(self, key: str) -> bool:
        held = await self._connection.read(self._connection.leases, key)
        return held is not None and bool(held.content)

    async def _try_lease(self, key: str) -> Lease | None:
        """A lease that nobody had; None where somebody has it. Raises RetryableError."""
        connection, began_ns = self._connection, self._context.clock.mono_ns()
        held = await connection.read(connection.leases, key)
        if held is not None and held.content:
            return None
        free = 0 if held is None else held.revision
        try:
            revision = await connection.write(
                connection.leases, key, self._context.name.encode(), free
            )
        except OvertakenError:
            return None
        return Lease(key, revision, began_ns)

    async def _free(self, lease: Lease) -> None:
        try:
            await self._connection.write(self._connection.leases, lease.key, b"", lease.revision)
        except RetryableError as error:
            _log.warning("the lease %s runs out by itself: %s", lease.key, error.message)

    def _lose(self, cluster: StreamCluster, why: str) -> None:
        if self._clusters.get(cluster.token) is not cluster:
            return
        name = cluster.cluster_id or cluster.token
        if cluster.is_judge:
            _log.error("cluster %s is judged elsewhere: %s", name, why)
            self._context.meter.counter(LEASES_LOST).add(1)
        else:
            _log.warning("cluster %s is not followed any more: %s", name, why)
        cluster.ledger.is_open = False
        del self._clusters[cluster.token]
        cluster.end()
