"""The Prometheus exporter, and its page as a scraper reads it."""

import asyncio
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from tests.support import local_http

from ingero.config import parse_model
from ingero.fleet.component import ComponentId, PushContext
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.prometheus.config import PrometheusConfig
from ingero.fleet.exporters.prometheus.exporter import FACTORY
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_export,
)
from ingero.otlp.names import Signal
from ingero.testing.host import ManualHost

SAMPLES = Path(__file__).parents[2] / "data" / "wire_samples"
WALL = 1_767_225_600_000_000_000
NODE = {"ingero.node.id": "n1", "ingero.cluster.id": "c1"}


class Scraped:
    """An exporter that listens, and what was fetched from it."""

    def __init__(self, **config):
        self.host = ManualHost()
        settings = parse_model(PrometheusConfig, {"endpoint": "127.0.0.1:0", **config})
        self.exporter = FACTORY.create(ComponentId("prometheus"), settings)

    def push(self, export, node_id=None, cluster_id=None):
        push = PushContext(cluster_id=cluster_id, node_id=node_id)
        self.exporter.consume(Batch(Signal.METRICS, export, self.host.clock.wall_ns(), push))

    def scrape(self, *steps, headers=None, is_bytes=False):
        """Start, run the steps, fetch, stop; the text, or its bytes."""

        async def run():
            await self.exporter.start(self.host)
            try:
                for step in steps:
                    step()
                url = f"http://{self.host.announced['']}/metrics"
                async with local_http.open_async_client() as client:
                    return await client.get(url, headers=headers or {})
            finally:
                await self.exporter.stop()

        answer = asyncio.run(run())
        assert answer.status_code == 200
        self.content_type = answer.headers["content-type"]
        return answer.content if is_bytes else answer.text


def series(text):
    """``{(name, labels): value}`` of an exposition."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labelled(name, **labels):
    return (name, tuple(sorted(labels.items())))


def sample(name):
    return decode_export((SAMPLES / name).read_bytes(), Signal.METRICS, "application/json")


def gauge_export(name="a.b", value=1.0, unit="", resource=NODE, **attributes):
    point = build_number(value, WALL, attributes)
    return build_metrics(resource, [build_gauge(name, [point], unit)], "s")
