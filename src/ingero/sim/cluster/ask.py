"""Asks a Fleet's admin endpoint about a live job."""

from __future__ import annotations

from typing import Any, Final

import httpx

from ingero.errors import RetryableError

HANG_PATH: Final = "/api/v1/admin/hang"
VERDICTS_PATH: Final = "/api/v1/admin/verdicts"


def ask_diagnoses(
    client: httpx.Client, admin_url: str, cluster_id: str
) -> dict[int, tuple[str, Any]]:
    """Each rank's verdict and why it has that, by rank, as far as their agents have answered.

    Raises:
        RetryableError: The admin endpoint does not answer, or answers something else.
    """
    try:
        response = client.get(admin_url + VERDICTS_PATH, params={"cluster_id": cluster_id})
        if response.status_code == httpx.codes.NOT_FOUND:
            return {}
        verdicts = response.raise_for_status().json()["clusters"][0]["verdicts"]
        found = {
            verdict["rank"]["rank"]: (str(verdict["verdict"]), verdict["diagnosis"])
            for verdict in verdicts
        }
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise RetryableError(
            f"Fleet's admin endpoint {admin_url} does not tell diagnoses: {error!r}"
        ) from error
    return {rank: known for rank, known in found.items() if known[1] is not None}


def ask_hang(client: httpx.Client, admin_url: str, cluster_id: str) -> dict[str, Any] | None:
    """Ranks that a standing job waits for; None when the Fleet knows no such cluster.

    Raises:
        RetryableError: The admin endpoint does not answer, or answers something else.
    """
    try:
        response = client.get(admin_url + HANG_PATH, params={"cluster_id": cluster_id})
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        answer: dict[str, Any] = response.raise_for_status().json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise RetryableError(
            f"Fleet's admin endpoint {admin_url} does not tell hangs: {error}",
            hint="it listens on loopback only: run this on Fleet's own machine, or forward the port",
        ) from error
    return answer
