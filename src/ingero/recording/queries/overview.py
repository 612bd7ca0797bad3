"""What a recording is, from a few counts: quick on any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.queries.window import TIMES, format_wall, read_span
from ingero.recording.store.files import open_recording, store_errors, table_columns
from ingero.recording.store.rows import stored_timestamps
from ingero.recording.store.typed import keep_typed

MAX_SNAPSHOTS = 600


def read_overview(path: Path) -> dict[str, Any]:
    """Size, span, nodes, sessions and the machine's latest state; what the file does not say is left out.

    Raises:
        StoreError: The file cannot be read.
    """
    with open_recording(path) as connection, store_errors(path):
        first, last = read_span(connection)
        (rows,) = connection.execute("SELECT count(*) FROM events").fetchone()
        found: dict[str, Any] = {
            "file": path.name,
            "event_count": rows,
            "session_count": 0,
        }
        found |= _describe_span(first, last)
        sessions = table_columns(connection, "sessions")
        if sessions:
            row = connection.execute(
                "SELECT gpu_model, gpu_driver, cuda_ver, kernel, cpu_cores FROM sessions ORDER BY started_at "
                "DESC LIMIT 1"
            ).fetchone()
            (found["session_count"],) = connection.execute(
                "SELECT count(*) FROM sessions"
            ).fetchone()
            if row:
                gpu = zip(("model", "driver_version", "cuda_version"), row[:3], strict=True)
                found["gpu"] = {name: clean(str(value)) for name, value in gpu if value}
                found["host"] = {"kernel": clean(str(row[3])), "cpus": row[4]}
    shots = list_snapshots(path, limit=1)
    return found | ({"system": shots[0]} if shots else {})


def count_part(recording: Recording) -> dict[str, Any]:
    """What `read_overview` says of the events of a recording, of a part of one."""
    stamps = stored_timestamps(recording.events)
    if not len(stamps):
        return {"event_count": 0}
    return {"event_count": len(stamps), **_describe_span(int(stamps.min()), int(stamps.max()))}


def _describe_span(first: int, last: int) -> dict[str, Any]:
    if not (first or last):
        return {}
    return {
        "first": format_wall(first),
        "last": format_wall(last),
        "duration_s": (last - first) / 1e9,
    }


def list_snapshots(path: Path, limit: int = MAX_SNAPSHOTS) -> list[dict[str, Any]]:
    """The newest states of the machine, oldest first.

    Raises:
        StoreError: The file cannot be read.
    """
    with open_recording(path) as connection, store_errors(path):
        if not table_columns(connection, "system_snapshots"):
            return []
        rows = connection.execute(
            "SELECT timestamp, cpu_pct, mem_pct, mem_avail, swap_mb, load_avg FROM system_snapshots "
            "ORDER BY timestamp DESC LIMIT ?",
            (limit,),
        ).fetchall()
    names = ("cpu_percent", "mem_percent", "mem_avail_mb", "swap_mb", "load_avg")
    return [
        {"timestamp": format_wall(row[0]), **dict(zip(names, row[1:], strict=True))}
        for row in reversed(keep_typed(rows, (TIMES, *[float] * 5))[0])
    ]
