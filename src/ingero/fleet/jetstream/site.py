"""What a service starts to be one of several Fleets: the connection, the receivers' end, the judge's."""

from __future__ import annotations

import os
import secrets
import socket

from ingero.fleet.component import Host, Learner, ReportLedger, ReportSender, ThresholdSource
from ingero.fleet.jetstream.clock import StreamClock
from ingero.fleet.jetstream.config import NatsConfig
from ingero.fleet.jetstream.connection import NatsConnection
from ingero.fleet.jetstream.judging import StreamJudge
from ingero.fleet.jetstream.publishing import StreamEndpoint
from ingero.fleet.jetstream.receiving import PushLog, StreamRelay
from ingero.telemetry.clock import Clock
from ingero.telemetry.metrics import MeterRegistry


class StreamSite:
    """One Fleet's part in its site, for one configuration.

    Args:
        config: Where the Fleets meet.
        clock: Time.
        meter: Where is counted.

    Attributes:
        clock: What components read.
    """

    def __init__(self, config: NatsConfig, clock: Clock, meter: MeterRegistry) -> None:
        self.clock = StreamClock(clock)
        self._config = config
        self._connection = NatsConnection(config, clock)
        name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._judge = StreamJudge(
            name, self._connection, config.lease, self.clock, meter, is_standby=config.standby
        )
        self._relay = StreamRelay(self._connection, meter, self._judge.judges)

    def offer(self, host: Host) -> None:
        """Offer components what they meet each other by, and look for the servers."""
        host.offer(PushLog, self._relay)
        host.offer(ThresholdSource, self._relay)
        host.offer(ReportLedger, self._judge)
        self._connection.open()

    def start(self, host: Host) -> None:
        """Follow what judges write, and judge; every component has started."""
        self._relay.start()
        if self._config.judge:
            self._judge.start(
                host.find(StreamEndpoint), host.find(Learner), host.find(ReportSender)
            )

    async def stop(self) -> None:
        """Hand what is judged to another Fleet, and end the connection."""
        await self._judge.stop()
        await self._relay.stop()
        await self._connection.close()
