"""``otlphttp`` against a real listener: encodings, answers, headers, TLS and bearers."""

import asyncio
import gzip
import json
import socket

import pytest
import trustme
import zstandard

from ingero.config import Endpoint, Secret, parse_model
from ingero.config.tls import TlsServerConfig
from ingero.errors import ConfigError, IngeroError, PermanentError, RetryableError
from ingero.fleet.component import Authenticator, ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.exporters.otlphttp import OtlpHttpConfig, OtlpHttpExporter
from ingero.fleet.extensions.bearertokenauth import BearerTokenAuth, BearerTokenAuthConfig
from ingero.fleet.views import DeliveryView
from ingero.otlp.client.http import HttpSender, HttpSenderSettings
from ingero.otlp.client.reply import MAX_RETRY_AFTER_NS, parse_retry_after
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_export,
    encode_protobuf,
    iter_points,
)
from ingero.otlp.names import ContentType, Signal
from ingero.serving.asgi import AsgiServer
from ingero.serving.tls import build_server_context
from ingero.testing.host import ManualHost
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S


class Destination:
    """Keeps each request and answers as told."""

    def __init__(self):
        self.requests, self.answers = [], []

    async def __call__(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message["body"]
            if not message["more_body"]:
                break
        self.requests.append((scope["path"], dict(scope["headers"]), body))
        status, headers, answer = self.answers.pop(0) if self.answers else (200, [], b"")
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})


class NamedHost(ManualHost):
    """Knows that every offer is the asked component's."""

    def find(self, capability, component=None):
        return super().find(capability)


def _batch(value=1.5):
    gauge = build_gauge("m", [build_number(value, 1)])
    return Batch(Signal.METRICS, build_metrics({"a": "b"}, [gauge], "t"), 1)


def _export(settings=None, answers=(), batches=(None,), *, tls=None, host=None, scheme="http"):
    """Send batches without a queue; what the destination saw, and what each ``consume`` raised."""
    host, destination, raised = host or NamedHost(), Destination(), []
    destination.answers = list(answers)

    async def scenario():
        server = AsgiServer(destination, Endpoint("127.0.0.1", 0), tls=tls)
        await server.start()
        config = {
            "endpoint": f"{scheme}://{server.bound}/base",
            "sending_queue": {"enabled": False},
            **(settings or {}),
        }
        exporter = OtlpHttpExporter(ComponentId("otlphttp"), parse_model(OtlpHttpConfig, config))
        try:
            await exporter.start(host)
            for batch in batches:
                try:
                    await asyncio.to_thread(exporter.consume, batch or _batch())
                except (RetryableError, PermanentError) as error:
                    raised.append(error)
        finally:
            host.draining = True
            await exporter.stop()
            await server.stop()

    asyncio.run(scenario())
    return destination.requests, raised, host


def _values(body, content_type="application/x-protobuf"):
    return [one.value for one in iter_points(decode_export(body, Signal.METRICS, content_type))]


def test_a_timeout_of_zero_is_none():
    requests, raised, _ = _export({"timeout": "0s"})
    assert raised == []
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("settings", "decode", "content_type"),
    [
        ({}, gzip.decompress, "application/x-protobuf"),
        ({"compression": "zstd"}, zstandard.decompress, "application/x-protobuf"),
        ({"compression": "none"}, bytes, "application/x-protobuf"),
        ({"encoding": "json"}, gzip.decompress, "application/json"),
    ],
)
def test_body_arrives_in_the_encoding_and_compression_asked_for(settings, decode, content_type):
    requests, raised, _ = _export(settings)
    ((path, headers, body),) = requests
    assert raised == []
    assert path == "/base/v1/metrics"
    assert headers[b"content-type"].decode() == content_type
    wanted = settings.get("compression", "gzip").encode()
    assert headers.get(b"content-encoding", b"none") == wanted
    assert _values(decode(body), content_type) == [1.5]


