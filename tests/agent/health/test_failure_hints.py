"""A push to the wrong kind of port, over real sockets, says what is wrong and what to write instead."""

import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import trustme

from ingero.agent.health.transport import GrpcTransport, HttpTransport, TransportSettings
from ingero.otlp.client.endpoint import parse_endpoint
from ingero.otlp.codec import build_gauge, build_metrics, build_number

EXPORT = build_metrics({"a": "b"}, [build_gauge("m", [build_number(1, 1, {})], "1", "")], "s", "1")


def send(kind, url):
    endpoint = parse_endpoint(url, is_insecure=False, option="--fleet-endpoint")
    transport = kind(TransportSettings(endpoint=endpoint, timeout_ns=20 * 10**9, is_protobuf=True))
    answer = transport.send(EXPORT, 0)
    transport.close()
    return answer


@pytest.fixture
def grpc_port():
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(None).wait()


@pytest.fixture
def tls_port():
    """Does what a TLS server does: a handshake with whoever connects, and the end of who speaks otherwise."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2", "http/1.1"])
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                context.wrap_socket(connection, server_side=True).close()
            except OSError:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(120)


def test_http_to_the_grpc_port_names_the_other_port(grpc_port):
    answer = send(HttpTransport, f"http://127.0.0.1:{grpc_port}")
    assert answer.is_cut_off
    assert "this is a gRPC port: OTLP over HTTP is usually on 4318" in answer.detail


def test_grpc_to_the_http_port_names_the_other_port(collector):
    answer = send(GrpcTransport, f"http://127.0.0.1:{collector.port}")
    assert answer.is_cut_off
    assert "this is an HTTP port: OTLP over gRPC is usually on 4317" in answer.detail


@pytest.mark.parametrize("kind", [HttpTransport, GrpcTransport])
def test_tls_to_a_plain_port_says_to_write_http(collector, kind):
    answer = send(kind, f"https://127.0.0.1:{collector.port}")
    assert answer.is_cut_off
    assert "the port speaks no TLS: write http:// before the address" in answer.detail


@pytest.mark.parametrize("kind", [HttpTransport, GrpcTransport])
def test_plain_text_to_a_tls_port_says_to_write_https(tls_port, kind):
    answer = send(kind, f"http://127.0.0.1:{tls_port}")
    assert answer.is_cut_off
    assert "it may speak TLS only: write https:// before the address" in answer.detail


@pytest.mark.parametrize("kind", [HttpTransport, GrpcTransport])
def test_certificate_of_a_stranger_says_to_name_its_authority(tls_port, kind):
    answer = send(kind, f"https://127.0.0.1:{tls_port}")
    assert "its certificate is not trusted: name its authority (--fleet-tls-ca)" in answer.detail


@pytest.mark.parametrize(
    ("status", "description"),
    [
        (401, "wrong or missing token (401 Unauthorized)"),
        (403, "the token may not do this (403 Forbidden)"),
        (404, "nothing takes OTLP at this address (404 Not Found)"),
        (418, "418 I'm a Teapot"),
    ],
)
def test_refusal_is_a_refusal_in_words(collector, status, description):
    collector.status = status
    answer = send(HttpTransport, collector.url)
    assert (answer.is_refused, answer.is_cut_off) == (True, False)
    assert answer.detail.lower() == description.lower()


def test_grpc_server_without_the_service_is_a_refusal(grpc_port):
    answer = send(GrpcTransport, f"http://127.0.0.1:{grpc_port}")
    assert (answer.is_refused, answer.is_cut_off) == (True, False)
    assert answer.detail.startswith("nothing takes OTLP at this address (UNIMPLEMENTED")
