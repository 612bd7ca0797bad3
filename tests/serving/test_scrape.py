"""The page that Prometheus scrapes, asked over HTTP and judged by promtool."""

import asyncio
import resource
import shutil
import subprocess
import sys

import pytest
from tests.support import local_http

from ingero.config import Endpoint
from ingero.serving.asgi import AsgiServer
from ingero.serving.scrape import scrape_app
from ingero.telemetry.declare import counter, gauge, histogram
from ingero.telemetry.metrics import MeterRegistry


def _registry():
    meter = MeterRegistry()
    meter.counter(counter("test_pushes_total", "Pushes.", "kind")).add(2, kind='a"b\\c\nd')
    meter.gauge(gauge("test_nodes", "Nodes.")).set(3)
    meter.histogram(histogram("test_seconds", "Seconds.", (0.1, 1.0))).record(0.5)
    return meter


def _get(*requests):
    async def scenario():
        server = AsgiServer(scrape_app(_registry()), Endpoint("127.0.0.1", 0))
        await server.start()
        async with local_http.open_async_client(base_url=f"http://{server.bound}") as client:
            answers = [
                await client.request(method, path, headers=headers)
                for method, path, headers in requests
            ]
        await server.stop()
        return answers

    return asyncio.run(scenario())


def test_metrics_are_text_or_openmetrics_as_the_scraper_asks():
    plain, open_metrics = _get(
        ("GET", "/metrics", {}),
        ("GET", "/metrics", {"accept": "application/openmetrics-text;version=1.0.0"}),
    )
    assert plain.headers["content-type"].startswith("text/plain")
    assert "test_nodes 3\n" in plain.text
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert open_metrics.text.endswith("# EOF\n")


def test_other_paths_and_methods_are_refused_with_the_right_one():
    missing, wrong = _get(("GET", "/", {}), ("POST", "/metrics", {}))
    assert (missing.status_code, missing.text) == (404, "the metrics are at /metrics\n")
    assert wrong.status_code == 405


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is missing"
)
def test_promtool_finds_nothing_wrong():
    (answer,) = _get(("GET", "/metrics", {}))
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=answer.content, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, b"")


def test_scrape_without_a_free_descriptor_is_a_503_without_a_traceback(caplog):
    async def scenario():
        server = AsgiServer(scrape_app(_registry()), Endpoint("127.0.0.1", 0))
        await server.start()
        async with local_http.open_async_client(base_url=f"http://{server.bound}") as client:
            await client.get("/")  # the connection is there
            forgotten = {
                name: sys.modules.pop(name)
                for name in [*sys.modules]
                if name.startswith(("ingero.telemetry.exposition", "prometheus_client"))
            }
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                busy = await client.get("/metrics")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            later = await client.get("/metrics")
            sys.modules.update(forgotten)
        await server.stop()
        return busy, later

    busy, later = asyncio.run(scenario())
    assert (busy.status_code, later.status_code) == (503, 200)
    assert "Too many open files" in busy.text
    assert not caplog.records
