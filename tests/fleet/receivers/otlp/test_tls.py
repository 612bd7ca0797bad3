"""TLS and mutual TLS on both protocols, and certificates that change while the receiver runs."""

import socket
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from cryptography import x509
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2_grpc import MetricsServiceStub
from tests.support import local_http

from ingero.errors import ConfigError, IngeroError
from ingero.otlp.codec import build_gauge, build_metrics, build_number, encode_json
from ingero.telemetry.log import read_fields

PUSH = build_metrics(
    {"ingero.node.id": "n"}, [build_gauge("ingero.node.health_score", [build_number(0.9, 1)])], "s"
)
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


def write(issued, folder):
    folder.mkdir(exist_ok=True)
    chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
    (folder / "tls.crt").write_bytes(chain)
    (folder / "tls.key").write_bytes(issued.private_key_pem.bytes())
    return {"cert_file": str(folder / "tls.crt"), "key_file": str(folder / "tls.key")}


@pytest.fixture
def files(authority, tmp_path):
    return write(authority.issue_cert("127.0.0.1", "localhost"), tmp_path / "server")


@pytest.fixture
def ca_file(authority, tmp_path):
    authority.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    return str(tmp_path / "ca.crt")


def context(ca_file, client=None):
    made = ssl.create_default_context(cafile=ca_file)
    if client is not None:
        made.load_cert_chain(client["cert_file"], client["key_file"])
    return made


def post(running, verify):
    url = running.url(scheme="https")
    return local_http.post(url, content=encode_json(PUSH), headers=JSON, verify=verify)


def export(running, authority, client=None):
    chain = (None, None)
    if client is not None:
        chain = tuple(Path(client[name]).read_bytes() for name in ("key_file", "cert_file"))
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes(), *chain)
    with grpc.secure_channel(str(running.grpc), credentials) as channel:
        return MetricsServiceStub(channel).Export(PUSH.message, timeout=120)


def test_both_protocols_speak_tls(serve, files, authority, ca_file):
    running = serve({"tls": files}, {"tls": files})
    assert post(running, context(ca_file)).status_code == 200
    export(running, authority)
    assert len(running.cluster.batches) == 2
    with pytest.raises(httpx.ConnectError):
        post(running, ssl.create_default_context())


def test_tls_below_1_2_is_refused(serve, files, ca_file):
    running = serve({"tls": files})
    old = context(ca_file)
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        post(running, old)


def test_mutual_tls_demands_a_certificate_of_the_right_authority(
    serve, files, authority, ca_file, tmp_path
):
    tls = {**files, "client_ca_file": ca_file}
    running = serve({"tls": tls}, {"tls": tls})
    good = write(authority.issue_cert("agent"), tmp_path / "agent")
    bad = write(trustme.CA().issue_cert("agent"), tmp_path / "stranger")
    assert post(running, context(ca_file, good)).status_code == 200
    export(running, authority, good)
    assert len(running.cluster.batches) == 2
    for client in (None, bad):
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            post(running, context(ca_file, client))
        with pytest.raises(grpc.RpcError) as caught:
            export(running, authority, client)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert len(running.cluster.batches) == 2


def http_serial(running, ca_file):
    with (
        local_http.open_client(verify=context(ca_file)) as client,
        client.stream("GET", running.url(scheme="https")) as answer,
    ):
        shown = answer.extensions["network_stream"].get_extra_info("ssl_object")
        return x509.load_der_x509_certificate(shown.getpeercert(True)).serial_number


def grpc_serial(running):
    pem = ssl.get_server_certificate((running.grpc.host, running.grpc.port))
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def test_a_renewed_certificate_is_used_without_a_restart(
    serve, files, authority, ca_file, tmp_path
):
    tls = {**files, "reload_interval": "5s"}
    running = serve({"tls": tls}, {"tls": tls})
    first = http_serial(running, ca_file)
    assert grpc_serial(running) == first
    write(authority.issue_cert("127.0.0.1", "localhost"), tmp_path / "server")
    running.host.advance(4_999_000_000)
    assert http_serial(running, ca_file) == first
    running.host.advance(1_000_000)
    second = http_serial(running, ca_file)
    assert second != first
    assert grpc_serial(running) == second
    export(running, authority)


