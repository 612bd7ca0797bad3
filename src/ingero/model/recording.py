"""A recording in memory: what was seen, by whom, and how much of it was kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.model.arrays import IntArray, Records
from ingero.model.events import EVENT, Events
from ingero.model.gpu_view import GpuView
from ingero.model.untrusted import clean

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
    # Calls that should have had a row: a full ring, queue or disk; 0 where the recording does not say.
    ("lost", "<i8"),
])
"""Exact counts of one operation of one process in one minute.

Added up over a recording that nothing was pruned from, ``count == stored + lost + sampled out``, and of kinds that are
never sampled nothing is sampled out (`ingero.model.sampling`). Calls in flight are in none of them. Of one minute the
sum may be off by the calls of a second: a call is counted when it is read and stored under its own time.
"""

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
    ("from_ns", "<i8"),  # durations from here, inclusive
    ("to_ns", "<i8"),  # to here, exclusive
    ("count", "<i8"),
])
"""Exact latency histogram of one operation of one process in one minute."""


_MAX_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Unwritten:
    """Rows that were meant to be stored and are not, of one source and one cause."""

    node: str
    source: int
    cause: str
    n_rows: int


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
    """A process's place in the job, from its launcher; -1 where it did not say."""

    rank: int = -1
    local_rank: int = -1
    world_size: int = -1


HIDDEN_RUNTIME: Final = (
    "it has a CUDA runtime linked in, names stripped: only the driver's calls are seen"
)
"""The reason of a file whose calls are seen, and counted, as those which its runtime makes of the driver."""
NO_CPU_COLLECTIVES: Final = "collectives on the CPU (Gloo) are not seen"
"""How the reason of a PyTorch begins of which nothing else is missing: a job on GPUs has none."""
_OF_NVIDIA: Final = (
    "libcublas",
    "libcudnn",
    "libcufft",
    "libcufile",
    "libcurand",
    "libcusolver",
    "libcusparse",
    "libcutensor",
    "libnpp",
    "libnvinfer",
    "libnvjpeg",
    "libnvshmem",
)
"""Libraries that NVIDIA ships so. By name: their folders differ, and one that is not listed costs a true sentence."""


@dataclass(frozen=True, slots=True)
class Unprobed:
    """A file whose calls were not seen, or not as what they are.

    Attributes:
        pid: The process that had it loaded; 0 for no certain one, or for many.
        path: Its name inside that process.
        reason: Why it was not probed.
        node: Where; empty while that goes without saying.
    """

    pid: int
    path: str
    reason: str
    node: str = ""


def describe_unprobed(unprobed: Iterable[Unprobed]) -> list[str]:
    """A sentence for each file: which processes had it, and why its calls are missing.

    A runtime inside a library of NVIDIA's is left out: nobody can change it, and what it launches is seen.
    """
    processes: dict[tuple[str, str, str], list[int]] = {}
    for one in unprobed:
        name = one.path.rpartition("/")[2]
        if one.reason.startswith(HIDDEN_RUNTIME) and name.startswith(_OF_NVIDIA):
            continue
        processes.setdefault((one.node, one.path, one.reason), []).append(one.pid)
    lines = []
    for (node, path, reason), pids in processes.items():
        named = ", ".join(map(str, sorted(pid for pid in pids if pid)[:_MAX_NAMED]))
        more = len(pids) - _MAX_NAMED
        whose = f" of pid {named}" if named else ""
        whose += f" and {more} more" if more > 0 else ""
        where = f" on {node}" if node else ""
        what, why = "not probed, calls are missing", reason
        if reason.startswith(HIDDEN_RUNTIME):
            why, _, what = HIDDEN_RUNTIME.partition(": ")
        elif reason.startswith(NO_CPU_COLLECTIVES):
            what, _, why = reason.partition(": ")
        lines.append(f"{what}: {clean(path)}{whose}{where} ({clean(why)})")
    return lines


