"""Arrays to SQL parameters, and the statements that take them. Pure: nothing here opens a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray, Records
from ingero.model.events import EventFlag, Events, HostOp, Source, is_stored_at_end
from ingero.model.gpu_view import GpuView
from ingero.model.recording import ProcessRank
from ingero.units import NS_PER_S

BUCKET_NS: Final = 60 * NS_PER_S

_EVENT_COLUMNS: Final = (
    "pid", "tid", "source", "op", "duration_ns", "gpu_id", "arg0", "arg1", "ret_code", "stack_hash",
    "cgroup_id", "arg2", "arg3", "reason", "other_pid", "wait_ns", "flags", "weight",
)  # fmt: skip
INSERT_EVENT: Final = (
    "INSERT INTO events (id, timestamp, node, rank, local_rank, world_size, pid, tid, source, op, duration, "
    "gpu_id, arg0, arg1, ret_code, stack_hash, cgroup_id, arg2, arg3, reason, other_pid, wait_ns, flags, weight) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
ADD_AGGREGATE: Final = (
    "INSERT INTO event_aggregates (bucket, source, op, pid, node, count, stored, sum_dur, min_dur, max_dur, "
    "sum_arg0, errors, lost) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (bucket, source, op, pid, node) DO UPDATE SET "
    "min_dur = CASE WHEN excluded.count = 0 THEN min_dur WHEN count = 0 THEN excluded.min_dur "
    "ELSE min(min_dur, excluded.min_dur) END, "
    "max_dur = max(max_dur, excluded.max_dur), count = count + excluded.count, "
    "stored = stored + excluded.stored, sum_dur = sum_dur + excluded.sum_dur, "
    "sum_arg0 = sum_arg0 + excluded.sum_arg0, errors = errors + excluded.errors, lost = lost + excluded.lost"
)
ADD_COVERAGE: Final = (
    "INSERT INTO coverage (bucket, node, source, seen, stored, sampled_out, lost) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (bucket, node, source) DO UPDATE SET "
    "seen = seen + excluded.seen, stored = stored + excluded.stored, "
    "sampled_out = sampled_out + excluded.sampled_out, lost = lost + excluded.lost"
)
ADD_UNWRITTEN: Final = (
    "INSERT INTO unwritten (bucket, node, source, op, cause, count) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (bucket, node, source, op, cause) DO UPDATE SET count = count + excluded.count"
)
ADD_HISTOGRAM: Final = (
    "INSERT INTO latency_buckets (bucket, source, op, pid, node, from_ns, to_ns, count) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (bucket, source, op, pid, node, from_ns, to_ns) "
    "DO UPDATE SET count = count + excluded.count"
)
INSERT_PARENT: Final = "INSERT OR REPLACE INTO process_parents (pid, parent, node) VALUES (?, ?, ?)"
INSERT_SNAPSHOT: Final = (
    "INSERT OR IGNORE INTO system_snapshots "
    "(timestamp, cpu_pct, mem_pct, mem_avail, swap_mb, load_avg, node) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
INSERT_ANNOTATION: Final = (
    "INSERT INTO annotations (timestamp, labels, pid, start_time, span_start, span_end, peer_uid, peer_gid, "
    "peer_pid, node) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
INSERT_SESSION: Final = (
    "INSERT INTO sessions (started_at, stopped_at, gpu_model, cpu_cores, mem_total, kernel, ingero_ver, "
    "flags, node) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
)

_NO_RANK: Final = (None, None, None)


def stored_timestamps(events: Events) -> IntArray:
    """The ``timestamp`` column of rows: entry for calls, completion for host, io, tcp and net."""
    at_end = is_stored_at_end(events["source"])
    stamps: IntArray = events["start_ns"] + np.where(at_end, events["duration_ns"], 0)
    return stamps


def event_rows(
    events: Events, node: str, first_id: int, ranks: Mapping[int, ProcessRank]
) -> Iterator[tuple[object, ...]]:
    """Parameters of INSERT_EVENT for each row, with ids ``node:n`` counted from `first_id`."""
    places = {
        pid: tuple(
            None if value < 0 else value for value in (at.rank, at.local_rank, at.world_size)
        )
        for pid, at in ranks.items()
    }
    stamps = stored_timestamps(events).tolist()
    columns = zip(*(events[name].tolist() for name in _EVENT_COLUMNS), strict=True)
    for i, (stamp, row) in enumerate(zip(stamps, columns, strict=True), start=first_id):
        yield (f"{node}:{i}", stamp, node, *places.get(row[0], _NO_RANK), *row)


def find_parents(events: Events) -> dict[int, int]:
    """Parent by child, of the forks among some rows."""
    is_fork = (events["source"] == Source.HOST) & (events["op"] == HostOp.FORK)
    forks = events[is_fork]
    return dict(zip(forks["arg1"].tolist(), forks["pid"].tolist(), strict=True))


def parent_rows(parents: Mapping[int, int], node: str) -> list[tuple[object, ...]]:
    """Parameters of INSERT_PARENT."""
    return [(pid, parent, node) for pid, parent in parents.items()]


def count_by_source(events: Events) -> dict[tuple[int, int], int]:
    """Rows by (minute, source)."""
    buckets = stored_timestamps(events) // BUCKET_NS * BUCKET_NS
    keys, counts = np.unique(
        np.stack([buckets, events["source"].astype(np.int64)], axis=1), axis=0, return_counts=True
    )
    return {(int(b), int(s)): int(n) for (b, s), n in zip(keys, counts, strict=True)}


def count_by_operation(events: Events) -> dict[tuple[int, int, int], int]:
    """Rows by (minute, source, operation)."""
    columns = [
        stored_timestamps(events) // BUCKET_NS * BUCKET_NS,
        *(events[name].astype(np.int64) for name in ("source", "op")),
    ]
    keys, counts = np.unique(np.stack(columns, axis=1), axis=0, return_counts=True)
    return {(b, s, o): n for (b, s, o), n in zip(keys.tolist(), counts.tolist(), strict=True)}


def count_by_kind(events: Events) -> dict[tuple[int, int, int, int], int]:
    """Rows by (minute, source, op, pid), without calls in flight, which no count holds."""
    events = events[(events["flags"] & EventFlag.IN_FLIGHT) == 0]
    buckets = stored_timestamps(events) // BUCKET_NS * BUCKET_NS
    keys, counts = np.unique(
        np.stack([buckets, *(events[n].astype(np.int64) for n in ("source", "op", "pid"))], axis=1),
        axis=0,
        return_counts=True,
    )
    return {
        (int(b), int(s), int(o), int(p)): int(n)
        for (b, s, o, p), n in zip(keys, counts, strict=True)
    }


def stored_rows(
    n_stored: Mapping[tuple[int, int, int, int], int], node: str
) -> list[tuple[object, ...]]:
    """Parameters of ADD_AGGREGATE that add to ``stored`` alone."""
    return [(*key, node, 0, n, 0, 0, 0, 0, 0, 0) for key, n in n_stored.items()]


def lost_rows(
    n_lost: Mapping[tuple[int, int, int, int], int], node: str
) -> list[tuple[object, ...]]:
    """Parameters of ADD_AGGREGATE that add to ``lost`` alone."""
    return [(*key, node, 0, 0, 0, 0, 0, 0, 0, n) for key, n in n_lost.items()]


def aggregate_rows(aggregates: Records, node: str) -> list[tuple[object, ...]]:
    """Parameters of ADD_AGGREGATE that add everything but ``stored``."""
    names = (
        "bucket_ns", "source", "op", "pid", "count", "sum_duration_ns", "min_duration_ns",
        "max_duration_ns", "sum_arg0", "errors", "lost",
    )  # fmt: skip
    columns = zip(*(aggregates[name].tolist() for name in names), strict=True)
    return [(b, s, o, p, node, count, 0, *rest) for b, s, o, p, count, *rest in columns]


_UNSET: Final = "unset"


def write_view(view: GpuView) -> tuple[str, str, str]:
    """The columns of ``process_gpus`` that say what a process is shown."""
    return ",".join(view.nodes), _UNSET if view.visible is None else view.visible, view.order


def read_view(nodes: str, visible: str, order: str) -> GpuView:
    """What these columns say."""
    shown = tuple(nodes.split(",")) if nodes else ()
    return GpuView(shown, None if visible == _UNSET else visible, order)
