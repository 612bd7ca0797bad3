"""``GET /api/v1/threshold``: what an agent asks when its pushes come back without a threshold.

The agent reads at most 8 KiB, takes ``{"threshold": 0, "quorum_met": false}`` as a cold start, follows no redirect and
backs off on 429 only (wire facts of the existing agent), so every answer is short, direct and one of 200, 400, 404
and 405.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from ingero.fleet.component import WITHHELD, PushAnswer
from ingero.fleet.helpers.served_pages import Page, build_json_page
from ingero.wire.names import CLUSTER_QUERY, MAX_ID_LENGTH, THRESHOLD_PATH

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

FindAnswer = Callable[[str, str, str | None], PushAnswer | None]
"""Cluster, cohort hash (empty for the cluster), node (None when not given) → the threshold."""

MAX_QUERY_BYTES: Final = 4096
_COLD: Final = PushAnswer(0, quorum_met=False)


class QueryError(Exception):
    """The query cannot be answered; the message says why."""


def answer_agent(find_answer: FindAnswer, scope: HTTPScope) -> Page:
    """The page of ``agent_endpoint``."""
    if scope["path"] != THRESHOLD_PATH:
        return build_json_page(404, {"error": f"GET {THRESHOLD_PATH}?cluster_id=NAME"})
    if scope["method"] not in {"GET", "HEAD"}:
        return build_json_page(405, {"error": "GET only"})
    try:
        answer = find_answer(*read_query(scope["query_string"])) or _COLD
    except QueryError as error:
        return build_json_page(400, {"error": str(error)})
    body = {"threshold": answer.threshold, "quorum_met": answer.quorum_met}
    return build_json_page(200, body | {"panic": True} if answer is WITHHELD else body)


def read_query(query_string: bytes) -> tuple[str, str, str | None]:
    """Cluster, cohort hash and node of a query.

    Raises:
        QueryError: The cluster is missing, or something is too long or there twice.
    """
    if len(query_string) > MAX_QUERY_BYTES:
        raise QueryError(f"the query is longer than {MAX_QUERY_BYTES} bytes")
    try:
        found = parse_qs(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=16)
    except ValueError as error:
        raise QueryError("the query has more than 16 fields") from error
    values = [_one(found, name) for name in (CLUSTER_QUERY, "cgroup_path_hash", "node_id")]
    cluster_id, cohort_hash, node_id = values
    if not cluster_id:
        raise QueryError(f"{CLUSTER_QUERY} is missing; add ?{CLUSTER_QUERY}=NAME")
    return cluster_id, cohort_hash, node_id or None


def _one(found: dict[str, list[str]], name: str) -> str:
    values = found.get(name, [""])
    if len(values) > 1:
        raise QueryError(f"{name} is there {len(values)} times")
    if len(values[0]) > MAX_ID_LENGTH:
        raise QueryError(f"{name} is longer than {MAX_ID_LENGTH} characters")
    return values[0]
