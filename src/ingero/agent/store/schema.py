"""The tables a recording has, as this version writes them.

A superset of schema v0.10 by columns: tools of that generation read what they know and do not see the rest, and
``user_version`` stays 10 because they refuse anything newer. Every table carries the node, so files merge without
collisions. Times are Unix nanoseconds on the session's own clock (monotonic plus its first sample in
``clock_samples``); durations are nanoseconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Final

USER_VERSION: Final = 10
"""``PRAGMA user_version`` of a file this version writes, and the newest it reads."""

_COUNTS: Final = """
  bucket INTEGER NOT NULL, source INTEGER NOT NULL, op INTEGER NOT NULL, pid INTEGER NOT NULL DEFAULT 0,
  count INTEGER NOT NULL DEFAULT 0, stored INTEGER NOT NULL DEFAULT 0,
  sum_dur INTEGER NOT NULL DEFAULT 0, min_dur INTEGER NOT NULL DEFAULT 0,
  max_dur INTEGER NOT NULL DEFAULT 0, sum_arg0 INTEGER NOT NULL DEFAULT 0,
  node TEXT NOT NULL DEFAULT '', errors INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (bucket, source, op, pid, node)
"""

TABLES: Final[dict[str, str]] = {
    "events": """
  id TEXT PRIMARY KEY, timestamp INTEGER NOT NULL, pid INTEGER NOT NULL, tid INTEGER NOT NULL,
  source INTEGER NOT NULL, op INTEGER NOT NULL, duration INTEGER NOT NULL,
  gpu_id INTEGER NOT NULL DEFAULT 0, arg0 INTEGER NOT NULL DEFAULT 0, arg1 INTEGER NOT NULL DEFAULT 0,
  ret_code INTEGER NOT NULL DEFAULT 0, stack_hash INTEGER NOT NULL DEFAULT 0,
  node TEXT NOT NULL DEFAULT '', rank INTEGER, local_rank INTEGER, world_size INTEGER,
  comm TEXT NOT NULL DEFAULT '', stack_ips TEXT NOT NULL DEFAULT '',
  cgroup_id INTEGER NOT NULL DEFAULT 0, arg2 INTEGER NOT NULL DEFAULT 0,
  arg3 INTEGER NOT NULL DEFAULT 0, reason INTEGER NOT NULL DEFAULT 0,
  other_pid INTEGER NOT NULL DEFAULT 0, wait_ns INTEGER NOT NULL DEFAULT 0,
  flags INTEGER NOT NULL DEFAULT 0, weight INTEGER NOT NULL DEFAULT 1
""",
    "stack_traces": "hash INTEGER PRIMARY KEY, ips TEXT NOT NULL, frames TEXT NOT NULL DEFAULT ''",
    "causal_chains": """
  id TEXT PRIMARY KEY, detected_at INTEGER NOT NULL, severity TEXT NOT NULL, summary TEXT NOT NULL,
  root_cause TEXT NOT NULL, explanation TEXT NOT NULL, recommendations TEXT NOT NULL DEFAULT '',
  cuda_op TEXT NOT NULL DEFAULT '', cuda_p99_us INTEGER NOT NULL DEFAULT 0,
  cuda_p50_us INTEGER NOT NULL DEFAULT 0, tail_ratio REAL NOT NULL DEFAULT 0,
  timeline TEXT NOT NULL DEFAULT '', node TEXT NOT NULL DEFAULT ''
""",
    "system_snapshots": """
  id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp INTEGER NOT NULL, cpu_pct REAL NOT NULL,
  mem_pct REAL NOT NULL, mem_avail INTEGER NOT NULL, swap_mb INTEGER NOT NULL,
  load_avg REAL NOT NULL, node TEXT NOT NULL DEFAULT '', UNIQUE (timestamp, node)
""",
    "sessions": """
  id INTEGER PRIMARY KEY AUTOINCREMENT, started_at INTEGER NOT NULL,
  stopped_at INTEGER NOT NULL DEFAULT 0, gpu_model TEXT NOT NULL DEFAULT '',
  gpu_driver TEXT NOT NULL DEFAULT '', cpu_model TEXT NOT NULL DEFAULT '',
  cpu_cores INTEGER NOT NULL DEFAULT 0, mem_total INTEGER NOT NULL DEFAULT 0,
  kernel TEXT NOT NULL DEFAULT '', os_release TEXT NOT NULL DEFAULT '',
  cuda_ver TEXT NOT NULL DEFAULT '', python_ver TEXT NOT NULL DEFAULT '',
  ingero_ver TEXT NOT NULL DEFAULT '', pid_filter TEXT NOT NULL DEFAULT '',
  flags TEXT NOT NULL DEFAULT '', node TEXT NOT NULL DEFAULT '', rank INTEGER,
  local_rank INTEGER, world_size INTEGER
""",
    "process_names": """
  pid INTEGER NOT NULL, name TEXT NOT NULL, seen_at INTEGER NOT NULL DEFAULT 0,
  node TEXT NOT NULL DEFAULT '', PRIMARY KEY (pid, node)
