"""The latest health score of each node of one cluster, in columns.

Below the cluster; knows nothing of thresholds, pushes or the wire. Rows are dense: row ``i`` of each column and
``nodes[i]`` speak of one node, so a statistic over the cluster is one expression over the first ``n_nodes`` rows. A
push writes five cells; only expiry moves rows.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ingero.model.arrays import FloatArray, IntArray


class ReportedState(IntEnum):
    """Value of `ingero.wire.names.Attribute.NODE_STATE`, as stored in a column of one byte.

    An agent that is ``stale`` by its own account sends nothing, so that state is not on the wire.
    """

    OTHER = 0
    ACTIVE = 1
    CALIBRATING = 2
    IDLE = 3


STATE_OF_NAME: Final = {
    "active": ReportedState.ACTIVE,
    "calibrating": ReportedState.CALIBRATING,
    "idle": ReportedState.IDLE,
}
"""Name of a state on the wire → code; any other name is OTHER, which is known and does not vote."""


class Cohort(NamedTuple):
    """Nodes that do the same kind of work: the agent's cgroup hash and workload type together."""

    cgroup_path_hash: str
    workload_type: str

    @property
    def name(self) -> str:
        """One string for both; empty for the cluster-wide bucket, to which every node without a hash belongs."""
        return f"{self.cgroup_path_hash}/{self.workload_type}" if self.cgroup_path_hash else ""


class Report(NamedTuple):
    """One node's accepted score."""

    node_id: str
    score: float
    state: ReportedState
    cohort: Cohort


_FIRST_ROWS: Final = 8
_COLUMNS: Final = ("_scores", "_states", "_cohort_idx", "_seen_ns")


class ClusterScores:
    """Score, state, cohort and last push of each node of one cluster.

    Not thread-safe; the owner locks.

    Attributes:
        nodes: Node id of each row.
        cohorts: Cohort of each cohort index. Indices are stable until cohorts that no node has any more are dropped.
    """

    __slots__ = (
        "_cohort_idx",
        "_cohort_names",
        "_cohort_of_node",
        "_idx_of_cohort",
        "_rows",
        "_scores",
        "_seen_ns",
        "_states",
        "cohorts",
        "nodes",
    )

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.cohorts: list[Cohort] = []
        self._rows: dict[str, int] = {}
        self._idx_of_cohort: dict[Cohort, int] = {}
        self._cohort_names: tuple[str, ...] | None = ()
        self._cohort_of_node: dict[str, Cohort] = {}
        self._scores = np.zeros(_FIRST_ROWS, np.float64)
        self._states = np.zeros(_FIRST_ROWS, np.uint8)
        self._cohort_idx = np.zeros(_FIRST_ROWS, np.int64)
        self._seen_ns = np.zeros(_FIRST_ROWS, np.int64)

    @property
    def n_nodes(self) -> int:
        """Rows in use, whatever their state."""
        return len(self.nodes)

    @property
    def scores(self) -> FloatArray:
        """Score of each row, shape (n_nodes,); a view."""
        return self._scores[: len(self.nodes)]

    @property
    def states(self) -> npt.NDArray[np.uint8]:
        """`ReportedState` of each row, shape (n_nodes,); a view."""
        return self._states[: len(self.nodes)]

    @property
    def cohort_idx(self) -> IntArray:
        """Index into `cohorts` of each row, shape (n_nodes,); a view."""
        return self._cohort_idx[: len(self.nodes)]

    @property
    def seen_ns(self) -> IntArray:
        """Monotonic time of each row's last push, shape (n_nodes,); a view."""
        return self._seen_ns[: len(self.nodes)]

    @property
    def cohort_names(self) -> tuple[str, ...]:
        """Name of each cohort index; the same tuple until cohorts come or go."""
        if self._cohort_names is None:
            self._cohort_names = tuple(cohort.name for cohort in self.cohorts)
        return self._cohort_names

    def find_row(self, node_id: str) -> int | None:
        """The node's row, or None."""
        return self._rows.get(node_id)

    def find_cohort_of(self, node_id: str) -> Cohort | None:
        """The cohort of the node's latest report, or None when it is not known. Any thread."""
        return self._cohort_of_node.get(node_id)

    def put(self, report: Report, now_ns: int) -> bool:
        """Store a node's latest report; True when it changes what the statistics are made of."""
        node_id, score, state, cohort = report
        row = self._rows.get(node_id)
        if row is None:
            row = self._add_row(node_id)
        cohort_index = self._idx_of_cohort.get(cohort)
        if cohort_index is None:
            cohort_index = self._add_cohort(cohort)
        self._seen_ns[row] = now_ns
        if (
            self._scores.item(row) == score
            and self._states.item(row) == state
            and self._cohort_idx.item(row) == cohort_index
        ):
            return False
        self._scores[row] = score
        self._states[row] = state
        self._cohort_idx[row] = cohort_index
        self._cohort_of_node[node_id] = self.cohorts[cohort_index]  # one object for all its nodes
        return True

    def expire(self, before_ns: int) -> list[str]:
        """Drop each node whose last push is older than ``before_ns``; returns their ids."""
        is_kept = self.seen_ns >= before_ns
        if is_kept.all():
            return []
        kept_rows = np.flatnonzero(is_kept)
        gone = [self.nodes[row] for row in np.flatnonzero(~is_kept)]
        capacity = max(_FIRST_ROWS, int(kept_rows.size))
        for name in _COLUMNS:
            column = np.zeros(capacity, getattr(self, name).dtype)
            column[: kept_rows.size] = getattr(self, name)[kept_rows]
            setattr(self, name, column)
        self.nodes = [self.nodes[row] for row in kept_rows]
        for node_id in gone:
            self._cohort_of_node.pop(node_id, None)
        self._rows = {node_id: row for row, node_id in enumerate(self.nodes)}
        self._drop_unused_cohorts()
        return gone

    def _add_cohort(self, cohort: Cohort) -> int:
        if len(self.cohorts) >= 2 * len(self.nodes) + _FIRST_ROWS:
            self._drop_unused_cohorts()
        index = self._idx_of_cohort[cohort] = len(self.cohorts)
        self.cohorts.append(cohort)
        self._cohort_names = None
        return index

    def _drop_unused_cohorts(self) -> None:
        """Renumber: a node that changes its cohort with every push leaves nothing behind."""
        in_use = self.cohort_idx >= 0
        kept, new_index = np.unique(self.cohort_idx[in_use], return_inverse=True)
        self.cohort_idx[in_use] = new_index
        self.cohorts = [self.cohorts[index] for index in kept]
        self._idx_of_cohort = {cohort: index for index, cohort in enumerate(self.cohorts)}
        self._cohort_names = None

    def _add_row(self, node_id: str) -> int:
        row = len(self.nodes)
        if row == self._scores.size:
            for name in _COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        # A row that is new must differ from its report, whatever the report says.
        self._cohort_idx[row] = -1
        self.nodes.append(node_id)
        self._rows[node_id] = row
        return row
