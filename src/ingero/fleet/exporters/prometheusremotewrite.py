"""``prometheusremotewrite``: metrics into a Prometheus, Mimir, Thanos or VictoriaMetrics that takes remote writes.

Names and labels are those of the ``prometheus`` exporter. A batch is sent by one thread at a time as preset, because a
receiver refuses samples that are older than those it has.

Lossy: what the protocol cannot hold (sums and histograms of differences, exponential histograms, summaries, names
without a letter) is counted in ``ingero_fleet_exporter_rejected_items_total``.

Sources: Prometheus Remote-Write 1.0 (messages, headers, which statuses are sent again);
opentelemetry-collector-contrib ``exporter/prometheusremotewriteexporter`` (key names).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self
from urllib.parse import urlsplit

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pydantic import Field, model_validator

from ingero import __version__
from ingero.config import StrictModel
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.factory import METRICS_ONLY, ExporterFactory
from ingero.fleet.helpers.clients import ConnectionConfig, open_client_context
from ingero.fleet.helpers.otlp_exporter import (
    OTLP_EXPORTER_METRICS,
    MakeHeaders,
    QueuedOtlpExporter,
)
from ingero.fleet.helpers.prometheus_labels import (
    ResourceConversionConfig,
    ResourceLabelsConfig,
    build_job_labels,
    label_text,
    matches,
)
from ingero.fleet.helpers.prometheus_names import build_labels, build_metric_name
from ingero.fleet.helpers.queue_config import QueueConfig, RetryConfig
from ingero.otlp.client.reply import SendReply
from ingero.otlp.codec import Export, Point, PointKind, Temporality, iter_points
from ingero.otlp.names import ContentType
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_MS

if TYPE_CHECKING:
    from ingero.otlp.client.http import HttpSender

_HEADERS: Final = {
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
    "User-Agent": f"ingero-fleet/{__version__}",
}
_STALE: Final[float] = struct.unpack("<d", struct.pack("<Q", 0x7FF0_0000_0000_0002))[0]
"""Prometheus' mark of a series that ended: model/value, StaleNaN."""
_JOB_KEYS: Final = frozenset({"service.name", "service.namespace", "service.instance.id"})

Series = tuple[str, Mapping[str, str], float]
"""A name, labels and a value."""


class TargetInfoConfig(StrictModel):
    """A series that describes each sender."""

    enabled: bool = Field(
        default=True, description="Write target_info with a sender's resource attributes."
    )


