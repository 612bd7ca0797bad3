"""The tables a recording has, as this version writes them.

A superset of schema v0.10 by columns: tools of that generation read what they know and do not see the rest, and
``user_version`` stays 10 because they refuse anything newer. Every table carries the node, so files merge without
collisions. Times are Unix nanoseconds on the session's own clock (monotonic plus its first sample in
``clock_samples``); durations are nanoseconds.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from typing import Final

from ingero.model.events import HostOp, Source

USER_VERSION: Final = 10
"""``PRAGMA user_version`` of a file this version writes, and the newest it reads."""

_COUNTS: Final = """
  bucket INTEGER NOT NULL, source INTEGER NOT NULL, op INTEGER NOT NULL, pid INTEGER NOT NULL DEFAULT 0,
  count INTEGER NOT NULL DEFAULT 0, stored INTEGER NOT NULL DEFAULT 0,
  sum_dur INTEGER NOT NULL DEFAULT 0, min_dur INTEGER NOT NULL DEFAULT 0,
  max_dur INTEGER NOT NULL DEFAULT 0, sum_arg0 INTEGER NOT NULL DEFAULT 0,
  node TEXT NOT NULL DEFAULT '', errors INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
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
    "process_parents": """
  pid INTEGER NOT NULL, parent INTEGER NOT NULL, node TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (pid, node)
""",
    "process_gpus": """
  pid INTEGER NOT NULL, nodes TEXT NOT NULL, visible TEXT NOT NULL, device_order TEXT NOT NULL,
  node TEXT NOT NULL DEFAULT '', PRIMARY KEY (pid, nodes, visible, device_order, node)
""",
    "event_aggregates": _COUNTS,
    "event_aggregates_5s": _COUNTS,
    "latency_buckets": """
  bucket INTEGER NOT NULL, source INTEGER NOT NULL, op INTEGER NOT NULL, pid INTEGER NOT NULL,
  node TEXT NOT NULL, from_ns INTEGER NOT NULL, to_ns INTEGER NOT NULL, count INTEGER NOT NULL,
  PRIMARY KEY (bucket, source, op, pid, node, from_ns, to_ns)
""",
    "coverage": """
  bucket INTEGER NOT NULL, node TEXT NOT NULL, source INTEGER NOT NULL,
  seen INTEGER NOT NULL DEFAULT 0, stored INTEGER NOT NULL DEFAULT 0,
  sampled_out INTEGER NOT NULL DEFAULT 0, lost INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (bucket, node, source)
""",
    "unwritten": """
  bucket INTEGER NOT NULL, node TEXT NOT NULL, source INTEGER NOT NULL, op INTEGER NOT NULL,
  cause TEXT NOT NULL, count INTEGER NOT NULL DEFAULT 0,
  PRIMARY KEY (bucket, node, source, op, cause)
""",
    "recordings": """
  id TEXT NOT NULL, node TEXT NOT NULL, events INTEGER NOT NULL DEFAULT -1,
  calls INTEGER NOT NULL DEFAULT -1, PRIMARY KEY (id, node)
""",
    "recording_names": """
  pid INTEGER NOT NULL, name TEXT NOT NULL, seen_at INTEGER NOT NULL DEFAULT 0,
  node TEXT NOT NULL DEFAULT '', recording TEXT NOT NULL, PRIMARY KEY (pid, node, recording)
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
    "unprobed": """
  pid INTEGER NOT NULL, path TEXT NOT NULL, reason TEXT NOT NULL, since INTEGER NOT NULL,
  until INTEGER NOT NULL DEFAULT 0, node TEXT NOT NULL DEFAULT '',
  PRIMARY KEY (pid, path, since, node)
""",
    "sources": "id INTEGER PRIMARY KEY, name TEXT NOT NULL, description TEXT NOT NULL",
    "ops": """
  source_id INTEGER NOT NULL, op_id INTEGER NOT NULL, name TEXT NOT NULL,
  description TEXT NOT NULL, PRIMARY KEY (source_id, op_id)
