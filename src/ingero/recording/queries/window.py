"""Which part of a recording is meant: relative to the data, never to this machine's clock."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Final

from ingero.errors import BadDataError
from ingero.model.recording import Recording
from ingero.recording.store.event_loader import LoadFilter
from ingero.recording.store.files import open_recording, store_errors
from ingero.recording.store.reader import ForkMemory, load_recording
from ingero.recording.store.typed import keep_typed
from ingero.units import NS_PER_S, parse_duration

_SPAN: Final = "SELECT (SELECT min(timestamp) FROM events), (SELECT max(timestamp) FROM events)"
"""Each alone comes from an end of the index; both in one SELECT would read all of it."""

TIMES: Final = (-(1 << 62), 1 << 62)
"""Unix ns that are a time; a damaged file may hold others."""
_MAX_PID: Final = 2**31 - 1
"""Of a pid_t."""
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_CLOCK: Final = re.compile(r"\d{1,2}:\d{2}")
_BELOW_US: Final = re.compile(r"[.,]\d{6}(\d{1,3})")
"""Digits of a fraction of a second behind the microseconds."""
_FORMS: Final = (
    "write 2026-04-03T12:18:35Z, a time of day of this machine's zone such as 15:40,"
    " or a duration from the first event such as 12.5s or 1m30s"
)

_WHICH_DAY: Final = "a time of day is the last one in the recording: write the date as well, such as 2026-04-03T15:40Z"


class AskedError(BadDataError):
    """What was asked for is not one: wrong usage of a command, a bad request over HTTP."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Wanted:
    """Part of a recording, as a person says it.

    Attributes:
        since: Duration back from the last event; empty for everything.
        start: RFC 3339 time (UTC when it names no zone), a time of day (this machine's zone when it names none) or a
            duration from the first event; empty for the first.
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


def check_pids(pids: Iterable[int]) -> None:
    """Refuse what no process can have.

    Raises:
        AskedError: One is not a process id.
    """
    for pid in pids:
        if not 0 <= pid <= _MAX_PID:
            raise AskedError(f"{pid} is not a process id")


def load_part(path: Path, wanted: Wanted, forks: ForkMemory | None = None) -> Recording:
    """Load the part of a recording that was asked for.

    Args:
        path: The file.
        wanted: The part.
        forks: See `load_recording`.

    Raises:
        AskedError: A time is not one, or the part is empty by construction.
        StoreError: The file cannot be read.
    """
    check_pids(wanted.pids)
    first_ns, last_ns = find_span(path)
    from_ns, to_ns = find_bounds((first_ns, last_ns), wanted)
    from_ns = None if from_ns is not None and from_ns <= first_ns else from_ns
    to_ns = None if to_ns is not None and to_ns >= last_ns else to_ns
    limits = LoadFilter(from_ns, to_ns, wanted.pids, has_extras=wanted.has_extras)
    if wanted.last:
        return load_recording(path, replace(limits, max_rows=wanted.last), forks)
    recording = load_recording(path, limits, forks)
    return replace(recording, has_unread=recording.is_truncated)


def find_bounds(span: tuple[int, int], wanted: Wanted) -> tuple[int | None, int | None]:
    """First and last moment that were asked for, Unix ns; None where none was.

    Args:
        span: First and last stored timestamp of the recording, Unix ns.
        wanted: As a person says it.

    Raises:
        AskedError: A time is not one, or the part is empty by construction.
    """
    from_ns = _parse_moment(wanted.start, span, "--from") if wanted.start else None
    to_ns = _parse_moment(wanted.end, span, "--to") if wanted.end else None
    if wanted.since:
        since_ns = max(span[1] - _parse_length(wanted.since, "--since"), TIMES[0])
        from_ns = since_ns if from_ns is None else max(since_ns, from_ns)
    if from_ns is not None and to_ns is not None and from_ns > to_ns:
        is_clock = any(_CLOCK.match(text) for text in (wanted.start, wanted.end))
        hint = _WHICH_DAY if is_clock else "swap --from and --to"
        raise AskedError("the window ends before it starts", hint=hint)
    return from_ns, to_ns


def describe_outside(path: Path, wanted: Wanted) -> str:
    """Where a recording begins or ends, for a part that lies before or after all of it; empty for any other part.

    Raises:
        AskedError: A time is not one.
        StoreError: The file cannot be read.
    """
    first_ns, last_ns = find_span(path)
    from_ns, to_ns = find_bounds((first_ns, last_ns), wanted)
    if not first_ns and not last_ns:
        return ""
    if from_ns is not None and from_ns > last_ns:
        length_s = (last_ns - first_ns) / NS_PER_S
        return (
            f"the recording ends at {format_wall(last_ns)}, {length_s:.3f} s from its first event"
        )
    if to_ns is not None and to_ns < first_ns:
        return f"the recording begins at {format_wall(first_ns)}"
    return ""


def find_span(path: Path) -> tuple[int, int]:
    """First and last stored timestamp of a recording, Unix ns; (0, 0) when it has no event."""
    with open_recording(path) as connection, store_errors(path):
        return read_span(connection)


def read_span(connection: sqlite3.Connection) -> tuple[int, int]:
    """`find_span` of an open recording; what is no time is left out."""
    found, _ = keep_typed(connection.execute(_SPAN), (TIMES, TIMES))
    if not found:
        every = connection.execute(
            "SELECT min(timestamp), max(timestamp) FROM events "
            "WHERE typeof(timestamp) = 'integer' AND timestamp BETWEEN ? AND ?",
            TIMES,
        )
        found, _ = keep_typed(every, (TIMES, TIMES))
    return found[0] if found else (0, 0)


def _parse_length(text: str, option: str) -> int:
    weeks = re.fullmatch(r"(\d+)w", text.strip())
    try:
        return int(weeks[1]) * parse_duration("7d") if weeks else parse_duration(text)
    except ValueError as error:
        raise AskedError(f"{option}: {error}") from error


def _parse_moment(text: str, span: tuple[int, int], option: str) -> int:
    """Unix ns of an RFC 3339 time, of a time of day within the recording, or of a duration after the first event.

    One beyond all that a recording can hold is the last or first that it can.

    Args:
        text: As written.
        span: First and last stored timestamp, Unix ns.
        option: For the message.
    """
    try:
        if _DATE.match(text):
            moment = _parse_date(text)
        elif _CLOCK.match(text):
            moment = _find_clock(time.fromisoformat(text.zfill(5)), span)
        else:
            moment = span[0] + parse_duration(text.removeprefix("+"))
        return min(max(moment, TIMES[0]), TIMES[1])
    except ValueError as error:
        raise AskedError(f"{option}: {text!r} is no time", hint=_FORMS) from error


def _parse_date(text: str) -> int:
    """Unix ns of an RFC 3339 time to the nanosecond, as `ingero trace --json` writes it; `datetime` drops those."""
    moment = _unix_ns(datetime.fromisoformat(text))
    below_us = _BELOW_US.search(text)
    return moment + (int(below_us[1].ljust(3, "0")) if below_us else 0)


def _find_clock(clock: time, span: tuple[int, int]) -> int:
    """The last occurrence of a time of day within the recording; the one next to it where there is none."""
    first_ns, last_ns = span
    zone = clock.tzinfo
    day = datetime.fromtimestamp(last_ns / NS_PER_S, zone).date()
    moments = [
        _unix_ns(datetime.combine(day + timedelta(days=shift), clock).astimezone(UTC))
        for shift in (1, 0, -1)
    ]
    within = [moment for moment in moments if first_ns <= moment <= last_ns]
    middle = (first_ns + last_ns) // 2
    return within[0] if within else min(moments, key=lambda moment: abs(moment - middle))


def _unix_ns(moment: datetime) -> int:
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    whole = round(moment.replace(microsecond=0).timestamp())
    return whole * NS_PER_S + moment.microsecond * 1000


def format_wall(wall_ns: int) -> str:
    """A Unix time as RFC 3339 in UTC with milliseconds."""
    moment = datetime.fromtimestamp(wall_ns / 1e9, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
