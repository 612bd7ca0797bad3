"""Certificates: demanded, checked, renewed in place; a bad one never replaces a good one."""

import asyncio
import ssl

import pytest
import trustme

from ingero.config import Endpoint, parse_model
from ingero.config.tls import TlsClientConfig, TlsServerConfig
from ingero.errors import ConfigError, IngeroError
from ingero.serving.asgi import AsgiServer
from ingero.serving.tls import CertificateReloader, build_client_context, build_server_context


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture
def pair(authority, tmp_path):
    return _write(authority.issue_cert("127.0.0.1", "localhost"), tmp_path)


def _write(issued, folder):
    cert, key = folder / "tls.crt", folder / "tls.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return {"cert_file": str(cert), "key_file": str(key)}


def _ca_file(authority, folder):
    path = folder / "ca.pem"
    authority.cert_pem.write_to_path(str(path))
    return str(path)


async def _hello(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})


async def _serial(where, context):
    """The serial number of the certificate that the server shows."""
    from cryptography import x509

    _, writer = await asyncio.open_connection("127.0.0.1", where.port, ssl=context)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(shown).serial_number


def test_renewed_certificate_is_shown_by_new_handshakes_without_a_restart(
    authority, pair, tmp_path
):
    async def scenario():
        config = parse_model(TlsServerConfig, pair)
        context = build_server_context(config)
        reloader = CertificateReloader(context, config)
        client = build_client_context(
            parse_model(TlsClientConfig, {"ca_file": _ca_file(authority, tmp_path)})
        )
        server = AsgiServer(_hello, Endpoint("127.0.0.1", 0), tls=context)
        await server.start()
        before = await _serial(server.bound, client)
        assert not reloader.reload_if_changed()
        _write(authority.issue_cert("127.0.0.1"), tmp_path)
        assert reloader.reload_if_changed()
        after = await _serial(server.bound, client)
        await server.stop()
        return before, after

    before, after = asyncio.run(scenario())
    assert before != after


@pytest.mark.parametrize("is_mismatched", [True, False])
def test_bad_renewal_is_refused_and_the_old_certificate_stays(
    authority, pair, tmp_path, is_mismatched
):
    other = authority.issue_cert("127.0.0.1").cert_chain_pems[0].bytes()
    bad = other if is_mismatched else b"half a cert"

    async def scenario():
        config = parse_model(TlsServerConfig, pair)
        context = build_server_context(config)
        reloader = CertificateReloader(context, config)
        client = build_client_context(
            parse_model(TlsClientConfig, {"ca_file": _ca_file(authority, tmp_path)})
        )
        server = AsgiServer(_hello, Endpoint("127.0.0.1", 0), tls=context)
        await server.start()
        before = await _serial(server.bound, client)
        (tmp_path / "tls.crt").write_bytes(bad)
        with pytest.raises(IngeroError, match=r"tls\.crt"):
            reloader.reload_if_changed()
        after = await _serial(server.bound, client)
        await server.stop()
        return before, after

    before, after = asyncio.run(scenario())
    assert before == after


@pytest.mark.parametrize("has_certificate", [True, False])
def test_client_ca_demands_a_client_certificate(authority, pair, tmp_path, has_certificate):
    ca_file = _ca_file(authority, tmp_path)

    async def scenario():
        tls = build_server_context(parse_model(TlsServerConfig, pair | {"client_ca_file": ca_file}))
        server = AsgiServer(_hello, Endpoint("127.0.0.1", 0), tls=tls)
        await server.start()
        settings = {"ca_file": ca_file} | (pair if has_certificate else {})
        client = build_client_context(parse_model(TlsClientConfig, settings))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.bound.port, ssl=client)
        try:
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return await reader.read()
        except (ssl.SSLError, ConnectionError):
            return b""
        finally:
            writer.close()
            await server.stop()

    answer = asyncio.run(scenario())
    assert (b"hello" in answer) is has_certificate


def test_missing_and_broken_files_are_named(tmp_path, pair):
    with pytest.raises(IngeroError, match=r"nowhere\.pem"):
        build_client_context(TlsClientConfig(ca_file=str(tmp_path / "nowhere.pem")))
    (tmp_path / "tls.key").write_text("not a key")
    with pytest.raises(IngeroError, match=r"tls\.key"):
        build_server_context(parse_model(TlsServerConfig, pair))


def test_half_a_pair_and_old_versions_are_configuration_errors():
    with pytest.raises(ConfigError, match="belong together"):
        parse_model(TlsServerConfig, {"cert_file": "a"})
    with pytest.raises(ConfigError, match="min_version"):
        parse_model(TlsClientConfig, {"min_version": "1.0"})
    with pytest.raises(ConfigError, match="needs cert_file"):
        parse_model(TlsServerConfig, {})


def test_minimum_version_reaches_the_context(pair):
    context = build_server_context(parse_model(TlsServerConfig, pair | {"min_version": "1.3"}))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_skipping_verification_and_system_authorities_are_what_they_say(tmp_path, authority):
    assert build_client_context(TlsClientConfig()).verify_mode is ssl.CERT_REQUIRED
    skipped = build_client_context(TlsClientConfig(insecure_skip_verify=True))
    assert (skipped.verify_mode, skipped.check_hostname) == (ssl.CERT_NONE, False)
    only_ours = TlsClientConfig(ca_file=_ca_file(authority, tmp_path))
    assert build_client_context(only_ours).cert_store_stats()["x509_ca"] == 1
