"""What every page of the admin endpoint shares: its root, and the part of the rows that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from ingero.errors import BadDataError

ADMIN_ROOT: Final = "/api/v1/admin"
MAX_PAGE_ROWS: Final = 1000
RowT = TypeVar("RowT")


def get_cluster_id(query: Mapping[str, str]) -> str:
    """The cluster that ``?cluster_id=`` names.

    Raises:
        BadDataError: It is missing or empty.
    """
    cluster_id = query.get("cluster_id", "")
    if not cluster_id:
        raise BadDataError("cluster_id is missing; add ?cluster_id=NAME")
    return cluster_id


def parse_slice(query: Mapping[str, str]) -> slice:
    """The rows that ``?offset=`` and ``?limit=`` ask for: the first 100 when both are left out.

    Raises:
        BadDataError: One of them is no number, or over its limit.
    """
    numbers = []
    for name, default, most in (("offset", "0", 1 << 31), ("limit", "100", MAX_PAGE_ROWS)):
        text = query.get(name, default)
        if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= most):
            raise BadDataError(f"{name} is {text[:40]!r}; it must be a number up to {most}")
        numbers.append(int(text))
    offset, limit = numbers
    return slice(offset, offset + limit)


def build_page(
    name: str, rows: Sequence[RowT], query: Mapping[str, str], render: Callable[[RowT], Any]
) -> dict[str, Any]:
    """One page: how many rows there are, where the page begins, and under ``name`` its rows as JSON-able values.

    Raises:
        BadDataError: The query asks for rows that cannot be.
    """
    wanted = parse_slice(query)
    page = [render(row) for row in rows[wanted]]
    return {"total": len(rows), "offset": wanted.start, name: page}
