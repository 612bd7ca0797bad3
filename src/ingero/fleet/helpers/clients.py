"""Settings of everything that calls out, under the Collector's key names, and the HTTP client made from them."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal

from pydantic import Field

from ingero.config import Duration, HeaderName, HeaderSecret, Secret, StrictModel
from ingero.config.tls import TlsClientConfig
from ingero.errors import ConfigError, IngeroError
from ingero.fleet.component import Authenticator, Host, NamesExtension, parse_id
from ingero.serving.tls import CertificateReloader, build_client_context
from ingero.units import parse_duration

_log: Final = logging.getLogger("ingero.fleet.exporter")


class ClientAuthConfig(StrictModel):
    """Who vouches for a connection."""

    authenticator: Annotated[str, NamesExtension()] = Field(
        description="Id of an extension such as bearertokenauth."
    )


class ConnectionConfig(StrictModel):
    """What every outgoing connection has."""

    tls: TlsClientConfig | None = Field(None, description="TLS; empty is the system's authorities.")
    headers: dict[HeaderName, HeaderSecret] = Field(
        default_factory=dict, description="Headers added to each request."
    )
    auth: ClientAuthConfig | None = Field(None, description="Who vouches for this connection.")
    timeout: Duration = Field(
        parse_duration("30s"), description="Longest wait for one answer; 0s waits without end."
    )


class ClientConfig(ConnectionConfig):
    """A connection whose bodies may be compressed one way or another."""

    compression: Literal["gzip", "zstd", "none"] = Field(
        "gzip", description="How bodies are compressed."
    )


def find_authenticator(host: Host, auth: ClientAuthConfig | None) -> Authenticator | None:
    """The extension that ``auth`` names, or None when it names none.

    Raises:
        ConfigError: No running extension of that name can vouch.
    """
    if auth is None:
        return None
    component = parse_id(auth.authenticator)
    found = host.find(Authenticator, component) if component is not None else ()
    if not found:
        raise ConfigError(
            f"auth.authenticator: no running extension {auth.authenticator!r} can vouch for requests",
            hint="add it to service.extensions",
        )
    return found[0]


def reveal(headers: Mapping[str, Secret]) -> dict[str, str]:
    """Headers as they go on the wire."""
    return {name: value.get_secret_value() for name, value in headers.items()}


def open_client_context(
    config: ConnectionConfig, host: Host, urls: Iterable[str]
) -> ssl.SSLContext | None:
    """TLS of outgoing connections; certificates renew in place when ``reload_interval`` says so.

    Args:
        config: Whom to trust and what to show.
        host: Runs the renewal.
        urls: Every address that is connected to.

    Returns:
        None where there is neither TLS nor a setting of it to check.

    Raises:
        IngeroError: A TLS file cannot be used.
    """
    if config.tls is None and all(url.lower().startswith("http://") for url in urls):
        return None
    tls = config.tls or TlsClientConfig()
    context = build_client_context(tls)
    if tls.reload_interval and tls.cert_file:
        reloader = CertificateReloader(context, tls)

        def renew() -> None:
            try:
                reloader.reload_if_changed()
            except IngeroError as error:
                _log.warning("certificate not renewed, the old one stays: %s", error.message)

        host.every(tls.reload_interval, renew)
    return context
