"""Reads what Fleet concluded from its admin endpoint: clusters, and every verdict of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import httpx

from ingero.errors import BadDataError, RetryableError
from ingero.model.collectives import Worker
from ingero.model.verdicts import parse_judgement
from ingero.remediation.findings import ClusterReading
from ingero.units import NS_PER_S

_ROOT: Final = "/api/v1/admin"
_PAGE_ROWS: Final = 1000
_HINT: Final = "it listens on loopback only: run this on Fleet's own machine, or forward the port"


class FleetPages:
    """One Fleet.

    Args:
        client: Makes the requests.
        admin_url: Base of the admin endpoint.
        only: These clusters; empty takes all.
    """

    def __init__(self, client: httpx.Client, admin_url: str, only: Iterable[str] = ()) -> None:
        self._client = client
        self._admin_url = admin_url
        self._only = frozenset(only)

    def read(self) -> dict[str, ClusterReading]:
        """What Fleet says now, by cluster.

        Raises:
            RetryableError: It does not answer, or with something else.
        """
        try:
            clusters = {one["cluster_id"]: one for one in self._rows("clusters", "clusters")}
            wanted = [name for name in clusters if not self._only or name in self._only]
            readings = {name: self._read_cluster(name, clusters[name]) for name in wanted}
        except (
            httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError, BadDataError
        ) as error:  # fmt: skip
            description = (
                f"Fleet's admin endpoint {self._admin_url} does not tell verdicts: {error!r}"
            )
            raise RetryableError(description, hint=_HINT) from error
        return {name: reading for name, reading in readings.items() if reading is not None}

    def _get(self, page: str, query: dict[str, str]) -> Any:  # noqa: ANN401 - JSON
        response = self._client.get(f"{self._admin_url}{_ROOT}/{page}", params=query)
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        return response.raise_for_status().json()

    def _rows(self, page: str, name: str) -> list[Any]:
        rows: list[Any] = []
        while True:
            found = self._get(page, {"offset": str(len(rows)), "limit": str(_PAGE_ROWS)})
            rows += found[name]
            if len(rows) >= found["total"] or not found[name]:
                return rows

    def _read_cluster(self, name: str, cluster: dict[str, Any]) -> ClusterReading | None:
        """None for a cluster of which Fleet has judged nothing."""
        verdicts: list[Any] = []
        while True:
            query = {"cluster_id": name, "offset": str(len(verdicts)), "limit": str(_PAGE_ROWS)}
            answer = self._get("verdicts", query)
            if answer is None:
                return None
            page = answer["clusters"][0]
            verdicts += page["verdicts"]
            if len(verdicts) >= page["total"] or not page["verdicts"]:
                break
        return ClusterReading(
            parse_judgement({**page, "verdicts": verdicts}),
            judged_age_ns=int(float(page["age_s"]) * NS_PER_S),
            n_known=int(cluster["known_nodes"]),
            n_active=int(cluster["active_nodes"] or 0),
            has_quorum=cluster["quorum_met"] is True,
            in_panic=cluster["panic_mode"] is True or cluster["panic_since_unix_ns"] is not None,
            causes=dict(_iter_causes(verdicts)),
        )


def _iter_causes(verdicts: Iterable[dict[str, Any]]) -> Iterator[tuple[Worker, str]]:
    """The first cause of each worker whose agent has answered."""
    for verdict in verdicts:
        diagnosis, rank = verdict.get("diagnosis"), verdict["rank"]
        if diagnosis is not None:
            yield Worker(rank["node_id"], rank["job"], rank["rank"]), str(diagnosis["cause"] or "")
