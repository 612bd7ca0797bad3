"""What ``ingero dashboard`` and ``ingero mcp --http`` share: options, and serving until Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from ingero.errors import UnsupportedError

if TYPE_CHECKING:
    from ingero.recording.queries.fanout import NodeAnswer
    from ingero.recording.queries.source import Outside

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

LISTEN_OPTIONS: Final = (
    click.option(
        "--tls-cert",
        default="",
        metavar="FILE",
        help="PEM certificate chain.  [default: one made for a day]",
    ),
    click.option("--tls-key", default="", metavar="FILE", help="Its key."),
    click.option("--no-tls", is_flag=True, help="Plain HTTP; on loopback only."),
    click.option(
        "--host",
        "hosts",
        multiple=True,
        metavar="NAME",
        help="Another name that clients may call this server by; repeat for more.",
    ),
)
WAIT: Final = click.option(
    "--wait",
    is_flag=True,
    help="Serve although there is no recording yet, and show it once there is.",
)


def find_database(db: Path | None, *, is_waiting: bool) -> Path:
    """The recording to serve, which can be read now unless it is waited for.

    Raises:
        click.UsageError: There is no such file.
        StoreError: It is not a recording.
    """
    from ingero.config.database import default_database
    from ingero.recording.store.files import open_recording

    path = db or default_database()
    if is_waiting:
        return path
    if not path.exists():
        whence = "" if db else " (`ingero trace` records one there; --db names another)"
        raise click.UsageError(f"{path}: no such file{whence}; --wait serves it once it is there")
    with open_recording(path):
        return path


NODE_TLS_OPTIONS: Final = (
    click.option(
        "--ca-cert", default="", metavar="FILE", help="Authority of the nodes' certificates."
    ),
    click.option("--client-cert", default="", metavar="FILE", help="Certificate to show them."),
    click.option("--client-key", default="", metavar="FILE", help="Its key."),
)
NODE_OPTIONS: Final = (
    click.option(
        "--nodes",
        default="",
        metavar="HOST:PORT,…",
        help="Ask these nodes' dashboards instead of a file.",
    ),
    *NODE_TLS_OPTIONS,
    click.option("--no-tls", is_flag=True, help="Plain HTTP; to loopback only."),
    click.option(
        "--clock-skew-threshold",
        "skew",
        default="10ms",
        show_default=True,
        metavar="DURATION",
        help="Warn of a node's clock beyond this.",
    ),
)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What NODE_OPTIONS gave."""

    nodes: str
    ca_cert: str
    client_cert: str
    client_key: str
    no_tls: bool
    skew: str

    def ask(
        self,
        path: str,
        body: object | None,
        timeout: str,
        decode: Callable[[bytes], Any] = json.loads,
    ) -> tuple[list[NodeAnswer], float]:
        """Ask every node; returns their answers and the clock threshold in ms."""
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
        nodes = [node.strip() for node in self.nodes.strip("[]").split(",") if node.strip()]
        settings = FanoutSettings(read_bearer(), timeout_ns, tls)
        return ask_nodes(nodes, path, body, settings, decode=decode), skew_ns / 1e6


def add_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[CommandT], CommandT]:
    """A decorator that gives a command several options."""

    def add(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def serve(
    db: Path, addr: str, path: str, *, tls: tuple[str, str, bool], hosts: tuple[str, ...],
    outside: Outside | None = None,
) -> None:  # fmt: skip
    """Serve a recording until Ctrl-C and say where.

    Args:
        db: The recording.
        addr: Where to listen.
        path: What to append to the printed address.
        tls: Certificate file, key file, and whether TLS is on.
        hosts: Further names of this server.
        outside: What MCP's tools may reach beyond the recording.
    """
    try:
        import anyio

        from ingero.recording.queries.listen import ListenSettings, open_server
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"serving needs the package {error.name}", hint="pip install 'ingero[agent]'"
        ) from error
    from ingero.config import Endpoint
    from ingero.config.environment import read_bearer

    cert, key, has_tls = tls
    try:
        endpoint = Endpoint.parse(addr)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    settings = ListenSettings(endpoint, read_bearer(), cert, key, has_tls, hosts)
    if outside is not None:
        settings = replace(settings, outside=outside)

    async def run() -> None:
        async with open_server(db, settings) as bound:
            scheme = "https" if has_tls else "http"
            click.echo(f"{scheme}://{bound}{path or '/'}", err=True)
            await anyio.sleep_forever()

    anyio.run(run)
