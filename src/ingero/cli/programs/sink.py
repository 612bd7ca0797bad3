"""The ``ingero-sink`` program, also installed as ``straggler-sink``: local events to Prometheus."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ingero import __version__
from ingero.cli.main import run_program
from ingero.cli.options import read_duration
from ingero.cli.signals import catch_stop
from ingero.units import NS_PER_S
from ingero.wire.names import DEFAULT_REMEDIATE_SOCKET

if TYPE_CHECKING:
    from ingero.config import Endpoint


def _read_positive(context: click.Context, parameter: click.Parameter, value: str) -> int:
    duration_ns = read_duration(context, parameter, value)
    if duration_ns <= 0:
        raise click.BadParameter("must be above 0", param=parameter)
    return duration_ns


def _read_endpoint(_context: click.Context, parameter: click.Parameter, value: str) -> Endpoint:
    from ingero.config import Endpoint

    try:
        return Endpoint.parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error), param=parameter) from error


@click.command(
    "ingero-sink",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="ingero-sink", message="%(prog)s %(version)s")
@click.option(
    "--socket-path",
    "socket_paths",
    type=click.Path(
        path_type=Path, readable=False
    ),  # a reader connects, which no read permission decides
    multiple=True,
    default=(DEFAULT_REMEDIATE_SOCKET,),
    show_default=True,
    help="An agent's event socket; may be repeated for several agents on one machine.",
)
@click.option(
    "--listen",
    callback=_read_endpoint,
    default=":9464",
    show_default=True,
    metavar="HOST:PORT",
    help="Where to serve /metrics, /healthz and /readyz; port 0 chooses one.",
)
@click.option(
    "--reconnect-delay",
    callback=_read_positive,
    default="2s",
    show_default=True,
    help="Before connecting again; doubles up to 30s and starts over after a success.",
)
@click.option(
    "--max-tracked-nodes",
    type=click.IntRange(min=1),
    default=10_000,
    show_default=True,
    help="Stragglers tracked at once.",
)
@click.option(
    "--readiness-window",
    callback=_read_positive,
    default="60s",
    show_default=True,
    help="How long an event keeps a disconnected sink ready.",
)
def cli(
    socket_paths: tuple[Path, ...],
    listen: Endpoint,
    reconnect_delay: int,
    max_tracked_nodes: int,
    readiness_window: int,
) -> int:
    r"""Show an agent's straggler episodes to Prometheus.

    Runs beside an agent that was started with --remediate, and waits for one that is not there yet. SIGTERM and Ctrl-C
    end it.

    \b
    Examples:
      ingero-sink
      ingero-sink --socket-path /run/ingero/remediate.sock --listen 127.0.0.1:9464
    """
    from ingero.agent.events.reader import POLL_S, EventReader
    from ingero.agent.events.sink import SinkState
    from ingero.agent.events.sink_server import serve_sink
    from ingero.serving.ready import report_ready
    from ingero.telemetry.clock import SystemClock
    from ingero.wire.uds import LINE_MAX_BYTES

    state = SinkState(SystemClock(), max_tracked_nodes)
    with catch_stop() as stop, serve_sink(listen, state, readiness_window) as bound:
        read = " and ".join(map(str, socket_paths))
        click.echo(f"serving http://{bound}/metrics, reading {read}", err=True)
        report_ready("ingero-sink", {"metrics": bound})
        for path in socket_paths:
            reader = EventReader(
                path,
                state.open_stream(),
                LINE_MAX_BYTES,
                reconnect_delay,
                lambda duration_ns: stop.event.wait(duration_ns / NS_PER_S),
            )
            threading.Thread(target=reader.run, daemon=True).start()
        while not stop.event.wait(
            POLL_S
        ):  # a signal that another thread took interrupts no endless wait
            pass
    return stop.exit_status


def main() -> None:
    """Entry point of the ``ingero-sink`` and ``straggler-sink`` console scripts."""
    sys.exit(run_program(cli))