def test_own_url_of_a_signal_and_own_headers_are_used():
    requests, _, _ = _export({"headers": {"X-Scope-OrgID": "team"}})
    assert requests[0][1][b"x-scope-orgid"] == b"team"
    config = parse_model(OtlpHttpConfig, {"endpoint": "http://a/", "logs_endpoint": "http://b/x"})
    assert config.url(Signal.METRICS) == "http://a/v1/metrics"
    assert config.url(Signal.LOGS) == "http://b/x"
    only_logs = parse_model(OtlpHttpConfig, {"logs_endpoint": "http://b/x"})
    assert only_logs.url(Signal.METRICS) is None


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_four_statuses_are_worth_a_retry_and_their_delay_is_heard(status):
    _, raised, _ = _export(answers=[(status, [(b"retry-after", b"7")], b"")])
    assert isinstance(raised[0], RetryableError)
    assert raised[0].retry_after_ns == 7 * NS_PER_S


@pytest.mark.parametrize("status", [400, 401, 404, 413, 500, 301])
def test_every_other_refusal_is_for_good(status):
    _, raised, _ = _export(answers=[(status, [(b"location", b"/")], b"")])
    assert isinstance(raised[0], PermanentError)
    assert str(status) in raised[0].message


def test_partial_success_is_success_and_its_refused_items_are_counted():
    answer = json.dumps({"partialSuccess": {"rejectedDataPoints": "3"}}).encode()
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceResponse,
    )

    message = ExportMetricsServiceResponse()
    message.partial_success.rejected_data_points = 4
    answers = [
        (200, [(b"content-type", b"application/json")], answer),
        (200, [(b"content-type", b"application/x-protobuf")], message.SerializeToString()),
        (200, [], b"what is this"),
    ]
    requests, raised, host = _export(answers=answers, batches=(None, None, None))
    assert (len(requests), raised) == (3, [])
    assert host.read("ingero_fleet_exporter_rejected_items_total", exporter="otlphttp") == 7
    assert host.read("otelcol_exporter_sent_metric_points_total", exporter="otlphttp") == 3


def test_destination_that_is_away_is_worth_a_retry():
    _, raised, _ = _export({"endpoint": "http://127.0.0.1:9"})
    assert isinstance(raised[0], RetryableError)


def test_destination_that_does_not_answer_in_time_is_worth_a_retry():
    async def scenario():
        async def silent(reader, writer):
            await reader.read()
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        settings = {
            "endpoint": f"http://127.0.0.1:{port}",
            "timeout": "20ms",
            "sending_queue": {"enabled": False},
        }
        exporter = OtlpHttpExporter(ComponentId("otlphttp"), parse_model(OtlpHttpConfig, settings))
        await exporter.start(NamedHost())
        with pytest.raises(RetryableError, match="Timeout"):
            await asyncio.to_thread(exporter.consume, _batch())
        await exporter.stop()
        server.close()
        await server.wait_closed()

    asyncio.run(scenario())


def test_bearer_extension_signs_requests_and_a_missing_one_is_named():
    host = NamedHost()
    auth = BearerTokenAuth(
        ComponentId("bearertokenauth"), BearerTokenAuthConfig(token=Secret("t0"))
    )
    asyncio.run(auth.start(host))
    assert host.find(Authenticator) == [auth]
    settings = {"auth": {"authenticator": "bearertokenauth"}}
    requests, _, _ = _export(settings, host=host)
    assert requests[0][1][b"authorization"] == b"Bearer t0"
    with pytest.raises(ConfigError, match="no running extension 'bearertokenauth'"):
        _export(settings)


def test_tls_checks_the_server_and_shows_a_client_certificate(tmp_path):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    cert, key, ca = (str(tmp_path / name) for name in ("c.pem", "k.pem", "ca.pem"))
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    authority.cert_pem.write_to_path(ca)
    pair = {"cert_file": cert, "key_file": key}
    server = parse_model(TlsServerConfig, {**pair, "client_ca_file": ca})

    def outcome(client):
        context = build_server_context(server)
        requests, raised, _ = _export({"tls": client}, tls=context, scheme="https")
        return len(requests), [type(one) for one in raised]

    assert outcome({"ca_file": ca, **pair}) == (1, [])
    assert outcome({"ca_file": ca}) == (0, [RetryableError])
    assert outcome(pair) == (0, [RetryableError])
    with pytest.raises(IngeroError, match=r"nowhere\.pem"):
        outcome({"ca_file": str(tmp_path / "nowhere.pem")})


