"""The connection of an exporter with a queue: a request under way is never cut."""

import asyncio
import threading

import pytest
from tests.fleet.helpers.test_sending import _batch

from ingero.config import parse_model
from ingero.errors import RetryableError
from ingero.fleet.component import ComponentId
from ingero.fleet.helpers.clients import ConnectionConfig
from ingero.fleet.helpers.otlp_exporter import OpenClient, QueuedOtlpExporter
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig
from ingero.otlp.client.reply import SendReply
from ingero.testing.host import ManualHost
from ingero.testing.waiting import wait_until


class Connection:
    """Answers once it may, unless it was closed before."""

    def __init__(self):
        self.began, self.may_answer = threading.Event(), threading.Event()
        self.n_closed = 0

    def send(self, export, wall_ns):
        self.began.set()
        assert self.may_answer.wait(30)
        return SendReply(is_taken=not self.n_closed, code=200, detail="", is_retryable=True)

    def close(self):
        self.n_closed += 1


def test_a_stop_that_times_out_closes_the_connection_after_the_answer():
    connection, host = Connection(), ManualHost()
    waiting = (parse_model(QueueConfig, {}), parse_model(RetryConfig, {}))
    exporter = QueuedOtlpExporter(
        ComponentId("otlphttp"),
        parse_model(ConnectionConfig, {}),
        waiting,
        lambda _host, _headers: connection,
        lambda _signal: "there",
    )

    async def scenario():
        await exporter.start(host)
        exporter.consume(_batch(1, 2))
        await asyncio.to_thread(connection.began.wait, 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(exporter.stop(), 0.01)
        assert not connection.n_closed
        connection.may_answer.set()
        await asyncio.to_thread(wait_until, lambda: connection.n_closed)

    asyncio.run(scenario())
    assert connection.n_closed == 1
    assert host.read("otelcol_exporter_sent_metric_points_total", exporter="otlphttp") == 2


def test_a_connection_is_closed_once_and_not_used_again():
    connection = Connection()
    client = OpenClient(connection)
    with client.use(), client.use():
        client.close()
        client.close()
        assert not connection.n_closed
    client.close()
    assert connection.n_closed == 1
    with pytest.raises(RetryableError, match="is stopped"), client.use():
        pass
