"""Where to send: the forms of an endpoint that people write, as URLs and as gRPC targets."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from ingero.errors import ConfigError
from ingero.otlp.names import SIGNAL_PATHS, Signal


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """A collector that takes OTLP.

    Attributes:
        base: ``scheme://host[:port][/prefix]`` without a slash at the end.
        is_secure: TLS.
        target: ``host:port`` for gRPC.
    """

    base: str
    is_secure: bool
    target: str

    def signal_url(self, signal: Signal) -> str:
        """Where a signal is posted."""
        path = SIGNAL_PATHS[signal]
        return self.base if self.base.endswith(path) else f"{self.base}{path}"


def parse_endpoint(text: str, *, is_insecure: bool, option: str) -> OtlpEndpoint:
    """Read ``host:port`` (https, or http when insecure) or a full URL, whose own scheme counts.

    Args:
        text: As written.
        is_insecure: Speak without TLS where the text does not say.
        option: Name of the option, for the message.

    Raises:
        ConfigError: It is neither.
    """
    stripped = text.strip()
    if "://" not in stripped:
        stripped = f"{'http' if is_insecure else 'https'}://{stripped}"
    try:
        parts = urlsplit(stripped)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error
    problem = ""
    if parts.scheme not in {"http", "https"}:
        problem = f"the scheme is {parts.scheme!r}, not http or https"
    elif not parts.hostname or any(c.isspace() for c in stripped):
        problem = "has no host"
    elif parts.query or parts.fragment or parts.username:
        problem = "must not carry a query, a fragment or a user"
    if problem:
        raise ConfigError(
            f"{option} {text!r}: {problem}",
            hint="write host:4318, https://host:4318 or https://host/prefix",
        )
    is_secure = parts.scheme == "https"
    host = f"[{parts.hostname}]" if ":" in str(parts.hostname) else str(parts.hostname)
    target = f"{host}:{port or (443 if is_secure else 80)}"
    base = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    return OtlpEndpoint(base, is_secure, target)
