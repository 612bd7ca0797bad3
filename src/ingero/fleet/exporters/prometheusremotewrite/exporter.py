"""The exporter: names and labels are those of the ``prometheus`` exporter.

A batch is sent by one thread at a time as preset, because a receiver refuses samples that are older than those it has.

Lossy: what the protocol cannot hold (sums and histograms of differences, summaries, names without a letter, and unless
they are asked for exponential histograms) is counted in ``ingero_fleet_exporter_rejected_items_total``.

Source: Prometheus Remote-Write 1.0 (headers, which statuses are sent again).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ingero import __version__
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.exporters.prometheusremotewrite.config import RemoteWriteConfig
from ingero.fleet.exporters.prometheusremotewrite.request import RemoteWriteRequest
from ingero.fleet.factory import METRICS_ONLY, ExporterFactory
from ingero.fleet.helpers.clients import open_client_context
from ingero.fleet.helpers.otlp_exporter import MakeHeaders, QueuedOtlpExporter
from ingero.fleet.helpers.sending_report import SENDING_METRICS
from ingero.otlp.client.reply import SendReply
from ingero.otlp.codec import Export, iter_points
from ingero.otlp.names import ContentType

if TYPE_CHECKING:
    from ingero.otlp.client.http import HttpSender

_HEADERS: Final = {
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": f"ingero-fleet/{__version__}",
}


class RemoteWriteSender:
    """Posts exports as remote writes; any thread."""

    def __init__(self, http: HttpSender, request: RemoteWriteRequest) -> None:
        self._http = http
        self._request = request

    def send(self, export: Export, wall_ns: int) -> SendReply:
        """Post once. A receiver that fails is asked again; what it refuses is not sent again."""
        n_lost = sum(not self._request.find_name(point) for point in iter_points(export))
        if n_lost and n_lost == export.n_items:
            return SendReply(is_taken=True, code=204, detail="nothing to send", n_rejected=n_lost)
        reply = self._http.send(export, wall_ns)
        if reply.is_taken:
            return replace(reply, n_rejected=n_lost)
        is_failing = isinstance(reply.code, int) and reply.code >= 500
        return replace(reply, is_retryable=reply.is_retryable or is_failing)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


class RemoteWriteExporter(QueuedOtlpExporter):
    """Writes batches to a Prometheus."""

    def __init__(self, component: ComponentId, config: RemoteWriteConfig) -> None:
        def open_sender(host: Host, headers: MakeHeaders) -> RemoteWriteSender:
            return _open_sender(config, host, headers)

        waiting = (config.remote_write_queue, config.retry_on_failure)
        super().__init__(component, config, waiting, open_sender, lambda _signal: config.endpoint)


def _open_sender(config: RemoteWriteConfig, host: Host, headers: MakeHeaders) -> RemoteWriteSender:
    from ingero.otlp.client.http import (  # noqa: PLC0415 -- 16 MiB that other collectors do not need
        HttpSender,
        HttpSenderSettings,
    )

    request = RemoteWriteRequest(config)
    settings = HttpSenderSettings(
        urls=lambda _signal: config.endpoint,
        encode=lambda export: request.encode(export, host.clock.wall_ns()),
        content_type=ContentType.PROTOBUF,
        timeout_ns=config.timeout,
        headers=lambda: {**_HEADERS, **headers()},
        tls=open_client_context(config, host, (config.endpoint,)),
    )
    return RemoteWriteSender(HttpSender(settings), request)


FACTORY: Final = ExporterFactory(
    type="prometheusremotewrite",
    config=RemoteWriteConfig,
    description="Metrics into a Prometheus that takes remote writes.",
    signals=METRICS_ONLY,
    stability=Stability.BETA,
    metrics=SENDING_METRICS,
    create=RemoteWriteExporter,
    example={"endpoint": "http://localhost:9090/api/v1/write"},
)
