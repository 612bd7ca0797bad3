"""``otlp`` against a real gRPC server, and against our own receiver."""

import asyncio
import threading
from concurrent import futures

import grpc
import pytest
import trustme
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc

from ingero.config import parse_model
from ingero.errors import ConfigError, PermanentError, RetryableError
from ingero.fleet.component import Authenticator, ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.otlp import OtlpConfig, OtlpExporter
from ingero.fleet.receivers import otlp as receiver
from ingero.otlp.codec import build_gauge, build_metrics, build_number, iter_points
from ingero.otlp.names import Signal
from ingero.testing.host import KeptBatches, ManualHost
from ingero.units import NS_PER_S


class Service(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, code=None, details=(), n_rejected=0):
        self.code, self.details, self.n_rejected = code, details, n_rejected
        self.requests, self.metadata = [], []

    def Export(self, request, context):  # noqa: N802 -- gRPC's name
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.code is not None:
            context.set_trailing_metadata(self.details)
            context.abort(self.code, "as told")
        answer = metrics_service_pb2.ExportMetricsServiceResponse()
        answer.partial_success.rejected_data_points = self.n_rejected
        return answer


def _batch():
    gauge = build_gauge("m", [build_number(2.5, 1)])
    return Batch(Signal.METRICS, build_metrics({"a": "b"}, [gauge], "t"), 1)


def _export(service, settings=None, *, credentials=None, host=None):
    """Send one batch; what ``consume`` raised, and the host."""
    host = host or ManualHost()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(service, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()

    async def scenario():
        config = {
            "endpoint": f"127.0.0.1:{port}",
            "tls": {"insecure": True},
            "sending_queue": {"enabled": False},
            **(settings or {}),
        }
        exporter = OtlpExporter(ComponentId("otlp"), parse_model(OtlpConfig, config))
        await exporter.start(host)
        try:
            await asyncio.to_thread(exporter.consume, _batch())
        except (RetryableError, PermanentError) as error:
            return error
        finally:
            await exporter.stop()
        return None

    try:
        return asyncio.run(scenario()), host
    finally:
        server.stop(None).wait()


def test_batch_and_headers_arrive():
    service = Service()
    raised, host = _export(service, {"headers": {"X-Scope-OrgID": "team"}})
    assert raised is None
    metric = service.requests[0].resource_metrics[0].scope_metrics[0].metrics[0]
    assert (metric.name, metric.gauge.data_points[0].as_double) == ("m", 2.5)
    assert service.metadata[0]["x-scope-orgid"] == "team"
    assert host.read("otelcol_exporter_sent_metric_points_total", exporter="otlp") == 1


def test_a_timeout_of_zero_is_none():
    service = Service()
    raised, _ = _export(service, {"timeout": "0s"})
    assert raised is None
    assert len(service.requests) == 1


RETRY_INFO = (("grpc-status-details-bin", b"\n(type.googleapis.com/google.rpc.RetryInfo"),)


@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, (), RetryableError),
        (grpc.StatusCode.DATA_LOSS, (), RetryableError),
        (grpc.StatusCode.ABORTED, (), RetryableError),
        (grpc.StatusCode.INVALID_ARGUMENT, (), PermanentError),
        (grpc.StatusCode.UNAUTHENTICATED, (), PermanentError),
        (grpc.StatusCode.INTERNAL, (), PermanentError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), PermanentError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, RETRY_INFO, RetryableError),
    ],
)
def test_codes_are_judged_as_the_specification_says(code, details, expected):
    raised, _ = _export(Service(code, details))
    assert type(raised) is expected
    assert code.name in raised.message


def test_header_that_cannot_be_sent_is_refused_for_good_without_its_value():
    class Vouching:
        def client_headers(self):
            return {"Authorization": "Bearer SECRET\nX: y"}

    host, service = ManualHost(), Service()
    host.offer_as(ComponentId("any"), Authenticator, Vouching())
    raised, _ = _export(service, {"auth": {"authenticator": "any"}}, host=host)
    assert service.requests == []
    assert isinstance(raised, PermanentError)
    assert "header Authorization" in raised.message
    assert "SECRET" not in raised.message


def test_partial_success_is_counted():
    raised, host = _export(Service(n_rejected=5))
    assert raised is None
    assert host.read("ingero_fleet_exporter_rejected_items_total", exporter="otlp") == 5


