"""Answers in pages: an assistant asks for more when it wants more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, TypeAlias, TypeVar

import msgspec

from ingero.errors import BadDataError
from ingero.recording.queries.explanation_answers import WindowArgs

ItemT = TypeVar("ItemT")
_MAX_DIGITS: Final = 18
Tsc: TypeAlias = Annotated[
    bool, msgspec.Meta(description="changes nothing here; taken because older callers send it")
]
"""Of questions whose answers have one form."""


class PageArgs(WindowArgs, frozen=True, forbid_unknown_fields=True):
    """Which part of the recording, and which page of the answer."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=100, description="items of one page")] = 10
    cursor: Annotated[
        str, msgspec.Meta(description="next_cursor of the page before; empty for the first")
    ] = ""
    tsc: Annotated[bool, msgspec.Meta(description="false adds the full form to the short one")] = (
        True
    )


def cut_page(items: Sequence[ItemT], limit: int, cursor: str) -> tuple[Sequence[ItemT], str]:
    """One page, and the cursor of the next; empty when there is none.

    Raises:
        BadDataError: The cursor is not one of ours.
    """
    if cursor and not (cursor.isdecimal() and len(cursor) <= _MAX_DIGITS):
        raise BadDataError(
            f"{cursor!r:.40} is no cursor", hint="pass next_cursor of the page before"
        )
    first = int(cursor or 0)
    last = first + limit
    return items[first:last], str(last) if last < len(items) else ""
