"""What ``ingero dashboard`` and ``ingero mcp --http`` share: options, and serving until Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ingero.cli.options import option
from ingero.errors import UnsupportedError

if TYPE_CHECKING:
    from ingero.recording.queries.fanout import NodeAnswer
    from ingero.recording.queries.recording_file import ExternalAccess
    from ingero.serving.oauth import OAuthSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenConfig:
    """What a server shows to its clients."""

    tls_cert: str = option(
        "PEM certificate chain.  [default: one made for a day]", default="", metavar="FILE"
    )
    tls_key: str = option("Its key.", default="", metavar="FILE")
    no_tls: bool = option("Plain HTTP; on loopback only.", default=False)
    hosts: tuple[str, ...] = option(
        "Another name that clients may call this server by; repeat for more.",
        "--host",
        default=(),
        metavar="NAME",
    )
    fleet_url: str = option(
        "Where Fleet's live page is; the page links to it.", default="", metavar="URL"
    )
    oauth_issuer: str = option(
        "URL of an OAuth authorization server whose access tokens are taken, too.",
        default="",
        metavar="URL",
    )
    oauth_resource: str = option(
        "URL of MCP here as clients know it, ending in /mcp: the audience of such tokens.",
        default="",
        metavar="URL",
    )
    oauth_jwks: str = option("That server's public keys, a JWK set.", default="", metavar="FILE")

    def read_oauth(self) -> OAuthSettings | None:
        """Whose access tokens are taken; None for nobody's.

        Raises:
            click.UsageError: Something of it is missing or wrong.
        """
        given = (self.oauth_issuer, self.oauth_resource, self.oauth_jwks)
        if not any(given):
            return None
        if not all(given):
            raise click.UsageError(
                "--oauth-issuer, --oauth-resource and --oauth-jwks belong together"
            )
        from ingero.serving.oauth import OAuthSettings, check_urls

        if wrong := check_urls(self.oauth_issuer, self.oauth_resource):
            raise click.UsageError(f"--oauth-{wrong}")
        return OAuthSettings(*given, name="Ingero")


def wait_switch() -> Any:  # noqa: ANN401 - as option
    """A field that allows `find_database` to find none yet."""
    return option(
        "Serve although there is no recording yet, and show it once there is.",
        "--wait",
        default=False,
    )


def find_database(db: Path | None, *, is_waiting: bool) -> Path:
    """The recording to serve, which can be read now unless it is waited for.

    Raises:
        click.UsageError: There is no such file.
        StoreError: It is not a recording.
    """
    from ingero.config.environment import default_database
    from ingero.recording.store.files import open_recording

    path = db or default_database()
    if is_waiting:
        return path
    if not path.exists():
        whence = "" if db else " (`ingero trace` records one there; --db names another)"
        raise click.UsageError(f"{path}: no such file{whence}; --wait serves it once it is there")
    with open_recording(path):
        return path


def split_nodes(text: str) -> list[str]:
    """``host:port``, several with commas between, perhaps with brackets around all of them."""
    text = text.strip()
    if text.startswith("[") and text.endswith("]"):  # an IPv6 address with a port ends with that
        text = text[1:-1]
    return [node.strip() for node in text.split(",") if node.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """Other nodes' dashboards, and how they are asked."""

    nodes: str = option(
        "Ask these nodes' dashboards instead of a file.", default="", metavar="HOST:PORT,…"
    )
    ca_cert: str = option("Authority of the nodes' certificates.", default="", metavar="FILE")
    client_cert: str = option("Certificate to show them.", default="", metavar="FILE")
    client_key: str = option("Its key.", default="", metavar="FILE")
    no_tls: bool = option("Plain HTTP; to loopback only.", default=False)
    skew: str = option(
        "Warn of a node's clock beyond this.",
        "--clock-skew-threshold",
        default="10ms",
        metavar="DURATION",
    )

    def ask(
        self,
        path: str,
        body: object | None,
        timeout: str,
        decode: Callable[[bytes], Any] | None = None,
    ) -> tuple[list[NodeAnswer], float]:
        """Ask every node; returns their answers, of JSON without ``decode``, and the clock threshold in ms."""
        import msgspec

        from ingero.config.environment import read_bearer
        from ingero.config.model import parse_model
        from ingero.config.tls import TlsClientConfig
        from ingero.recording.queries.fanout import FanoutSettings, ask_nodes
        from ingero.units import parse_duration

        given = {
            "insecure": self.no_tls,
            "ca_file": self.ca_cert or None,
            "cert_file": self.client_cert or None,
            "key_file": self.client_key or None,
        }
        tls = parse_model(TlsClientConfig, {key: value for key, value in given.items() if value})
        try:
            timeout_ns, skew_ns = parse_duration(timeout), parse_duration(self.skew)
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        nodes = split_nodes(self.nodes)
        settings = FanoutSettings(read_bearer(), timeout_ns, tls)
        read = decode or msgspec.json.decode
        return ask_nodes(nodes, path, body, settings, decode=read), skew_ns / 1e6


def serve(
    db: Path, addr: str, path: str, listen: ListenConfig, outside: ExternalAccess | None = None
) -> None:
    """Serve a recording until Ctrl-C and say where.

    Args:
        db: The recording.
        addr: Where to listen.
        path: What to append to the printed address.
        listen: Its certificate and names.
        outside: What MCP's tools may reach beyond the recording.
    """
    try:
        import anyio

        from ingero.recording.queries.https_server import ListenSettings, open_server
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"serving needs the package {error.name}", hint="pip install 'ingero[agent]'"
        ) from error
    from ingero.config import Endpoint
    from ingero.config.environment import read_bearer

    has_tls = not listen.no_tls
    try:
        endpoint = Endpoint.parse(addr)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if listen.fleet_url and not listen.fleet_url.startswith(("https://", "http://")):
        raise click.UsageError(f"--fleet-url {listen.fleet_url!r} is no http or https URL")
    settings = ListenSettings(
        endpoint,
        read_bearer(),
        listen.read_oauth(),
        listen.tls_cert,
        listen.tls_key,
        has_tls,
        listen.hosts,
        fleet_url=listen.fleet_url,
    )
    if outside is not None:
        settings = replace(settings, outside=outside)

    async def run() -> None:
        async with open_server(db, settings) as bound:
            scheme = "https" if has_tls else "http"
            click.echo(f"{scheme}://{bound}{path or '/'}", err=True)
            await anyio.sleep_forever()

    anyio.run(run)
