"""Tables of one process's communicators that keep the newest: a job may make and destroy groups for days."""

from __future__ import annotations

from typing import Final, TypeVar

MAX_COMMUNICATORS: Final = 256
"""Of one process. A job uses far fewer at a time; one that was used longer ago than so many others is likely gone."""

ValueT = TypeVar("ValueT")


def put_newest(table: dict[str, ValueT], comm: str, value: ValueT) -> None:
    """Put the entry of a communicator behind all others, and drop the first where there are too many."""
    table.pop(comm, None)
    table[comm] = value
    if len(table) > MAX_COMMUNICATORS:
        del table[next(iter(table))]
