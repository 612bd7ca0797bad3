"""Which part of a recording is meant: relative to the data, never to this machine's clock."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ingero.agent.store.files import open_recording, store_errors
from ingero.agent.store.reader import LoadFilter, load_recording
from ingero.errors import BadDataError
from ingero.model.recording import Recording
from ingero.units import parse_duration

SPAN: Final = "SELECT (SELECT min(timestamp) FROM events), (SELECT max(timestamp) FROM events)"
"""Each alone comes from an end of the index; both in one SELECT would read all of it."""

_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")


class AskedError(BadDataError):
    """What was asked for is not one: wrong usage of a command, a bad request over HTTP."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """Part of a recording, as a person says it.

    Attributes:
        since: Duration back from the last event; empty for everything.
        start: RFC 3339 time (UTC when it names no zone) or a duration from the first event; empty for the first.
        end: The same, for the last.
        pids: Only these processes; empty for all.
        last: Only so many of the newest events; 0 for all.
        has_extras: Also stacks of events.
    """

    since: str = ""
    start: str = ""
    end: str = ""
    pids: tuple[int, ...] = ()
    last: int = 0
    has_extras: bool = False


def load_part(path: Path, wanted: Wanted) -> Recording:
    """Load the part of a recording that was asked for.

    Raises:
        AskedError: A time is not one, or the part is empty by construction.
        StoreError: The file cannot be read.
    """
    first_ns, last_ns = find_span(path)
    from_ns = _parse_moment(wanted.start, first_ns, "--from") if wanted.start else None
    to_ns = _parse_moment(wanted.end, first_ns, "--to") if wanted.end else None
    if wanted.since:
        from_ns = max(last_ns - _parse_length(wanted.since, "--since"), from_ns or first_ns)
    if from_ns is not None and to_ns is not None and from_ns > to_ns:
        raise AskedError("the window ends before it starts", hint="swap --from and --to")
    limits = LoadFilter(from_ns, to_ns, wanted.pids, has_extras=wanted.has_extras)
    if wanted.last:
        limits = replace(limits, max_rows=wanted.last)
    return load_recording(path, limits)


def find_span(path: Path) -> tuple[int, int]:
    """First and last stored timestamp of a recording, Unix ns; (0, 0) when it has no event."""
    with open_recording(path) as connection, store_errors(path):
        first, last = connection.execute(SPAN).fetchone()
    return (int(first), int(last)) if first is not None else (0, 0)


def _parse_length(text: str, option: str) -> int:
    weeks = re.fullmatch(r"(\d+)w", text.strip())
    try:
        return int(weeks[1]) * parse_duration("7d") if weeks else parse_duration(text)
    except ValueError as error:
        raise AskedError(f"{option}: {error}") from error


def _parse_moment(text: str, first_ns: int, option: str) -> int:
    """Unix ns of an RFC 3339 time, or of a duration after the first event."""
    if not _DATE.match(text):
        return first_ns + _parse_length(text.removeprefix("+"), option)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise AskedError(
            f"{option}: {text!r} is no time",
            hint="write 2026-04-03T12:18:35Z, or a duration from the first event such as 12.5s",
        ) from error
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = round(moment.replace(microsecond=0).timestamp())
    return whole * 1_000_000_000 + moment.microsecond * 1000


def format_wall(wall_ns: int) -> str:
    """A Unix time as RFC 3339 in UTC with milliseconds."""
    moment = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