class RemoteWriteConfig(ConnectionConfig):
    """Where samples go, and under which names."""

    absent_keys: ClassVar[Mapping[str, str]] = {
        "wal": "name a file_storage in remote_write_queue.storage instead",
        "compression": "the protocol has snappy only",
        "protobuf_message": "only Remote-Write 1.0 is spoken",
    }

    endpoint: str = Field(description="Whole URL, such as http://prometheus:9090/api/v1/write.")
    namespace: str = Field("", description="Put before each metric's name.")
    external_labels: dict[str, str] = Field(
        default_factory=dict, description="Labels of every series."
    )
    add_metric_suffixes: bool = Field(
        default=True, description="Append unit and type to names, as Prometheus wants them."
    )
    resource_constant_labels: ResourceLabelsConfig = Field(
        ResourceLabelsConfig(), description="Which resource attributes become labels."
    )
    resource_to_telemetry_conversion: ResourceConversionConfig = Field(
        ResourceConversionConfig(), description="The Collector's switch for all of them."
    )
    drop_attributes: tuple[str, ...] = Field(
        ("ingero.event.id", "score", "threshold"),
        description="Point attributes that never become labels, because each push brings a new value.",
    )
    target_info: TargetInfoConfig = Field(
        TargetInfoConfig(), description="A series that describes each sender."
    )
    remote_write_queue: QueueConfig = Field(
        QueueConfig(num_consumers=1), description="Where batches wait, as elsewhere sending_queue."
    )
    retry_on_failure: RetryConfig = Field(
        RetryConfig(), description="What happens after a refusal."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if urlsplit(self.endpoint).scheme not in {"http", "https"}:
            raise ValueError(f"{self.endpoint!r} is not an http or https URL")
        return self


class RemoteWriteRequest:
    """Builds the body of one request."""

    def __init__(self, config: RemoteWriteConfig) -> None:
        self._config = config

    def encode(self, export: Export, wall_ns: int) -> bytes:
        """A WriteRequest, compressed; points without a time are of ``wall_ns``."""
        import cramjam  # noqa: PLC0415 -- not for collectors without this exporter

        return bytes(cramjam.snappy.compress_raw(self.build(export, wall_ns).SerializeToString()))

    def build(self, export: Export, wall_ns: int) -> Any:  # noqa: ANN401 - a upb message
        """A WriteRequest, series by series, the samples of each in the order of their times."""
        samples: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
        for point in iter_points(export):
            time_ms = (point.time_unix_nano or wall_ns) // NS_PER_MS
            for name, labels, value in self._iter_series(point):
                key = tuple(sorted({**labels, "__name__": name}.items()))
                samples.setdefault(key, {})[time_ms] = value
        request = _WRITE_REQUEST()
        for key, values in samples.items():
            series = request.timeseries.add()
            for name, text in key:
                if text:  # Prometheus has no empty labels
                    series.labels.add(name=name, value=_clean(text))
            for time_ms in sorted(values):
                series.samples.add(timestamp=time_ms, value=values[time_ms])
        return request

    def _iter_series(self, point: Point) -> Iterator[Series]:
        name = self.find_name(point)
        if not name:
            return
        config = self._config
        sender = self._build_sender_labels(point.resource)
        own = [
            (key, label_text(value))
            for key, value in point.attributes.items()
            if key not in config.drop_attributes
        ]
        labels = {**sender, **build_labels(own), **config.external_labels}
        if point.distribution is not None:
            yield from _iter_histogram(name, labels, point)
        else:
            is_ended = point.is_stale or point.value is None
            yield name, labels, _STALE if is_ended else float(point.value or 0)
        if config.target_info.enabled and (job := build_job_labels(point.resource)):
            rest = [(k, label_text(v)) for k, v in point.resource.items() if k not in _JOB_KEYS]
            if rest:
                yield "target_info", {**build_labels(rest), **job, **config.external_labels}, 1.0

    def find_name(self, point: Point) -> str:
        """The name of a point's series; empty for what the protocol cannot hold."""
        is_number = point.kind in {PointKind.GAUGE, PointKind.SUM}
        if not is_number and point.distribution is None:
            return ""
        if point.kind is not PointKind.GAUGE and point.temporality is Temporality.DELTA:
            return ""
        if is_number and point.value is None and not point.is_stale:
            return ""
        return build_metric_name(
            point.name,
            point.unit,
            is_gauge=point.kind is PointKind.GAUGE,
            is_counter=point.kind is PointKind.SUM and point.is_monotonic,
            namespace=self._config.namespace,
            with_suffixes=self._config.add_metric_suffixes,
        )

    def _build_sender_labels(self, resource: Mapping[str, Any]) -> dict[str, str]:
        config, chosen = self._config, self._config.resource_constant_labels
        is_all = config.resource_to_telemetry_conversion.enabled
        pairs = [
            (key, label_text(value))
            for key, value in resource.items()
            if (is_all or matches(key, chosen.included)) and not matches(key, chosen.excluded)
        ]
        return build_labels(pairs) | build_job_labels(resource)


def _iter_histogram(name: str, labels: Mapping[str, str], point: Point) -> Iterator[Series]:
    found = point.distribution
    assert found is not None
    n_below = 0
    for bound, count in zip(found.bounds, found.bucket_counts, strict=False):
        n_below += count
        value = _STALE if point.is_stale else float(n_below)
        yield f"{name}_bucket", {**labels, "le": repr(float(bound))}, value
    count_value = _STALE if point.is_stale else float(found.count)
    yield f"{name}_bucket", {**labels, "le": "+Inf"}, count_value
    yield f"{name}_count", labels, count_value
    if found.sum is not None:
        yield f"{name}_sum", labels, _STALE if point.is_stale else found.sum


def _clean(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


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
        encode=_encode_now(request, host.clock),
        content_type=ContentType.PROTOBUF,
        timeout_ns=config.timeout,
        headers=lambda: {**_HEADERS, **headers()},
        tls=open_client_context(config, host),
    )
    return RemoteWriteSender(HttpSender(settings), request)


def _encode_now(request: RemoteWriteRequest, clock: Clock) -> Callable[[Export], bytes]:
    return lambda export: request.encode(export, clock.wall_ns())


def _declare() -> type[Any]:
    """The message WriteRequest of Remote-Write 1.0, for which no package is kept."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="ingero/remote_write.proto", package="ingero.prometheus", syntax="proto3"
    )
    messages = {
        "Label": (("name", 1, kinds.TYPE_STRING, ""), ("value", 2, kinds.TYPE_STRING, "")),
        "Sample": (("value", 1, kinds.TYPE_DOUBLE, ""), ("timestamp", 2, kinds.TYPE_INT64, "")),
        "TimeSeries": (
            ("labels", 1, kinds.TYPE_MESSAGE, "Label"),
            ("samples", 2, kinds.TYPE_MESSAGE, "Sample"),
        ),
        "WriteRequest": (("timeseries", 1, kinds.TYPE_MESSAGE, "TimeSeries"),),
    }
    for message, fields in messages.items():
        declared = file.message_type.add(name=message)
        for name, number, kind, of in fields:
            one = declared.field.add(name=name, number=number, type=kind)
            one.label = kinds.LABEL_REPEATED if of else kinds.LABEL_OPTIONAL
            if of:
                one.type_name = f".ingero.prometheus.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("ingero.prometheus.WriteRequest")
    return message_factory.GetMessageClass(descriptor)


_WRITE_REQUEST: Final = _declare()

FACTORY: Final = ExporterFactory(
    type="prometheusremotewrite",
    config=RemoteWriteConfig,
    says="Metrics into a Prometheus that takes remote writes.",
    signals=METRICS_ONLY,
    stability=Stability.BETA,
    metrics=OTLP_EXPORTER_METRICS,
    create=RemoteWriteExporter,
    example={"endpoint": "http://localhost:9090/api/v1/write"},
)
