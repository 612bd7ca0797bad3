"""The same workload as worse recordings hold it: sampled in the kernel, lost in a ring, cut off by a full disk.

The kernel's choice is that of ``choose()`` in ``bpf/include/ingero/counts.h``, call by call in the order in which
calls end. What the recorder leaves out of that is its own `ingero.agent.trace.thinning`. Counts are exact in every
variant: they are kept beside the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ingero.agent.trace.thinning import thin
from ingero.model.arrays import IntArray, Records
from ingero.model.events import EventFlag, Events, HostOp, Source, is_stored_at_end
from ingero.model.latency import HIST_BUCKETS, build_bucket_edges_ns
from ingero.model.operations import find_failures
from ingero.model.recording import AGGREGATE, COVERAGE, HISTOGRAM, Recording
from ingero.recording.causal.exact import operation_keys
from ingero.units import NS_PER_S

KEEP_FIRST: Final = 64
_SLOW_AFTER: Final = 32
_SLOW_RATIO: Final = 8
_MINUTE_NS: Final = 60 * NS_PER_S
_UNCOUNTED: Final = frozenset(
    (int(Source.HOST), int(op))
    for op in (HostOp.OOM_KILL, HostOp.EXEC, HostOp.EXIT, HostOp.FORK, HostOp.POD_RESTART,
               HostOp.POD_EVICTION, HostOp.POD_OOM_KILL)
)  # fmt: skip
"""Process life and what the orchestrator says: every record is delivered, none is counted by operation."""
_EXEMPLAR: Final = int(EventFlag.EXEMPLAR)
_SLOW: Final = int(EventFlag.SLOW)
Select = Callable[[Events], Events]


@dataclass(slots=True)
class _Count:
    """What the kernel remembers of one operation of one process."""

    seen: int = 0
    total_ns: int = 0
    pending: int = 0


def sample(
    events: Events, keep_one_in: int, never_sampled: Iterable[tuple[int, int]] = ()
) -> Events:
    """What the kernel hands over at a sampling rate: the first, the failed, the slow, and one in so many of the rest.

    Args:
        events: Every call, weight 1.
        keep_one_in: The rate.
        never_sampled: Kinds (source, op) of which every call becomes a record.

    Returns:
        The records, each with the calls that it stands for as its weight; in the order of `events`.
    """
    exact = set(never_sampled) | _UNCOUNTED
    counts: dict[int, _Count] = {}
    weights = np.zeros(len(events), np.int64)
    flags = events["flags"].copy()
    keys = operation_keys(events).tolist()
    ends = events["start_ns"] + events["duration_ns"]
    is_gpu = events["source"] == Source.GPU
    is_whole = (is_gpu | ((flags & EventFlag.IN_FLIGHT) != 0)).tolist()
    kinds = list(zip(events["source"].tolist(), events["op"].tolist(), strict=True))
    calls = list(zip(events["duration_ns"].tolist(), events["ret_code"].tolist(), strict=True))
    for i in np.argsort(ends, kind="stable").tolist():
        if is_whole[i] or kinds[i] in exact:
            weights[i] = 1
            continue
        weights[i], flag = _choose(counts.setdefault(keys[i], _Count()), *calls[i], keep_one_in)
        if flag:
            flags[i] |= flag
    kept = events.copy()
    kept["weight"], kept["flags"] = weights, flags
    return kept[weights > 0]


def _choose(count: _Count, duration_ns: int, ret_code: int, keep_one_in: int) -> tuple[int, int]:
    """Weight of a call's record, 0 for none, and what it says about why."""
    before = count.seen
    count.seen += 1
    is_slow = before >= _SLOW_AFTER and duration_ns > _SLOW_RATIO * (count.total_ns // before)
    count.total_ns += duration_ns
    if ret_code != 0 or before < KEEP_FIRST or is_slow:
        return 1, _EXEMPLAR | (_SLOW if is_slow else 0)
    count.pending += 1
    if count.pending < keep_one_in:
        return 0, 0
    weight, count.pending = count.pending, 0
    return weight, 0


def thin_seconds(events: Events) -> Events:
    """What the recorder stores of records.

    A few ordinary rows of each sampled kind in a second, with the weights of the others.
    """
    ends = events["start_ns"] + events["duration_ns"]
    batches = np.stack([events["node"].astype(np.int64), ends // NS_PER_S], axis=1)
    _, batch = np.unique(batches, axis=0, return_inverse=True)
    batch = batch.reshape(-1)
    parts = [thin(events[batch == i]) for i in range(int(batch.max(initial=-1)) + 1)]
    stored = np.concatenate(parts) if parts else events
    ordered: Events = stored[np.argsort(stored["start_ns"], kind="stable")]
    return ordered


def lose_bursts(events: Events, share: float = 0.05, seed: int = 1) -> Events:
    """What is left where a ring was full now and then: bursts of records are gone, with no trace in any weight."""
    random = np.random.default_rng(seed)
    n_burst = max(len(events) // 200, 1)
    n_bursts = max(round(share * len(events) / n_burst), 1)
    starts = random.integers(0, max(len(events) - n_burst, 1), n_bursts)
    is_lost = np.zeros(len(events), bool)
    for start in starts.tolist():
        is_lost[start : start + n_burst] = True
    return events[~is_lost]


def fill_disk(events: Events, share: float = 0.6) -> Events:
    """What is left where the disk took no row after so much of the time."""
    first, last = int(events["start_ns"].min()), int(events["start_ns"].max())
    return events[events["start_ns"] <= first + share * (last - first)]


def degrade(exact: Recording, select: Select) -> Recording:
    """A recording with every call, as a worse one: chosen rows, and the counts of all."""
    every = exact.events
    kept = select(every) if len(every) else every
    ended = every[(every["flags"] & EventFlag.IN_FLIGHT) == 0]
    stored = kept[(kept["flags"] & EventFlag.IN_FLIGHT) == 0]
    last_ns = int((every["start_ns"] + every["duration_ns"]).max(initial=0))
    sessions = tuple(replace(s, stopped_wall_ns=last_ns) for s in exact.sessions)
    return replace(
        exact,
        events=kept,
        aggregates=_build_aggregates(ended, stored),
        histograms=_build_histograms(ended),
        coverage=_build_coverage(ended, stored),
        sessions=sessions,
        n_events_stored=len(kept),
    )


def _minutes(events: Events) -> IntArray:
    at_end = is_stored_at_end(events["source"])
    stamps = events["start_ns"] + np.where(at_end, events["duration_ns"], 0)
    minutes: IntArray = stamps // _MINUTE_NS * _MINUTE_NS
    return minutes


def _counted(events: Events) -> Events:
    kinds = events["source"].astype(np.int64) << 8 | events["op"]
    uncounted = [source << 8 | op for source, op in _UNCOUNTED]
    counted: Events = events[~np.isin(kinds, uncounted) & (events["source"] != Source.GPU)]
    return counted


def _build_aggregates(ended: Events, stored: Events) -> Records:
    every, kept = _counted(ended), _counted(stored)
    if not len(every):
        return np.zeros(0, AGGREGATE)
    noted = Counter(zip(_minutes(kept).tolist(), operation_keys(kept).tolist(), strict=True))
    minutes, keys = _minutes(every), operation_keys(every)
    order = np.lexsort((keys, minutes))
    every, minutes, keys = every[order], minutes[order], keys[order]
    is_first = np.diff(minutes, prepend=minutes[0] - 1) != 0
    is_first |= np.diff(keys, prepend=keys[0] - 1) != 0
    firsts = np.flatnonzero(is_first)
    failed = find_failures(every["source"], every["op"], every["ret_code"]).astype(np.int64)
    rows = np.zeros(len(firsts), AGGREGATE)
    for name in ("node", "source", "op", "pid"):
        rows[name] = every[name][firsts]
    rows["bucket_ns"], rows["count"] = minutes[firsts], np.diff(firsts, append=len(every))
    pairs = zip(minutes[firsts].tolist(), keys[firsts].tolist(), strict=True)
    rows["stored"] = [noted[pair] for pair in pairs]
    rows["sum_duration_ns"] = np.add.reduceat(every["duration_ns"], firsts)
    rows["min_duration_ns"] = np.minimum.reduceat(every["duration_ns"], firsts)
    rows["max_duration_ns"] = np.maximum.reduceat(every["duration_ns"], firsts)
    rows["errors"] = np.add.reduceat(failed, firsts)
    return rows


def _build_histograms(ended: Events) -> Records:
    every = _counted(ended)
    edges = build_bucket_edges_ns().astype(np.int64)
    buckets = np.searchsorted(edges, every["duration_ns"], "right") - 1
    buckets = np.clip(buckets, 0, HIST_BUCKETS - 1)
    keys = np.stack([_minutes(every), operation_keys(every), buckets], axis=1)
    groups, counts = np.unique(keys, axis=0, return_counts=True)
    rows = np.zeros(len(groups), HISTOGRAM)
    rows["bucket_ns"], rows["count"] = groups[:, 0], counts
    rows["node"], rows["pid"] = groups[:, 1] >> 48, groups[:, 1] >> 16 & 0xFFFF_FFFF
    rows["source"], rows["op"] = groups[:, 1] >> 8 & 0xFF, groups[:, 1] & 0xFF
    rows["from_ns"], rows["to_ns"] = edges[groups[:, 2]], edges[groups[:, 2] + 1]
    return rows


def _build_coverage(ended: Events, stored: Events) -> Records:
    pairs = sorted(set(zip(ended["node"].tolist(), ended["source"].tolist(), strict=True)))
    rows = np.zeros(len(pairs), COVERAGE)
    for row, (node, source) in zip(rows, pairs, strict=True):
        n_seen, n_kept = (
            int(((part["node"] == node) & (part["source"] == source)).sum())
            for part in (ended, stored)
        )
        row["bucket_ns"] = _minutes(ended)[0]
        row["node"], row["source"], row["seen"], row["stored"] = node, source, n_seen, n_kept
        row["sampled_out"] = n_seen - n_kept
    return rows
