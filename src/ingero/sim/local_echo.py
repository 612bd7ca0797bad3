"""An Echo for as long as a command needs it: a real ``ingero-echo`` process on free loopback ports."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ingero.sim.launcher import launch


@dataclass(frozen=True, slots=True)
class LocalEcho:
    """A running Echo.

    Attributes:
        otlp_url: Where OTLP/HTTP is taken.
        url: MCP, the API and the page of the week.
        token: Its only bearer.
        token_file: Where that is kept.
    """

    otlp_url: str
    url: str
    token: str
    token_file: Path

    @property
    def fleet_overrides(self) -> tuple[str, ...]:
        """Settings that make the shipped Fleet configuration forward here."""
        return (
            f"exporters.otlphttp.endpoint={self.otlp_url}",
            f"exporters.otlphttp.headers.Authorization=Bearer {self.token}",
            "service.pipelines.metrics.exporters=[prometheus, otlphttp]",
            "service.pipelines.logs.exporters=[debug, otlphttp]",
            "processors.nccl.cost_interval=1s",
        )


@contextmanager
def run_local_echo() -> Iterator[LocalEcho]:
    """Start ``ingero-echo serve`` on free loopback ports with a database that ends with it.

    Raises:
        IngeroError: It did not start; the message holds what it said.
    """
    token = secrets.token_hex(32)
    with TemporaryDirectory(prefix="ingero-echo-") as folder:
        file = Path(folder) / "token"
        file.touch(mode=0o600)
        file.write_text(token, encoding="ascii")
        arguments = ["serve", "--insecure-no-tls"]
        arguments += ["--db", f"{folder}/echo.db", "--auth-token-file", str(file)]
        for name in ("otlp", "otlp-http", "mcp", "health"):
            arguments += [f"--{name}-addr", "127.0.0.1:0"]
        with launch("ingero.cli.programs.echo", arguments) as echo:
            yield LocalEcho(echo.url("otlp_http"), echo.url("mcp"), token, file)
