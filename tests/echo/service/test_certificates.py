"""TLS of every listener, a certificate that is renewed, and keys that others may read."""

import socket
import ssl
import time

import grpc
import pytest
import trustme
from tests.echo.service.conftest import (
    ONE,
    health,
)
from tests.support import local_http

from ingero.errors import ConfigError


def test_tls_serves_every_listener_and_a_new_certificate_needs_no_restart(open_echo, tmp_path):
    authority = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue():
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.cert_chain_pems[0].write_to_path(cert)
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)

    issue()
    echo = open_echo(insecure_no_tls=False, tls_cert=str(cert), tls_key=str(key))
    context = ssl.create_default_context()
    authority.configure_trust(context)

    def serial():
        with (
            socket.create_connection(("127.0.0.1", echo.at.mcp.port)) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as link,
        ):
            return link.getpeercert()["serialNumber"]

    first = serial()
    answer = local_http.get(
        f"{echo.url}/api/v2/whoami", headers={"authorization": f"Bearer {ONE}"}, verify=context
    )
    assert answer.status_code == 200
    trust = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    with grpc.secure_channel(f"localhost:{echo.at.otlp_grpc.port}", trust) as channel:
        call = channel.unary_unary(
            "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export"
        )
        body = health("c1", time.time_ns()).message.SerializeToString()
        assert call(body, metadata=(("authorization", f"Bearer {ONE}"),), timeout=120) == b""
    issue()
    echo.reload()
    assert serial() != first
    at_grpc = ssl.get_server_certificate(("127.0.0.1", echo.at.otlp_grpc.port))
    assert at_grpc.strip() == cert.read_text().strip()


def test_a_key_that_others_may_read_is_refused(tmp_path):
    from ingero.config.tls import check_key_mode

    key = tmp_path / "key.pem"
    key.write_text("k")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="644") as raised:
        check_key_mode(str(key))
    assert "chmod 600" in raised.value.hint
