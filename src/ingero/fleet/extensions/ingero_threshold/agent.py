"""``GET /api/v1/threshold``: what an agent asks when its pushes come back without a threshold.

The agent reads at most 8 KiB, takes ``{"threshold": 0, "quorum_met": false}`` as a cold start, follows no redirect and
backs off on 429 only (wire facts of the existing agent), so every answer is short, direct and one of 200, 400, 404
and 405.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

from ingero.fleet.component import WITHHELD, PushAnswer
from ingero.wire.names import CLUSTER_QUERY, Path

if TYPE_CHECKING:
    from uvicorn._types import ASGIApplication, ASGIReceiveCallable, ASGISendCallable, Scope

FindAnswer = Callable[[str, str, str | None], PushAnswer | None]
"""Cluster, cohort hash (empty for the cluster), node (None when not given) → what they are told."""

MAX_ID_LENGTH: Final = 256
MAX_QUERY_BYTES: Final = 4096
_COLD: Final = PushAnswer(0, quorum_met=False)


class QueryError(Exception):
    """The query cannot be answered; the message says why."""


def agent_app(find_answer: FindAnswer, count: Callable[[int], None]) -> ASGIApplication:
    """The application behind ``agent_endpoint``; ``count`` is told each status."""

    async def app(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        del receive
        assert scope["type"] == "http"
        status = 200
        body: dict[str, str | float | bool]
        if scope["path"] != Path.THRESHOLD:
            status, body = 404, {"error": f"GET {Path.THRESHOLD}?cluster_id=NAME"}
        elif scope["method"] not in {"GET", "HEAD"}:
            status, body = 405, {"error": "GET only"}
        else:
            try:
                answer = find_answer(*read_query(scope["query_string"])) or _COLD
                body = {"threshold": answer.threshold, "quorum_met": answer.quorum_met}
                if answer is WITHHELD:
                    body["panic"] = True
            except QueryError as error:
                status, body = 400, {"error": str(error)}
        count(status)
        await send_json(send, status, body)

    return app


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


async def send_json(send: ASGISendCallable, status: int, body: object) -> None:
    """Answer with JSON that nothing may cache."""
    text = _write_json(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(text)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
    ]
    if status == 405:
        headers.append((b"allow", b"GET, HEAD"))
    await send({
        "type": "http.response.start",
        "status": status,
        "headers": headers,
        "trailers": False,
    })
    await send({"type": "http.response.body", "body": text, "more_body": False})


def _write_json(body: object) -> str:
    """JSON text; what is no number in JSON (NaN, infinities) becomes null."""
    try:
        return json.dumps(body, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_without_nan(body), separators=(",", ":"), default=str)


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value