def test_tls_is_the_default_and_checks_the_server(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1", "fleet.example")
    ca = str(tmp_path / "ca.pem")
    authority.cert_pem.write_to_path(ca)
    credentials = grpc.ssl_server_credentials([
        (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    ])
    good = {"tls": {"ca_file": ca, "server_name_override": "fleet.example"}}
    assert _export(Service(), good, credentials=credentials)[0] is None
    raised, _ = _export(Service(), {"tls": {}, "timeout": "2s"}, credentials=credentials)
    assert isinstance(raised, RetryableError)


class AskingService(Service):
    """Keeps the name in each client's certificate; waits in `Export` while ``is_open`` is not set."""

    def __init__(self):
        super().__init__()
        self.names, self.is_open, self.has_call = [], threading.Event(), threading.Event()
        self.is_open.set()

    def Export(self, request, context):  # noqa: N802 -- gRPC's name
        self.names.append(context.auth_context()["x509_common_name"][0].decode())
        self.has_call.set()
        self.is_open.wait()
        return super().Export(request, context)


class Certificates:
    """Files of a client, and a server that asks for them."""

    def __init__(self, folder):
        self.authority = trustme.CA()
        self.ca, self.cert, self.key = (
            str(folder / name) for name in ("ca.pem", "tls.crt", "tls.key")
        )
        self.authority.cert_pem.write_to_path(self.ca)
        self.write("old")
        issued = self.authority.issue_cert("127.0.0.1")
        pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
        self.credentials = grpc.ssl_server_credentials(
            [pair], self.authority.cert_pem.bytes(), require_client_auth=True
        )

    def write(self, name, *, is_whole=True):
        issued = self.authority.issue_cert("127.0.0.1", common_name=name)
        issued.cert_chain_pems[0].write_to_path(self.cert)
        if is_whole:
            issued.private_key_pem.write_to_path(self.key)

    def run(self, service, scenario):
        """Start a server and an exporter that looks for changed files each second."""
        host = ManualHost()
        server = grpc.server(futures.ThreadPoolExecutor(2))
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(service, server)
        port = server.add_secure_port("127.0.0.1:0", self.credentials)
        server.start()
        tls = {"ca_file": self.ca, "cert_file": self.cert, "key_file": self.key}
        config = {
            "endpoint": f"127.0.0.1:{port}",
            "tls": tls | {"reload_interval": "1s"},
            "sending_queue": {"enabled": False},
        }

        async def run():
            exporter = OtlpExporter(ComponentId("otlp"), parse_model(OtlpConfig, config))
            await exporter.start(host)
            try:
                await asyncio.to_thread(scenario, exporter, host)
            finally:
                await exporter.stop()

        try:
            asyncio.run(run())
        finally:
            server.stop(None).wait()


def test_a_renewed_client_certificate_is_shown_and_a_bad_pair_leaves_the_old_one(tmp_path, caplog):
    files, service = Certificates(tmp_path), AskingService()

    def scenario(exporter, host):
        exporter.consume(_batch())
        files.write("half", is_whole=False)
        host.advance(NS_PER_S)
        exporter.consume(_batch())
        files.write("new")
        host.advance(NS_PER_S)
        exporter.consume(_batch())

    files.run(service, scenario)
    assert service.names == ["old", "old", "new"]
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == [
        "certificate not renewed, the old one stays"
    ]


def test_a_call_that_is_under_way_outlives_a_renewal(tmp_path):
    files, service = Certificates(tmp_path), AskingService()
    service.is_open.clear()

    def scenario(exporter, host):
        with futures.ThreadPoolExecutor(1) as pool:
            under_way = pool.submit(exporter.consume, _batch())
            service.has_call.wait()
            files.write("new")
            host.advance(NS_PER_S)
            service.is_open.set()
            under_way.result()
        exporter.consume(_batch())

    files.run(service, scenario)
    assert service.names == ["old", "new"]


def test_our_own_receiver_takes_what_it_sends():
    kept, host = KeptBatches(), ManualHost()

    async def scenario():
        settings = parse_model(
            receiver.OtlpReceiverConfig, {"protocols": {"grpc": {"endpoint": "127.0.0.1:0"}}}
        )
        listening = receiver.FACTORY.create(ComponentId("otlp"), settings, {Signal.METRICS: kept})
        await listening.start(host)
        config = parse_model(
            OtlpConfig,
            {"endpoint": f"http://{host.announced['grpc']}", "sending_queue": {"enabled": False}},
        )
        exporter = OtlpExporter(ComponentId("otlp"), config)
        await exporter.start(host)
        await asyncio.to_thread(exporter.consume, _batch())
        await exporter.stop()
        await listening.stop()

    asyncio.run(scenario())
    assert [point.value for point in iter_points(kept.batches[0].export)] == [2.5]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"endpoint": "a:1", "tls": {"insecure_skip_verify": True}},
        {"endpoint": "a:1", "tls": {"min_version": "1.3"}},
        {"endpoint": "a:1", "tls": {"max_version": "1.2"}},
        {"endpoint": "a:1", "tls": {"ca_file": "ca.pem", "include_system_ca_certs_pool": True}},
        {"endpoint": "a:1", "compression": "zstd"},
    ],
)
def test_what_grpc_cannot_do_is_refused(settings):
    with pytest.raises(ConfigError):
        parse_model(OtlpConfig, settings)