def test_a_bad_renewal_keeps_the_old_certificate_and_is_counted(
    serve, files, authority, ca_file, tmp_path, caplog
):
    running = serve({"tls": files}, {"tls": files})
    first = http_serial(running, ca_file)
    (tmp_path / "server/tls.key").unlink()
    running.host.advance(60_000_000_000)
    assert http_serial(running, ca_file) == first
    assert grpc_serial(running) == first
    name = "ingero_fleet_receiver_certificate_errors_total"
    assert (running.count(name), running.count(name, "grpc")) == (1, 1)
    assert caplog.text.count("renewed certificate cannot be used; the old one stays") == 2


def test_certificate_that_comes_before_its_key_is_told_without_a_traceback(
    serve, files, authority, ca_file, tmp_path, caplog
):
    caplog.set_level("INFO")
    running = serve({"tls": files}, {"tls": files})
    first = http_serial(running, ca_file)
    issued = authority.issue_cert("127.0.0.1", "localhost")
    chain = b"".join(one.bytes() for one in issued.cert_chain_pems)
    (tmp_path / "server/tls.crt").write_bytes(chain)
    running.host.advance(60_000_000_000)
    assert http_serial(running, ca_file) == grpc_serial(running) == first
    (tmp_path / "server/tls.key").write_bytes(issued.private_key_pem.bytes())
    running.host.advance(60_000_000_000)
    assert http_serial(running, ca_file) == grpc_serial(running) != first
    assert [
        record.getMessage() for record in caplog.records if "certificate" in record.getMessage()
    ] == [
        "renewed certificate cannot be used; the old one stays",
        "renewed certificate cannot be used; the old one stays",
        "certificate renewed",
        "certificate renewed",
    ]
    assert not any(record.exc_info for record in caplog.records)


def test_handshakes_that_grpc_refuses_are_counted_too(serve, files, authority, ca_file):
    running = serve(grpc={"tls": {**files, "client_ca_file": ca_file}})
    with pytest.raises(grpc.RpcError):
        export(running, authority)
    assert (
        running.host.read("ingero_fleet_tls_handshakes_refused_total", component="receivers.otlp")
        >= 1
    )


def test_refused_handshakes_are_counted_and_logged(serve, files, ca_file, tmp_path, caplog):
    running = serve({"tls": {**files, "client_ca_file": ca_file}})
    stranger = write(trustme.CA().issue_cert("agent"), tmp_path / "stranger")
    for client in (None, stranger):
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            post(running, context(ca_file, client))
    with socket.create_connection((running.http.host, running.http.port)) as plain:
        plain.sendall(b"POST /v1/metrics HTTP/1.1\r\n\r\n")
        plain.settimeout(20)
        while plain.recv(4096):
            pass
    name = "ingero_fleet_tls_handshakes_refused_total"
    assert running.host.read(name, component="receivers.otlp") == 3
    (line,) = [one for one in caplog.records if one.getMessage() == "TLS handshake refused"]
    assert read_fields(line)["error"] == "PEER_DID_NOT_RETURN_A_CERTIFICATE"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_missing_certificate_stops_the_start_and_is_named(serve, files, protocol):
    broken = {**files, "cert_file": "/nowhere/tls.crt"}
    with pytest.raises(IngeroError, match=r"/nowhere/tls\.crt"):
        serve(**{protocol: {"tls": broken}})


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_both_protocols_keep_to_the_versions_of_tls(serve, files, ca_file, protocol):
    running = serve(**{protocol: {"tls": {**files, "min_version": "1.3"}}})
    address = getattr(running, protocol)
    for version, is_taken in ((ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)):
        offered = context(ca_file)
        offered.minimum_version = offered.maximum_version = version
        offered.set_alpn_protocols(["h2"])
        with socket.create_connection((address.host, address.port)) as plain:
            if not is_taken:
                with pytest.raises(ssl.SSLError):
                    offered.wrap_socket(plain, server_hostname="localhost")
                continue
            with offered.wrap_socket(plain, server_hostname="localhost") as secure:
                assert secure.selected_alpn_protocol() == ("h2" if protocol == "grpc" else None)


def test_no_protocol_is_a_config_error():
    from ingero.config import parse_model
    from ingero.fleet.receivers.otlp import OtlpReceiverConfig

    with pytest.raises(ConfigError, match="name at least one protocol"):
        parse_model(OtlpReceiverConfig, {"protocols": {}})
