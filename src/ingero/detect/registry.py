"""Workers, communicators and views by index, in the order in which they first reported.

A job that is started again may meet under the names that it had, as with Gloo in the same place: its operations are
numbered from 0 anew, and are of another communicator. A worker counts anew where an operation has a number that it
passed and was entered later than the one with its greatest number. What is only repeated, or was overtaken, was entered
earlier. A worker that was not there before, such as a spare, may report before any other does: it is on the other
communicator, too, if none of the others has reported for a while, nor went on since, and it has not come half as far
as they had.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from ingero.detect.columns import Columns
from ingero.model.arrays import IntArray, Records
from ingero.model.collectives import CollectiveRun, Rank, Worker

MAX_LIVES: Final = 1024
"""How often communicators of one name are kept apart; from then on what counts anew is taken for a repeat."""
_NEVER: Final = int(np.iinfo(np.int64).min)


@dataclass(slots=True)
class _Counting:
    """How far a worker counted on a communicator.

    Attributes:
        view: The worker on the communicator.
        began_ns: Before which it was another communicator of that name, on the worker's clock.
        before: How far it had counted on that one; None for the first.
        greatest: Greatest number.
        entered_ns: When the worker entered that.
    """

    view: int
    began_ns: int = _NEVER
    before: _Counting | None = None
    greatest: int = -1
    entered_ns: int = _NEVER

    def note(self, ops: Records, entry_ns: IntArray) -> bool:
        """It entered operations, rows of COLLECTIVE_OP, at these times; whether it went on with them."""
        last = int(ops["seq"].argmax())
        seq, at_ns = int(ops["seq"][last]), int(entry_ns[last])
        goes_on = seq > self.greatest and at_ns > self.entered_ns
        if goes_on:
            self.greatest, self.entered_ns = seq, at_ns
        return goes_on

    def starts_over(self, ops: Records, entry_ns: IntArray, reorder_ns: int) -> bool:
        """Whether operations are counted anew; threads of one process may overtake each other by a moment."""
        first = int(entry_ns.argmin())
        is_later = int(entry_ns[first]) - reorder_ns > self.entered_ns
        return is_later and int(ops["seq"][first]) <= self.greatest


@dataclass(slots=True)
class _Name:
    """The communicators of one name.

    Attributes:
        newest: The one that workers meet on now.
        n_lives: How many there were.
        seen_ns: When one that is no newcomer reported on it last, on the clock of arrivals.
        newcomers: Workers that came to it after a pause of all others, since one of these went on.
    """

    newest: int
    n_lives: int = 1
    seen_ns: int = _NEVER
    newcomers: set[int] = field(default_factory=set)


class Registry:
    """Indices of what reports: a *view* is one worker on one communicator.

    Args:
        max_workers: Workers beyond this are refused.
        reorder_ns: How much later it is entered, at least, what is counted anew.

    Attributes:
        ranks: By worker.
        comm_names: By communicator.
        members: Communicator → workers that reported from it.
        views: (worker, communicator) → view.
        view_comms: Communicator of each view.
    """

    def __init__(self, max_workers: int, reorder_ns: int) -> None:
        self._max_workers = max_workers
        self._reorder_ns = reorder_ns
        self.ranks: list[Rank] = []
        self.comm_names: list[str] = []
        self.members: dict[int, list[int]] = {}
        self.views: dict[tuple[int, int], int] = {}
        self.view_comms: list[int] = []
        self._worker_of: dict[tuple[str, Worker], int] = {}
        self._names: dict[tuple[str, str], _Name] = {}
        self._countings: dict[tuple[int, str], _Counting] = {}
        self._comms = Columns(n_ranks=0)

    @property
    def n_ranks(self) -> IntArray:
        """Members of each communicator."""
        return self._comms["n_ranks"]

    def add_worker(self, rank: Rank) -> int | None:
        """The index of a worker, added if it is new; None when there are too many.

        It runs where it said last, and does what it said last.
        """
        key = (rank.cluster_id, rank.worker)
        worker = self._worker_of.get(key)
        if worker is None and len(self.ranks) < self._max_workers:
            worker = self._worker_of[key] = len(self.ranks)
            self.ranks.append(rank)
        elif worker is not None:
            known = self.ranks[worker]
            resource, labels = rank.resource or known.resource, rank.labels or known.labels
            if (resource, labels) != (known.resource, known.labels):
                self.ranks[worker] = replace(known, resource=resource, labels=labels)
        return worker

    def find_last(self, worker: int, run: CollectiveRun) -> int | None:
        """A time after which the worker entered a run's operations, if its clock was not set back.

        The least time where it is not known on the communicator; None where what the run counts was passed.
        """
        counting = self._countings.get((worker, run.comm))
        if counting is None or counting.greatest < 0:
            return _NEVER
        known = [counting] if counting.before is None else [counting, counting.before]
        is_passed = not run.ops.size or int(run.ops["seq"].min()) <= max(
            one.greatest for one in known
        )
        return None if is_passed else min(one.entered_ns for one in known)

    def add_view(
        self, worker: int, run: CollectiveRun, entry_ns: IntArray, now_ns: int
    ) -> tuple[int, int]:
        """The indices of a run's communicator and of its worker on it, added if they are new.

        Args:
            worker: Who reports.
            run: What it reports.
            entry_ns: When it entered the run's operations, shape (n,), as `WorkerClocks.take` has it.
            now_ns: On the clock of arrivals.
        """
        name = self._find_name(run)
        counting = self._countings.get((worker, run.comm))
        if counting is None:
            if name.newest in self.members and now_ns - name.seen_ns > self._reorder_ns:
                name.newcomers.add(worker)
            counting = _Counting(self._find_view(worker, name.newest))
            self._countings[worker, run.comm] = counting
        elif counting.before is not None and entry_ns.size and entry_ns.min() < counting.began_ns:
            counting = counting.before  # it was overtaken
        elif entry_ns.size and counting.starts_over(run.ops, entry_ns, self._reorder_ns):
            counting = self._begin_anew(worker, run, counting, int(entry_ns.min()))
        comm = self._note_size(run, counting.view)
        goes_on = entry_ns.size and counting.note(run.ops, entry_ns)
        if comm == name.newest and worker not in name.newcomers:
            name.seen_ns = now_ns
            if goes_on:
                name.newcomers.clear()  # they came to what goes on
        return comm, counting.view

    def _begin_anew(
        self, worker: int, run: CollectiveRun, counting: _Counting, began_ns: int
    ) -> _Counting:
        """The worker on the newest communicator of a name; on another one if it counted on that already."""
        name = self._find_name(run)
        if self.view_comms[counting.view] == name.newest:
            if name.n_lives >= MAX_LIVES:
                return counting
            name.newest, name.n_lives = self._add_comm(run.comm), name.n_lives + 1
            for other in sorted(name.newcomers - {worker}):
                known = self._countings[other, run.comm]
                if 2 * known.greatest < counting.greatest:
                    known.view = self._find_view(other, name.newest)
            name.newcomers.clear()
        counting.before = None  # what is so late is of no use
        again = _Counting(self._find_view(worker, name.newest), began_ns, counting)
        self._countings[worker, run.comm] = again
        return again

    def _find_name(self, run: CollectiveRun) -> _Name:
        """A run's name, with a communicator if it is new."""
        key = run.rank.cluster_id, run.comm
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = _Name(self._add_comm(run.comm))
        return name

    def _add_comm(self, name: str) -> int:
        comm = len(self.comm_names)
        self.comm_names.append(name)
        self._comms.grow(comm + 1)
        return comm

    def _find_view(self, worker: int, comm: int) -> int:
        view = self.views.setdefault((worker, comm), len(self.view_comms))
        if view == len(self.view_comms):
            self.view_comms.append(comm)
            self.members.setdefault(comm, []).append(worker)
        return view

    def _note_size(self, run: CollectiveRun, view: int) -> int:
        """The communicator of a view, with as many members as a run says."""
        comm = self.view_comms[view]
        self.n_ranks[comm] = max(int(self.n_ranks[comm]), run.n_ranks)
        return comm
