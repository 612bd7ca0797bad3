"""A command's own page for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ingero.errors import ConfigError

if TYPE_CHECKING:
    from ingero.agent.events.sink_server import Scraped
    from ingero.config import Endpoint


@contextmanager
def serve_metrics(page: Scraped, address: str, option: str) -> Iterator[Endpoint]:
    """Serve a page on ``HOST:PORT`` until the context ends, and print where; the address that was bound.

    Raises:
        ConfigError: The address cannot be understood; the message names the option.
        IngeroError: It cannot be listened on.
    """
    from ingero.agent.events.sink_server import serve_sink
    from ingero.config import Endpoint

    try:
        endpoint = Endpoint.parse(address)
    except ValueError as error:
        raise ConfigError(f"{option} {error}") from error
    with serve_sink(endpoint, page, option=option) as bound:
        click.echo(f"serving http://{bound}/metrics", err=True)
        yield bound
