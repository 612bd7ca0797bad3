"""TLS settings under the key names of the Collector's ``configtls``, for servers and for clients.

Source: opentelemetry-collector ``config/configtls/README.md``. Left out: ``*_pem`` (use a file), ciphers and curves
(OpenSSL's are right), TPM keys, and TLS below 1.2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from ingero.config.environment import LOOSE_KEYS, allows_loose_keys
from ingero.config.model import StrictModel
from ingero.config.types import Duration
from ingero.errors import ConfigError

TlsVersion = Literal["1.2", "1.3"]


class TlsFiles(StrictModel):
    """What both sides of a connection set."""

    ca_file: str | None = Field(
        None,
        description="PEM file of the authorities that the other side's certificate must come from.",
    )
    cert_file: str | None = Field(None, description="PEM file of this side's certificate chain.")
    key_file: str | None = Field(None, description="PEM file of this side's private key.")
    min_version: TlsVersion = Field("1.2", description="Lowest TLS version to accept.")
    max_version: TlsVersion | None = Field(
        None, description="Highest TLS version; empty is the newest."
    )
    reload_interval: Duration | None = Field(
        None,
        description="How often to look for changed certificate files. Empty never looks; the otlp receiver then looks"
        " every 60s.",
    )

    @model_validator(mode="after")
    def _check_pair(self) -> Self:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together; set both or neither")
        if self.min_version == "1.3" and self.max_version == "1.2":
            raise ValueError("min_version is above max_version")
        return self


class TlsServerConfig(TlsFiles):
    """TLS of a listening socket."""

    client_ca_file: str | None = Field(
        None,
        description="PEM file of client authorities; when set, a client must show a certificate.",
    )

    @model_validator(mode="after")
    def _check_server(self) -> Self:
        if self.cert_file is None:
            raise ValueError("a server needs cert_file and key_file")
        return self


class TlsClientConfig(TlsFiles):
    """TLS of an outgoing connection."""

    insecure: bool = Field(default=False, description="Speak without TLS.")
    insecure_skip_verify: bool = Field(
        default=False, description="Do not check the server's certificate; for trials only."
    )
    server_name_override: str | None = Field(
        None,
        description="Name to expect in the server's certificate instead of the endpoint's host.",
    )
    include_system_ca_certs_pool: bool = Field(
        default=False, description="Trust the system's authorities beside ca_file."
    )


def check_key_mode(key: str) -> None:
    """Refuse a private key that others may read, unless the operator allows such keys.

    Raises:
        ConfigError: Its mode has a bit for group or others, or it cannot be looked at.
    """
    try:
        mode = Path(key).stat().st_mode
    except OSError as error:
        raise ConfigError(f"{key}: {error.strerror}") from error
    if mode & 0o077 and not allows_loose_keys():
        raise ConfigError(
            f"{key} may be read by others (mode {mode & 0o777:o})",
            hint=f"chmod 600 {key}, or set {LOOSE_KEYS}=1",
        )