""",
    "event_aggregates": _COUNTS,
    "event_aggregates_5s": _COUNTS,
    "latency_histograms": """
  bucket INTEGER NOT NULL, source INTEGER NOT NULL, op INTEGER NOT NULL, pid INTEGER NOT NULL,
  node TEXT NOT NULL, log2_ns INTEGER NOT NULL, count INTEGER NOT NULL,
  PRIMARY KEY (bucket, source, op, pid, node, log2_ns)
""",
    "coverage": """
  bucket INTEGER NOT NULL, node TEXT NOT NULL, source INTEGER NOT NULL,
  seen INTEGER NOT NULL DEFAULT 0, stored INTEGER NOT NULL DEFAULT 0,
  sampled_out INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (bucket, node, source)
""",
    "clock_samples": """
  node TEXT NOT NULL, mono_ns INTEGER NOT NULL, wall_ns INTEGER NOT NULL,
  PRIMARY KEY (node, mono_ns)
""",
    "cgroup_metadata": """
  cgroup_id INTEGER NOT NULL, container_id TEXT NOT NULL DEFAULT '',
  cgroup_path TEXT NOT NULL DEFAULT '', pod_name TEXT NOT NULL DEFAULT '',
  namespace TEXT NOT NULL DEFAULT '', node TEXT NOT NULL DEFAULT '', PRIMARY KEY (cgroup_id, node)
""",
    "cgroup_schedstat": """
  cgroup_id INTEGER NOT NULL, p99_off_cpu INTEGER NOT NULL, total_off_cpu INTEGER NOT NULL,
  event_count INTEGER NOT NULL, window_start INTEGER NOT NULL DEFAULT 0,
  window_end INTEGER NOT NULL DEFAULT 0, node TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (cgroup_id, window_end, node)
""",
    "annotations": """
  id INTEGER PRIMARY KEY AUTOINCREMENT, timestamp INTEGER NOT NULL, labels TEXT NOT NULL,
  pid INTEGER NOT NULL DEFAULT 0, start_time INTEGER NOT NULL DEFAULT 0,
  span_start INTEGER NOT NULL DEFAULT 0, span_end INTEGER NOT NULL DEFAULT 0,
  peer_uid INTEGER NOT NULL DEFAULT 0, peer_gid INTEGER NOT NULL DEFAULT 0,
  peer_pid INTEGER NOT NULL DEFAULT 0, node TEXT NOT NULL DEFAULT ''
""",
    "sources": "id INTEGER PRIMARY KEY, name TEXT NOT NULL, description TEXT NOT NULL",
    "ops": """
  source_id INTEGER NOT NULL, op_id INTEGER NOT NULL, name TEXT NOT NULL,
  description TEXT NOT NULL, PRIMARY KEY (source_id, op_id)
""",
    "schema_info": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
}

INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS idx_events_timestamp ON events(timestamp)",
    "CREATE INDEX IF NOT EXISTS idx_chains_detected_at ON causal_chains(detected_at)",
)

TIMED_TABLES: Final = (
    ("events", "timestamp"),
    ("annotations", "timestamp"),
    ("system_snapshots", "timestamp"),
    ("event_aggregates", "bucket"),
    ("event_aggregates_5s", "bucket"),
    ("latency_histograms", "bucket"),
    ("coverage", "bucket"),
)
"""Tables that grow with time, and the column that says when."""

CARRIED_OVER: Final = (
    (
        "SELECT * FROM sessions WHERE id = (SELECT max(id) FROM sessions)",
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ),
    ("SELECT * FROM process_names", "INSERT INTO process_names VALUES (?, ?, ?, ?)"),
    ("SELECT * FROM cgroup_metadata", "INSERT INTO cgroup_metadata VALUES (?, ?, ?, ?, ?, ?)"),
)
"""What a recording that goes on in a new file takes along: how to read it and how to write it."""

SCHEMA_INFO: Final[dict[str, str]] = {
    "version": "0.10",
    "timestamp_unit": "nanoseconds (Unix epoch)",
    "duration_unit": "nanoseconds",
    "timestamp_note": "entry for calls; completion for host, io, tcp and net rows (start = timestamp - duration)",
    "arg0_note": "bytes for allocations and copies, function for launches, handle for synchronisations, sectors for io",
    "aggregates_note": "count is every call, stored is rows kept; both are added to, never replaced",
}


def create_tables(
    connection: sqlite3.Connection, sources: Mapping[int, str], ops: Mapping[int, Mapping[int, str]]
) -> None:
    """Make an empty database a recording; on one that already is, nothing changes.

    Args:
        connection: Open for writing, outside a transaction.
        sources: Source names by code, for the ``sources`` look-up table.
        ops: Operation names by source and code, for ``ops``.
    """
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    for name, body in TABLES.items():
        connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({body})")
    for statement in INDEXES:
        connection.execute(statement)
    connection.executemany(
        "INSERT OR IGNORE INTO sources VALUES (?, ?, '')",
        [(code, name.upper()) for code, name in sources.items()],
    )
    connection.executemany(
        "INSERT OR IGNORE INTO ops VALUES (?, ?, ?, '')",
        [(source, op, name) for source, names in ops.items() for op, name in names.items()],
    )
    connection.executemany("INSERT OR IGNORE INTO schema_info VALUES (?, ?)", SCHEMA_INFO.items())
    connection.execute(f"PRAGMA user_version = {USER_VERSION}")
    connection.commit()