@pytest.mark.parametrize(
    "text",
    ["Fri, 31 Dec 9999 23:59:59 GMT", "999999999999", "86400", "Fri, 31 Dec 9999 23:59:59 -2359"],
)
def test_retry_after_is_an_hour_at_most(text):
    assert parse_retry_after(text, 1_767_225_600 * NS_PER_S) == MAX_RETRY_AFTER_NS


@pytest.mark.parametrize(
    "text",
    [
        "Fri, 31 Dec 99999999999999999999999 23:59:59 GMT",
        "Fri, 31 Dec 2026 23:59:59 +99999999999999999",
    ],
)
def test_retry_after_with_numbers_that_no_date_has_is_none(text):
    assert parse_retry_after(text, 0) is None


def test_a_batch_that_is_asked_to_wait_until_the_year_9999_waits():
    answer = (503, [(b"retry-after", b"Fri, 31 Dec 9999 23:59:59 GMT")], b"")
    host, destination = NamedHost(), Destination()
    destination.answers = [answer]

    async def scenario():
        server = AsgiServer(destination, Endpoint("127.0.0.1", 0))
        await server.start()
        config = {
            "endpoint": f"http://{server.bound}",
            "retry_on_failure": {"max_elapsed_time": "0s"},
        }
        exporter = OtlpHttpExporter(ComponentId("otlphttp"), parse_model(OtlpHttpConfig, config))
        await exporter.start(host)
        exporter.consume(_batch())
        (view,) = host.find(DeliveryView)
        await asyncio.to_thread(wait_until, lambda: view.read_state().n_retries)
        host.draining = True
        await exporter.stop()  # the last attempts follow soon, and this one is taken
        await server.stop()
        return view.read_state()

    state = asyncio.run(scenario())
    assert (len(destination.requests), state.n_sent, state.n_dropped) == (2, 1, 0)


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"X-Site": "Zürich"}, "headers.X-Site"),
        ({"X-Site": "SECRET\r\nX-Other: 1"}, "headers.X-Site"),
        ({"X-Site": "SECRET\x00"}, "headers.X-Site"),
        ({"X Site": "SECRET"}, "headers.X Site"),
    ],
)
def test_header_that_cannot_be_sent_is_refused_by_its_key_alone(headers, key):
    with pytest.raises(ConfigError) as raised:
        parse_model(OtlpHttpConfig, {"endpoint": "http://a", "headers": headers})
    assert key in str(raised.value)
    assert not any(value in str(raised.value) for value in (*headers.values(), "SECRET"))


def test_what_the_http_library_says_of_a_header_is_not_passed_on():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = HttpSender(
            HttpSenderSettings(
                urls=lambda _: f"http://127.0.0.1:{listener.getsockname()[1]}/",
                encode=encode_protobuf,
                content_type=ContentType.PROTOBUF,
                timeout_ns=NS_PER_S,
                user_agent="SECRET\n",
            )
        )
        reply = sender.send(_batch().export, 0)
        sender.close()
    assert (reply.is_taken, reply.words) == (False, "LocalProtocolError")


def test_white_space_around_a_header_is_not_sent():
    requests, raised, _ = _export({"headers": {"X-Scope-OrgID": " team\n"}})
    assert raised == []
    assert requests[0][1][b"x-scope-orgid"] == b"team"


def test_header_that_cannot_be_sent_is_refused_for_good_without_its_value():
    class Vouching:
        def client_headers(self):
            return {"Authorization": "Bearer SECRET\nX: Zürich"}

    host = NamedHost()
    host.offer(Authenticator, Vouching())
    requests, raised, _ = _export({"auth": {"authenticator": "any"}}, host=host)
    assert requests == []
    assert [type(one) for one in raised] == [PermanentError]
    assert "header Authorization" in raised[0].message
    assert "SECRET" not in raised[0].message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5", 5 * NS_PER_S),
        ("Thu, 01 Jan 2026 00:00:10 GMT", 10 * NS_PER_S),
        ("Thu, 01 Jan 2015 00:00:10 GMT", 0),
        ("", None),
        ("soon", None),
        ("-5", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(text, expected):
    assert parse_retry_after(text, 1_767_225_600 * NS_PER_S) == expected


@pytest.mark.parametrize("settings", [{}, {"endpoint": "localhost:4318"}, {"endpoint": "ftp://x"}])
def test_endpoint_must_be_an_http_url(settings):
    with pytest.raises(ConfigError):
        parse_model(OtlpHttpConfig, settings)
