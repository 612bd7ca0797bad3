"""Workers, communicators and views by index, in the order in which they first reported."""

from __future__ import annotations

from dataclasses import replace

from ingero.detect.columns import Columns
from ingero.model.arrays import IntArray
from ingero.model.collectives import CollectiveRun, Rank, Worker


class Registry:
    """Indices of what reports: a *view* is one worker on one communicator.

    Args:
        max_workers: Workers beyond this are refused.

    Attributes:
        ranks: By worker.
        comm_names: By communicator.
        members: Communicator → workers that reported from it.
        views: (worker, communicator) → view.
        view_comms: Communicator of each view.
    """

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self.ranks: list[Rank] = []
        self.comm_names: list[str] = []
        self.members: dict[int, list[int]] = {}
        self.views: dict[tuple[int, int], int] = {}
        self.view_comms: list[int] = []
        self._worker_of: dict[tuple[str, Worker], int] = {}
        self._comm_of: dict[tuple[str, str], int] = {}
        self._comms = Columns(n_ranks=0)

    @property
    def n_ranks(self) -> IntArray:
        """Members of each communicator."""
        return self._comms["n_ranks"]

    def add_worker(self, rank: Rank) -> int | None:
        """The index of a worker, added if it is new; None when there are too many. It runs where it said last."""
        key = (rank.cluster_id, rank.worker)
        worker = self._worker_of.get(key)
        if worker is None and len(self.ranks) < self._max_workers:
            worker = self._worker_of[key] = len(self.ranks)
            self.ranks.append(rank)
        elif worker is not None and rank.resource and rank.resource != self.ranks[worker].resource:
            self.ranks[worker] = replace(self.ranks[worker], resource=rank.resource)
        return worker

    def add_view(self, worker: int, run: CollectiveRun) -> tuple[int, int]:
        """The indices of a run's communicator and of its worker on it, added if they are new."""
        comm = self._comm_of.setdefault((run.rank.cluster_id, run.comm), len(self.comm_names))
        if comm == len(self.comm_names):
            self.comm_names.append(run.comm)
            self._comms.grow(comm + 1)
        self.n_ranks[comm] = max(int(self.n_ranks[comm]), run.n_ranks)
        view = self.views.setdefault((worker, comm), len(self.view_comms))
        if view == len(self.view_comms):
            self.view_comms.append(comm)
            self.members.setdefault(comm, []).append(worker)
        return comm, view
