"""Serving a recording over HTTPS: who may listen where, with which certificate, and for how long."""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from ingero.config import Endpoint
from ingero.config.tls import TlsServerConfig, check_key_mode
from ingero.errors import ConfigError, UnsupportedError
from ingero.recording.queries.recording_file import ExternalAccess
from ingero.recording.queries.web import NodeAccess, NodeApp, build_mcp
from ingero.serving.asgi import AsgiServer
from ingero.serving.oauth import AccessTokens, OAuthSettings
from ingero.serving.tls import build_server_context
from ingero.telemetry.clock import Clock, SystemClock

_LOCAL: Final = ("localhost", "127.0.0.1", "[::1]")
_VALID: Final = timedelta(hours=24)


@dataclass(frozen=True, slots=True)
class ListenSettings:
    """How a recording is served.

    Attributes:
        endpoint: Where to listen.
        token: The bearer; empty for none.
        oauth: The authorization server whose tokens are taken, too.
        cert_file: PEM chain; empty makes a certificate for a day.
        key_file: Its key.
        has_tls: False is plain HTTP, on loopback only.
        hosts: Further values of ``Host`` that are answered.
        has_mcp: Whether ``/mcp`` is served.
        outside: What MCP's tools may reach beyond the recording.
        fleet_url: Where Fleet's live page is; empty for nowhere.
    """

    endpoint: Endpoint
    token: str = ""
    oauth: OAuthSettings | None = None
    cert_file: str = ""
    key_file: str = ""
    has_tls: bool = True
    hosts: tuple[str, ...] = ()
    has_mcp: bool = True
    outside: ExternalAccess = field(default_factory=ExternalAccess)
    fleet_url: str = ""


def check_settings(settings: ListenSettings) -> None:
    """Refuse what would show a recording to a network unprotected.

    Raises:
        ConfigError: Plain HTTP or no bearer beyond loopback, half of a key pair, or a key that others may read.
    """
    if bool(settings.cert_file) != bool(settings.key_file):
        raise ConfigError("a certificate needs its key", hint="give both --tls-cert and --tls-key")
    if settings.key_file:
        check_key_mode(settings.key_file)
    if settings.endpoint.is_loopback:
        return
    if not settings.has_tls:
        raise ConfigError(
            f"plain HTTP on {settings.endpoint} would show the recording to the network",
            hint="listen on 127.0.0.1, or leave out --no-tls",
        )
    if not settings.token and settings.oauth is None:
        raise ConfigError(
            f"{settings.endpoint} is open to the network and there is no bearer token",
            hint="set INGERO_MCP_BEARER_TOKEN, or listen on 127.0.0.1",
        )


@asynccontextmanager
async def open_server(
    path: Path, settings: ListenSettings, clock: Clock | None = None
) -> AsyncIterator[Endpoint]:
    """Serve a recording while the context lasts; gives where it listens.

    Raises:
        ConfigError: The settings are unsafe.
        UnsupportedError: A certificate has to be made and cannot be.
        IngeroError: The address cannot be bound.
    """
    check_settings(settings)
    hosts = frozenset((
        *_LOCAL,
        settings.endpoint.host.lower(),
        *(h.lower() for h in settings.hosts),
    ))
    mcp = build_mcp(path, settings.outside) if settings.has_mcp else None
    tokens = AccessTokens(settings.oauth, clock or SystemClock()) if settings.oauth else None
    access = NodeAccess(settings.token, hosts, tokens)
    app = NodeApp(path, access, mcp, clock, settings.fleet_url)
    with tempfile.TemporaryDirectory(prefix="ingero-tls-") as folder:
        tls = _build_context(settings, Path(folder), clock or SystemClock())
    server = AsgiServer(app, settings.endpoint, tls=tls)  # type: ignore[arg-type] # a mapping is a scope
    async with AsyncExitStack() as stack:
        if mcp is not None:
            await stack.enter_async_context(mcp.run())
        await server.start()
        stack.push_async_callback(server.stop)
        yield server.bound


def _build_context(settings: ListenSettings, folder: Path, clock: Clock) -> ssl.SSLContext | None:
    if not settings.has_tls:
        return None
    cert, key = settings.cert_file, settings.key_file
    if not cert:
        cert, key = _make_certificate(
            folder, (*_LOCAL, settings.endpoint.host, *settings.hosts), clock
        )
    config = TlsServerConfig(cert_file=cert, key_file=key, min_version="1.3")
    return build_server_context(config)


def _make_certificate(folder: Path, hosts: tuple[str, ...], clock: Clock) -> tuple[str, str]:
    """A self-signed certificate for a day, in a folder that only this user can read."""
    try:
        from cryptography import x509  # noqa: PLC0415 - only for this
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import NameOID  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "making a certificate needs the package cryptography",
            hint="pip install 'ingero[agent]', or give --tls-cert and --tls-key",
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ingero")])
    now = datetime.fromtimestamp(clock.wall_ns() / 1e9, UTC)
    names: list[x509.GeneralName] = []
    for host in sorted({host.strip("[]") for host in hosts if host}):
        try:
            names.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    certificate = (
        x509
        .CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.touch(mode=0o600)
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return str(cert_file), str(key_file)