def _no_rows(dtype: np.dtype[np.void]) -> Records:
    return np.empty(0, dtype)


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything the causal engine reads.

    Attributes:
        events: Rows of EVENT sorted by start_ns, stable.
        nodes: Node names; ``events["node"]`` indexes them. A recording without nodes has one: ``""``.
        process_names: Name by (node index, pid or tid).
        ranks: Place in the job by (node index, pid).
        parents: Pid of the parent by (node index, pid), of all of the file.
        gpu_views: Which GPUs a process is shown, by (node index, pid).
        aggregates: Rows of AGGREGATE; empty when the recording keeps none.
        coverage: Rows of COVERAGE; empty when the recording keeps none.
        snapshots: Rows of SNAPSHOT by time.
        histograms: Rows of HISTOGRAM.
        sessions: Runs of the agent.
        unprobed: Libraries whose calls are missing.
        stacks: Frames by `stack_hash`, leaf first, as the file has them (JSON).
        n_events_stored: Rows in the file, whatever the filter of this load.
        is_truncated: The load reached its row limit and kept the newest rows.
        has_unread: More rows were asked for than are held at once, so the oldest of them are not here.
        unwritten: Rows that the recorder could not store, most first.
        n_damaged: Rows of the file that could not be read.
        asked_ns: The part of the file that was asked for, where it is not all of it: first and last moment, Unix time;
            0 for an open end. Rows outside are not here; `aggregates`, `coverage` and `histograms` are those of the
            file.
        asked_from_ns: The first of these moments by node, where each was asked for its own; empty where all have one.
        pids: The processes that were asked for; empty for all.
        has_gpu_ids: The recorder read which device each call went to; older ones wrote 0 for all.
    """

    events: Events = field(default_factory=lambda: _no_rows(EVENT))
    nodes: tuple[str, ...] = ("",)
    process_names: Mapping[tuple[int, int], str] = field(default_factory=dict)
    ranks: Mapping[tuple[int, int], ProcessRank] = field(default_factory=dict)
    parents: Mapping[tuple[int, int], int] = field(default_factory=dict)
    gpu_views: Mapping[tuple[int, int], GpuView] = field(default_factory=dict)
    aggregates: Records = field(default_factory=lambda: _no_rows(AGGREGATE))
    coverage: Records = field(default_factory=lambda: _no_rows(COVERAGE))
    snapshots: Records = field(default_factory=lambda: _no_rows(SNAPSHOT))
    histograms: Records = field(default_factory=lambda: _no_rows(HISTOGRAM))
    sessions: tuple[Session, ...] = ()
    unprobed: tuple[Unprobed, ...] = ()
    stacks: Mapping[int, str] = field(default_factory=dict)
    n_events_stored: int = 0
    is_truncated: bool = False
    asked_ns: tuple[int, int] = (0, 0)
    asked_from_ns: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    has_gpu_ids: bool = True
    unwritten: tuple[Unwritten, ...] = ()
    n_damaged: int = 0
    has_unread: bool = False

    def describe_missing(self) -> str:
        """What is not here though it was recorded, or should have been, in a line; empty for nothing."""
        parts = []
        if self.unwritten:
            n_rows = sum(one.n_rows for one in self.unwritten)
            causes = "; ".join(sorted({one.cause for one in self.unwritten}))
            names = sorted({one.node for one in self.unwritten if one.node})
            where = f" on {', '.join(names)}" if names and len(self.nodes) > 1 else ""
            parts.append(f"{n_rows} rows were not stored{where}: {causes}")
        if self.n_damaged:
            parts.append(f"{self.n_damaged} rows could not be read")
        if self.has_unread:
            parts.append(f"only the newest {len(self.events)} of the events asked for were read")
        return f"incomplete: {', '.join(parts)}" if parts else ""

    def process_name(self, node: int, pid: int) -> str:
        """Name of a process or thread, or ``pid N`` when the recording does not know it."""
        return self.process_names.get((node, pid)) or f"pid {pid}"

    @property
    def has_weights(self) -> bool:
        """Whether each row says how many calls it stands for: written since the recorder reads the device of a call."""
        return self.has_gpu_ids

    @property
    def is_cut(self) -> bool:
        """Whether rows of the file were left out by time."""
        return self.asked_ns != (0, 0)

    def find_asked_from(self, nodes: IntArray) -> IntArray:
        """When the part that was asked for begins on each of these nodes, Unix time; 0 for an open beginning."""
        if not self.asked_from_ns:
            return np.full(len(nodes), self.asked_ns[0])
        return np.array(self.asked_from_ns, np.int64)[nodes]

    @property
    def window_ns(self) -> tuple[int, int]:
        """First start and last end of the events, Unix time; (0, 0) without events."""
        if not len(self.events):
            return 0, 0
        ends = self.events["start_ns"] + self.events["duration_ns"]
        return int(self.events["start_ns"].min()), int(ends.max())
