"""What a recording is, from a few counts: quick on any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingero.agent.queries.window import format_wall
from ingero.agent.store.files import open_recording, store_errors, table_columns
from ingero.model.untrusted import clean

_MAX_SNAPSHOTS = 600


def read_overview(path: Path) -> dict[str, Any]:
    """Size, span, nodes, sessions and the machine's latest state; what the file does not say is left out.

    Raises:
        StoreError: The file cannot be read.
    """
    with open_recording(path) as connection, store_errors(path):
        first, last = connection.execute(
            "SELECT min(timestamp), max(timestamp) FROM events"
        ).fetchone()
        (rows,) = connection.execute("SELECT count(*) FROM events").fetchone()
        found: dict[str, Any] = {
            "file": path.name,
            "event_count": rows,
            "chain_count": 0,
            "session_count": 0,
        }
        if first is not None:
            found |= {
                "first": format_wall(first),
                "last": format_wall(last),
                "duration_s": (last - first) / 1e9,
            }
        sessions = table_columns(connection, "sessions")
        if sessions:
            row = connection.execute(
                "SELECT gpu_model, gpu_driver, kernel, cpu_cores FROM sessions ORDER BY started_at DESC LIMIT 1"
            ).fetchone()
            (found["session_count"],) = connection.execute(
                "SELECT count(*) FROM sessions"
            ).fetchone()
            if row:
                found["gpu"] = {"model": clean(row[0]), "driver_version": clean(row[1])}
                found["host"] = {"kernel": clean(row[2]), "cpus": row[3]}
        if table_columns(connection, "causal_chains"):
            (found["chain_count"],) = connection.execute(
                "SELECT count(*) FROM causal_chains"
            ).fetchone()
    return found


def list_snapshots(path: Path) -> list[dict[str, Any]]:
    """The machine's state over time, oldest first, at most the newest six hundred.

    Raises:
        StoreError: The file cannot be read.
    """
    with open_recording(path) as connection, store_errors(path):
        if not table_columns(connection, "system_snapshots"):
            return []
        rows = connection.execute(
            "SELECT timestamp, cpu_pct, mem_pct, mem_avail, swap_mb, load_avg FROM system_snapshots "
            "ORDER BY timestamp DESC LIMIT ?",
            (_MAX_SNAPSHOTS,),
        ).fetchall()
    names = ("cpu_percent", "mem_percent", "mem_avail_mb", "swap_mb", "load_avg")
    return [
        {"timestamp": format_wall(row[0]), **dict(zip(names, row[1:], strict=True))}
        for row in reversed(rows)
    ]
