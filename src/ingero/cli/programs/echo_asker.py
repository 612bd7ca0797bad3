"""Asks a running Echo for commands that show what it says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from ingero.errors import BadDataError, IngeroError, RetryableError
from ingero.header_values import read_bearer

if TYPE_CHECKING:
    import httpx

_ALL_ROWS: Final = 1_000_000
_TIMEOUT_S: Final = 60.0


class EchoAsker:
    """Asks one Echo; a context manager.

    Args:
        url: Its MCP and API.
        token_file: File with the bearer; None sends none.
        ca_file: Authority of its certificate; None takes the system's.

    Raises:
        IngeroError: A file cannot be read.
    """

    def __init__(self, url: str, token_file: str | None, ca_file: str | None) -> None:
        import ssl

        import httpx

        headers = {}
        if token_file:
            headers["Authorization"] = f"Bearer {read_bearer(Path(token_file))}"
        verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            if ca_file or not url.lower().startswith("http://"):  # 40 ms of a processor for nothing
                verify = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise IngeroError(f"{ca_file} cannot be read: {error}") from error
        self._url = url.rstrip("/")
        self._client = httpx.Client(headers=headers, verify=verify, timeout=_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """One answer. Raises IngeroError where there is none."""
        answer = self._post(tool, {"args": arguments}, "application/json")
        try:
            result: dict[str, Any] = answer.json()["result"]
        except ValueError as error:
            raise BadDataError(f"{self._url} answers with what is no JSON") from error
        return result

    def ask_rows(self, tool: str, arguments: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Every row, whatever a limit would be. Raises IngeroError where one is missing."""
        body = {"args": arguments, "max_rows": _ALL_ROWS}
        answer = self._post(tool, body, "application/x-ndjson")
        try:
            rows: list[Mapping[str, Any]] = [
                json.loads(line) for line in answer.content.split(b"\n") if line
            ]
        except ValueError as error:
            raise BadDataError(f"{self._url} answers with what is no NDJSON") from error
        if rows and "error" in rows[-1]:
            raise IngeroError(f"{self._url} stopped answering: {rows[-1]['error']}")
        return rows

    def _post(self, tool: str, body: Mapping[str, Any], accept: str) -> httpx.Response:
        import httpx

        url = self._url
        try:
            answer = self._client.post(
                f"{url}/api/v2/tools/{tool}", json=body, headers={"Accept": accept}
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RetryableError(
                f"no Echo answers at {url}: {str(error) or type(error).__name__}",
                hint="--url is its MCP and API address",
            ) from error
        if answer.status_code == 401:
            raise IngeroError(f"{url} does not know this bearer", hint="give --token-file FILE")
        if answer.status_code == 404:
            raise IngeroError(f"{url} is no Echo that has {tool}", hint="its release may be older")
        if answer.status_code != 200:
            raise IngeroError(f"{url} answers {answer.status_code}: {answer.text}"[:300])
        return answer
