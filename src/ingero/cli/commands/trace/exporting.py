"""Where ``ingero trace`` shows its numbers besides the terminal: to Prometheus and to an OTLP collector."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import click

from ingero import __version__
from ingero.cli.metrics_page import serve_metrics
from ingero.cli.options import HEADER, option, read_headers
from ingero.units import NS_PER_S
from ingero.wire.names import Attribute

if TYPE_CHECKING:
    from ingero.agent.metrics.exporting import MetricObserver, OtlpPusher, Outlet
    from ingero.agent.metrics.series import Series
    from ingero.telemetry.clock import Clock

DEFAULT_ADDRESS: Final = "127.0.0.1:9465"
_TIMEOUT_NS: Final = 5 * NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Where metrics are served and pushed."""

    prometheus: str = option(
        f"Serve /metrics meanwhile; {DEFAULT_ADDRESS} when no address is given.",
        default="",
        is_flag=False,
        flag_value=DEFAULT_ADDRESS,
        metavar="[HOST:PORT]",
    )
    hw_metrics: bool = option(
        "With --prometheus and --otlp: give the devices' series also by OpenTelemetry's semantic conventions for"
        " hardware, hw.gpu.* and others.",
        default=False,
    )
    otlp: str = option(
        "Push metrics to this OTLP/HTTP collector every 10 s; https unless it says http://.",
        default="",
        metavar="ENDPOINT",
    )
    otlp_insecure: bool = option(
        "Speak http where --otlp does not say; e.g. host:4318.", default=False
    )
    otlp_headers: dict[str, str] = option(
        "A header of each push, such as Authorization='Bearer …'; may be repeated.",
        "--otlp-header",
        multiple=True,
        required=False,
        type=HEADER,
        metavar="NAME=VALUE",
        callback=read_headers,
    )

    def open(
        self,
        identity: tuple[str, str],
        clock: Clock,
        more: Callable[[], Iterable[Series]],
        stack: contextlib.ExitStack,
    ) -> MetricObserver | None:
        """Serve and push until the stack ends; None when neither is wanted.

        Args:
            identity: Names of the node and of the cluster; the latter may be empty.
            clock: Both clocks.
            more: Series besides those of calls.
            stack: Ends what was started.

        Raises:
            ConfigError: An address cannot be understood.
            IngeroError: It cannot be listened on.
        """
        if self.hw_metrics and not (self.prometheus or self.otlp):
            click.echo("warning: --hw-metrics: no effect without --prometheus or --otlp", err=True)
        if (self.otlp_insecure or self.otlp_headers) and not self.otlp:
            click.echo(
                "warning: --otlp-insecure, --otlp-header: no effect without --otlp ENDPOINT",
                err=True,
            )
        outlets: list[Outlet] = []
        asked = [more]
        if self.prometheus:
            outlets.append(self._serve(stack))
        if self.otlp:
            pusher = self._push(identity, clock, stack)
            outlets.append(pusher)
            asked.append(pusher.iter_series)
        if not outlets:
            return None
        from ingero.agent.metrics.exporting import MetricObserver

        return MetricObserver(outlets, lambda: (one for ask in asked for one in ask()))

    def _serve(self, stack: contextlib.ExitStack) -> Outlet:
        from ingero.agent.metrics.exporting import PrometheusPage

        page = PrometheusPage()
        stack.enter_context(serve_metrics(page, self.prometheus, "--prometheus"))
        return page

    def _push(
        self, identity: tuple[str, str], clock: Clock, stack: contextlib.ExitStack
    ) -> OtlpPusher:
        from ingero.agent.health.transport import HttpTransport, TransportSettings
        from ingero.agent.metrics.exporting import OtlpPusher
        from ingero.otlp.client.endpoint import parse_endpoint

        endpoint = parse_endpoint(self.otlp, is_insecure=self.otlp_insecure, option="--otlp")
        transport = HttpTransport(
            TransportSettings(
                endpoint=endpoint,
                timeout_ns=_TIMEOUT_NS,
                is_protobuf=True,
                is_gzip=True,
                headers=self.otlp_headers,
            )
        )
        node, cluster = identity
        resource = {
            "service.name": "ingero",
            "service.version": __version__,
            Attribute.NODE_ID.value: node,
            Attribute.CLUSTER_ID.value: cluster,
        }
        pusher = OtlpPusher(
            transport,
            {name: value for name, value in resource.items() if value},
            clock,
            lambda detail: click.echo(f"note: --otlp {self.otlp}: {detail}", err=True),
        )
        stack.callback(pusher.close)
        return pusher
