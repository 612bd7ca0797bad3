"""A recording in memory: what was seen, by whom, and how much of it was kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.model.events import EVENT, Events

AGGREGATE: Final = np.dtype([
    ("bucket_ns", "<i8"),  # Unix time, floored to the minute
    ("node", "<u2"),  # index into Recording.nodes
    ("source", "u1"),
    ("op", "u1"),
    ("pid", "<i4"),
    ("count", "<i8"),  # every call, stored or not
    ("stored", "<i8"),
    ("sum_duration_ns", "<i8"),
    ("min_duration_ns", "<i8"),
    ("max_duration_ns", "<i8"),
    ("sum_arg0", "<i8"),  # bytes or sectors where arg0 is a size, else 0
    ("errors", "<i8"),
])
"""Exact counts of one operation of one process in one minute."""

COVERAGE: Final = np.dtype([
    ("bucket_ns", "<i8"),
    ("node", "<u2"),
    ("source", "u1"),
    ("seen", "<i8"),
    ("stored", "<i8"),
    ("sampled_out", "<i8"),
    ("lost", "<i8"),
])
"""What became of the records of one source in one minute: ``stored + sampled_out + lost == seen``."""

SNAPSHOT: Final = np.dtype([
    ("wall_ns", "<i8"),
    ("node", "<u2"),
    ("cpu_pct", "<f8"),
    ("mem_pct", "<f8"),
    ("mem_available_mib", "<i8"),
    ("swap_mib", "<i8"),
    ("load1", "<f8"),
])
"""The whole machine at one moment. Irregular: never assume one per second."""

HISTOGRAM: Final = np.dtype([
    ("bucket_ns", "<i8"),
    ("node", "<u2"),
    ("source", "u1"),
    ("op", "u1"),
    ("pid", "<i4"),
    ("log2_ns", "u1"),  # durations in [2**log2_ns, 2**(log2_ns+1)); bin 0 also holds 0 ns
    ("count", "<i8"),
])
"""Exact latency histogram of one operation of one process in one minute."""


@dataclass(frozen=True, slots=True)
class Session:
    """One run of the agent on one node. Empty text and 0 mean that the recording does not say."""

    node: str
    started_wall_ns: int
    stopped_wall_ns: int = 0
    gpu_model: str = ""
    n_cpus: int = 0
    mem_total_mib: int = 0
    kernel: str = ""
    agent_version: str = ""
    flags: str = ""


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """What the launcher told a process about its place in the job; -1 where it did not say."""

    rank: int = -1
    local_rank: int = -1
    world_size: int = -1


def _no_rows(dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    return np.empty(0, dtype)


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything the causal engine reads.

    Attributes:
        events: Rows of EVENT sorted by start_ns, stable.
        nodes: Node names; ``events["node"]`` indexes them. A recording without nodes has one: ``""``.
        process_names: Name by (node index, pid or tid).
        ranks: Place in the job by (node index, pid).
        aggregates: Rows of AGGREGATE; empty when the recording keeps none.
        coverage: Rows of COVERAGE; empty when the recording keeps none.
        snapshots: Rows of SNAPSHOT by time.
        histograms: Rows of HISTOGRAM.
        sessions: Runs of the agent.
        n_events_stored: Rows in the file, whatever the filter of this load.
        is_truncated: The load reached its row limit and kept the newest rows.
        has_gpu_ids: The recorder read which device each call went to; older ones wrote 0 for all.
    """

    events: Events = field(default_factory=lambda: _no_rows(EVENT))
    nodes: tuple[str, ...] = ("",)
    process_names: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ranks: Mapping[tuple[int, int], ProcessRank] = field(default_factory=dict)
    aggregates: npt.NDArray[np.void] = field(default_factory=lambda: _no_rows(AGGREGATE))
    coverage: npt.NDArray[np.void] = field(default_factory=lambda: _no_rows(COVERAGE))
    snapshots: npt.NDArray[np.void] = field(default_factory=lambda: _no_rows(SNAPSHOT))
    histograms: npt.NDArray[np.void] = field(default_factory=lambda: _no_rows(HISTOGRAM))
    sessions: tuple[Session, ...] = ()
    n_events_stored: int = 0
    is_truncated: bool = False
    has_gpu_ids: bool = True

    def process_name(self, node: int, pid: int) -> str:
        """Name of a process or thread, or ``pid N`` when the recording does not know it."""
        return self.process_names.get((node, pid)) or f"pid {pid}"

    @property
    def window_ns(self) -> tuple[int, int]:
        """First start and last end of the events, Unix time; (0, 0) without events."""
        if not len(self.events):
            return 0, 0
        ends = self.events["start_ns"] + self.events["duration_ns"]
        return int(self.events["start_ns"].min()), int(ends.max())
