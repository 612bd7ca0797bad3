"""The ``ingero-alerter`` program: local straggler episodes to Slack, PagerDuty or any webhook."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ingero import __version__
from ingero.cli.main import run_program
from ingero.cli.metrics_page import serve_metrics
from ingero.cli.signals import catch_stop
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    import httpx

    from ingero.agent.events.alert.backends import Backend
    from ingero.agent.events.alert.delivery import Delivery
    from ingero.agent.events.alert.episodes import Episodes
    from ingero.config import Endpoint

LINE_MAX_BYTES = 1024 * 1024
"""Source: the existing alerter's limit."""
RECONNECT_NS = NS_PER_S
SETTLE_S = 1.0
JOIN_S = 2.0


@click.command(
    "ingero-alerter",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ingero-alerter", message="%(prog)s %(version)s")
@click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path),
    default="/etc/ingero-alerter/config.json",
    show_default=True,
    help="Its configuration.",
)
@click.option("--verbose", is_flag=True, help="Log every alert that was delivered.")
@click.option(
    "--listen",
    default="",
    metavar="HOST:PORT",
    help="Serve /metrics, /healthz and /readyz there; port 0 chooses one.  [default: off]",
)
def cli(path: Path, listen: str, *, verbose: bool) -> int:
    r"""Tell people about the stragglers of this node: one incident per episode, resolved when it ends.

    Runs beside an agent that was started with --remediate, and waits for one that is not there yet. What a receiver
    does not take is tried again. Secrets come from files (webhook_url_file, routing_key_file) or from ${env:NAME}.

    Exit status: 0 after SIGTERM, 130 after Ctrl-C, 2 when the configuration is wrong.

    \b
    Examples:
      ingero-alerter --config /etc/ingero-alerter/config.json
      ingero-alerter --config alerter.json --listen 127.0.0.1:9466
      SLACK=https://hooks.slack.com/… ingero-alerter --config alerter.json --verbose
    """
    from ingero.agent.events.alert.backends import build_backends
    from ingero.agent.events.alert.config import load_config
    from ingero.agent.events.alert.delivery import build_client
    from ingero.telemetry.log import set_up_logging

    config = load_config(path)
    backends = build_backends(config)
    set_up_logging("info" if verbose else "warn", "console")
    names = ", ".join(backend.name for backend in backends)
    click.echo(f"reading {config.uds_path}, telling {names}", err=True)
    timeout_s = config.http_client.request_timeout_seconds
    with catch_stop() as stop, build_client(timeout_s) as client:
        deliveries = _build_deliveries(backends, client, stop.event)
        _run(Path(config.uds_path), deliveries, stop.event, listen)
    return stop.exit_status


def _build_deliveries(
    backends: list[Backend], client: httpx.Client, stop: threading.Event
) -> list[Delivery]:
    from ingero.agent.events.alert.delivery import Delivery

    return [
        Delivery(backend, client, lambda duration_ns: stop.wait(duration_ns / NS_PER_S))
        for backend in backends
    ]


def _run(path: Path, deliveries: list[Delivery], stop: threading.Event, listen: str) -> None:
    """Read events and send alerts until stopped."""
    from ingero.agent.events.alert.episodes import Alert, Episodes
    from ingero.agent.events.reader import EventReader
    from ingero.serving.ready import report_ready
    from ingero.telemetry.clock import SystemClock

    def send(alert: Alert) -> None:
        for delivery in deliveries:
            delivery.offer(alert)

    episodes = Episodes(SystemClock(), send)

    def settle() -> None:
        while not stop.wait(SETTLE_S):
            episodes.settle()

    threads = [threading.Thread(target=one.run, daemon=True) for one in deliveries]
    threads.append(threading.Thread(target=settle, daemon=True))
    with _pages(listen, episodes, deliveries) as addresses:
        for thread in threads:
            thread.start()
        report_ready("ingero-alerter", addresses)
        reader = EventReader(
            path,
            episodes,
            LINE_MAX_BYTES,
            RECONNECT_NS,
            lambda duration_ns: stop.wait(duration_ns / NS_PER_S),
        )
        reader.run()
        for delivery in deliveries:
            delivery.close()
        for thread in threads:
            thread.join(JOIN_S)


@contextmanager
def _pages(
    listen: str, episodes: Episodes, deliveries: list[Delivery]
) -> Iterator[dict[str, Endpoint]]:
    """Serve the alerter's own numbers, where that is wanted; what listens where."""
    if not listen:
        yield {}
        return
    from ingero.agent.events.alert.page import AlerterPage

    page = AlerterPage(episodes, {delivery.name: delivery.counts for delivery in deliveries})
    with serve_metrics(page, listen, "--listen") as bound:
        yield {"metrics": bound}


def main() -> None:
    """Entry point of the ``ingero-alerter`` console script."""
    sys.exit(run_program(cli))
