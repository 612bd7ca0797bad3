"""What ``ingero dashboard`` and ``ingero mcp --http`` share: options, and serving until Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from ingero.errors import UnsupportedError

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


def add_options(options: Sequence[Callable[[Any], Any]]) -> Callable[[CommandT], CommandT]:
    """A decorator that gives a command several options."""

    def add(command: CommandT) -> CommandT:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def serve(
    db: Path | None, addr: str, path: str, *, tls: tuple[str, str, bool], hosts: tuple[str, ...]
) -> None:
    """Serve a recording until Ctrl-C and say where.

    Args:
        db: The recording; None for the default one.
        addr: Where to listen.
        path: What to append to the printed address.
        tls: Certificate file, key file, and whether TLS is on.
        hosts: Further names of this server.
    """
    try:
        import anyio

        from ingero.agent.queries.listen import ListenSettings, open_server
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"serving needs the package {error.name}", hint="pip install 'ingero[agent]'"
        ) from error
    from ingero.config import Endpoint
    from ingero.config.database import default_database
    from ingero.config.environment import read_bearer

    cert, key, has_tls = tls
    try:
        endpoint = Endpoint.parse(addr)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    settings = ListenSettings(endpoint, read_bearer(), cert, key, has_tls, hosts)

    async def run() -> None:
        async with open_server(db or default_database(), settings) as bound:
            scheme = "https" if has_tls else "http"
            click.echo(f"{scheme}://{bound}{path or '/'}", err=True)
            await anyio.sleep_forever()

    anyio.run(run)