""",
    "schema_info": "key TEXT PRIMARY KEY, value TEXT NOT NULL",
}

OCTAVES: Final = (
    "SELECT bucket, source, op, pid, node, 1 << log2_ns AS from_ns, 1 << (log2_ns + 1) AS to_ns, count "
    "FROM latency_histograms"
)
"""Rows of ``latency_buckets`` out of the table that earlier versions of this program wrote: whole octaves."""

FORKED: Final = (
    "SELECT arg1 AS pid, pid AS parent, node FROM events "  # noqa: S608 - own numbers
    f"WHERE source = {Source.HOST:d} AND op = {HostOp.FORK:d} AND arg1 IS NOT NULL AND pid IS NOT NULL "
    "ORDER BY rowid"
)
"""Rows of ``process_parents`` out of the events of a file that has no such table."""

FILL_PARENTS: Final = f"INSERT OR REPLACE INTO process_parents {FORKED}"

INDEXES: Final = (
    "CREATE INDEX IF NOT EXISTS idx_events_timestamp ON events(timestamp)",
    "CREATE INDEX IF NOT EXISTS idx_chains_detected_at ON causal_chains(detected_at)",
)

TIMED_TABLES: Final = (
    ("events", "timestamp"),
    ("annotations", "timestamp"),
    ("system_snapshots", "timestamp"),
    ("clock_samples", "wall_ns"),
)
"""Tables of moments that grow with time, and the column that says when."""

BUCKETED_TABLES: Final = (
    "event_aggregates",
    "event_aggregates_5s",
    "latency_buckets",
    "coverage",
    "unwritten",
)
"""Tables of counts by minute."""

CARRIED_OVER: Final = (
    (
        "SELECT * FROM sessions WHERE id = (SELECT max(id) FROM sessions)",
        "INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
    ),
    ("SELECT * FROM process_names", "INSERT INTO process_names VALUES (?, ?, ?, ?)"),
    ("SELECT * FROM process_parents", "INSERT INTO process_parents VALUES (?, ?, ?)"),
    ("SELECT * FROM process_gpus", "INSERT INTO process_gpus VALUES (?, ?, ?, ?, ?)"),
    ("SELECT * FROM unprobed WHERE until = 0", "INSERT INTO unprobed VALUES (?, ?, ?, ?, ?, ?)"),
    ("SELECT * FROM cgroup_metadata", "INSERT INTO cgroup_metadata VALUES (?, ?, ?, ?, ?, ?)"),
)
"""What a recording that goes on in a new file takes along: how to read it and how to write it."""

SCHEMA_INFO: Final[dict[str, str]] = {
    "version": "0.10",
    "timestamp_unit": "nanoseconds (Unix epoch)",
    "duration_unit": "nanoseconds",
    "timestamp_note": "entry for calls; completion for host, io, tcp and net rows (start = timestamp - duration)",
    "arg0_note": "bytes for allocations and copies, function for launches, handle for synchronisations, sectors for io",
    "unprobed_note": "libraries whose calls are in no table between since and until, or only as the reason says; an "
    "until of 0 is the end of the recording",
    "process_parents_note": "the last parent of each pid, from its fork or from /proc when its parent was seen first; "
    "of a pid that was another process's in another of the recordings that were merged, one of the parents",
    "process_gpus_note": "nodes are the NVIDIA devices in a process's /dev, by commas; visible is its "
    "CUDA_VISIBLE_DEVICES, 'unset' without one; several rows of a process: it was shown others after an exec, or "
    "its number was given to another",
    "latency_note": "latency_buckets counts every call whose duration is in [from_ns, to_ns), per minute",
    "aggregates_note": "count is every call, stored is rows kept, lost is rows that should have been kept and "
    "were not; all are added to",
}


def table_exists(connection: sqlite3.Connection, name: str) -> bool:
    """Whether a database has a table of this name."""
    sql = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return connection.execute(sql, (name,)).fetchone() is not None


def create_tables(
    connection: sqlite3.Connection, sources: Mapping[int, str], ops: Mapping[int, Mapping[int, str]]
) -> None:
    """Make an empty database a recording; one that already is gets the tables that it lacks.

    Args:
        connection: Open for writing, outside a transaction.
        sources: Source names by code, for the ``sources`` look-up table.
        ops: Operation names by source and code, for ``ops``.
    """
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
    connection.execute("PRAGMA journal_mode = WAL")
    has_parents = table_exists(connection, "process_parents")
    for name, body in TABLES.items():
        connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({body})")
    if not has_parents:
        connection.execute(FILL_PARENTS)
    for statement in INDEXES:
        connection.execute(statement)
    if table_exists(connection, "latency_histograms"):
        connection.execute(f"INSERT INTO latency_buckets {OCTAVES}")
        connection.execute("DROP TABLE latency_histograms")
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


def find_outdated(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Tables that another version made: a column or a key of `TABLES` is missing. What is absent is not outdated."""
    with closing(sqlite3.connect(":memory:")) as wanted:
        for name, body in TABLES.items():
            wanted.execute(f"CREATE TABLE {name} ({body})")
        outdated = []
        for name in TABLES:
            there, ours = _describe(connection, name), _describe(wanted, name)
            if there and any(there.get(column) != key for column, key in ours.items()):
                outdated.append(name)
    return tuple(outdated)


def _describe(connection: sqlite3.Connection, table: str) -> dict[str, tuple[str, int]]:
    """Columns by name: whether an integer key, and the place in the primary key."""
    rows = connection.execute("SELECT name, type, pk FROM pragma_table_info(?)", (table,))
    return {name: (str(kind).upper() if pk else "", int(pk)) for name, kind, pk in rows}
