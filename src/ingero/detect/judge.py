"""The Judge: from what ranks report to what is known about each worker. The same in Fleet and in a replay.

Feed it runs as they arrive, call `Judge.settle` now and then, ask for `Judge.judgements`. Time is an argument: the
clock of arrivals, which need not be any rank's. What arrives late by no more than the stated patience changes
nothing: operations are numbered in the order the worker entered them, paired by that number and judged in one
canonical order, so the way runs were cut into pushes and interleaved cannot be seen in the result.

Not thread-safe, no clock, no I/O. Memory is bounded by the settings; what is dropped for it is counted.

Patience. An operation is numbered ``reorder_ns`` after it arrived: until then an earlier one of the same rank may
still come in. A rank that keeps its peers waiting for ``patience_ns`` is left out until it reports again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.detect.collectives import WaitLedger
from ingero.detect.evidence import RankEvidence
from ingero.detect.groups import FOREVER, PeerGroup, split_by_group, take_complete
from ingero.detect.peers import BY_LABELS, OP, Pairing, op_of_slot, role_of
from ingero.detect.rows import Columns
from ingero.detect.tiers import EDetectorSettings
from ingero.detect.verdicts import Facts, WorkerFacts, build_judgements
from ingero.model.arrays import BoolArray, IntArray, Records
from ingero.model.collectives import ClockKind, CollectiveOp, CollectiveRun, Rank, Worker
from ingero.model.verdicts import Judgement
from ingero.units import NS_PER_S, NS_PER_US


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How the Judge weighs, waits and bounds itself.

    Attributes:
        detector: See `EDetectorSettings`.
        min_own_ns: Operations before which the median peer worked less than this are not compared.
        reorder_ns: How long after its arrival an operation may still be preceded by one that arrives later.
        patience_ns: How long peers wait for a rank that does not report.
        max_workers: Workers beyond this are refused and counted.
        max_pending_ops: Operations kept for pairing; beyond it new ones are dropped and counted.
    """

    detector: EDetectorSettings = field(default_factory=EDetectorSettings)
    min_own_ns: int = 100 * NS_PER_US
    reorder_ns: int = 5 * NS_PER_S
    patience_ns: int = 60 * NS_PER_S
    max_workers: int = 20_000
    max_pending_ops: int = 4_000_000


_MAX_WIDENED: Final = 64
"""How often a group takes up late members; each time its evidence starts anew, but for who is in alarm."""


@dataclass(slots=True)
class JudgeCounts:
    """What was read and what was lost, each with its reason."""

    ops: int = 0
    stale_ops: int = 0
    enqueue_ops: int = 0
    refused_workers: int = 0
    dropped_ops: int = 0
    late_members: int = 0


class Judge:
    """Verdicts on every worker of every job that reports to it.

    Args:
        settings: See `JudgeSettings`.
    """

    def __init__(self, settings: JudgeSettings | None = None) -> None:
        self.settings = settings or JudgeSettings()
        self.counts = JudgeCounts()
        self._ranks: list[Rank] = []
        self._worker_of: dict[tuple[str, Worker], int] = {}
        self._comm_of: dict[tuple[str, str], int] = {}
        self._comm_names: list[str] = []
        self._view_of: dict[tuple[int, int], int] = {}
        self._view_comm: list[int] = []
        self._members: dict[int, list[int]] = {}
        self._comms = Columns(n_ranks=("<i8", 0))
        self._views = Columns(done=("<i8", -1))
        self._workers = Columns(
            done_ns=("<i8", np.iinfo(np.int64).min), first_ns=("<i8", -1), last_ns=("<i8", -1)
        )
        self._own = Columns(own=("<i8", 0), n_ops=("<i8", 0), n_enqueue=("<i8", 0))
        self._arrived: list[Records] = []
        self._n_pending = 0
        self._pairing = Pairing()
        self._ledger = WaitLedger(self.settings.patience_ns)
        self._groups: dict[tuple[int, tuple[tuple[str, str], ...], str], PeerGroup] = {}
        self._group_of: dict[int, PeerGroup] = {}
        self._evidence = RankEvidence(self.settings.detector, self.settings.min_own_ns)

    # ── In ──────────────────────────────────────────────────────────────────

    def observe(self, runs: Sequence[CollectiveRun], now_ns: int) -> None:
        """Take what arrived.

        Args:
            runs: From any ranks, in any order; a repeated operation is dropped and counted.
            now_ns: On the clock of arrivals; it must not step back.
        """
        for run in runs:
            worker = self._find_worker(run.rank)
            if worker is None:
                self.counts.refused_workers += 1
                continue
            if self._n_pending + run.ops.size > self.settings.max_pending_ops:
                self.counts.dropped_ops += run.ops.size
                continue
            comm = self._find_comm(run)
            view = self._find_view(worker, comm)
            rows = np.zeros(run.ops.size, OP)
            rows["worker"], rows["comm"], rows["view"] = worker, comm, view
            for name in ("seq", "entry_ns", "inside_ns", "own_ns", "n_bytes", "op"):
                rows[name] = run.ops[name]
            rows["is_enqueue"] = run.clock == ClockKind.ENQUEUE
            rows["arrived_ns"] = now_ns
            self._arrived.append(rows)
            self._n_pending += rows.size
            self.counts.ops += rows.size

    def _find_worker(self, rank: Rank) -> int | None:
        key = (rank.cluster_id, rank.worker)
        worker = self._worker_of.get(key)
        if worker is None and len(self._ranks) < self.settings.max_workers:
            worker = self._worker_of[key] = len(self._ranks)
            self._ranks.append(rank)
            self._workers.add()
            self._own.add()
        return worker

    def _find_comm(self, run: CollectiveRun) -> int:
        key = (run.rank.cluster_id, run.comm)
        comm = self._comm_of.get(key)
        if comm is None:
            comm = self._comm_of[key] = len(self._comm_names)
            self._comm_names.append(run.comm)
            self._comms.add()
        n_ranks = np.asarray(self._comms["n_ranks"])
        n_ranks[comm] = max(int(n_ranks[comm]), run.n_ranks)
        return comm

    def _find_view(self, worker: int, comm: int) -> int:
        view = self._view_of.get((worker, comm))
        if view is None:
            view = self._view_of[worker, comm] = len(self._view_comm)
            self._view_comm.append(comm)
            self._views.add()
            self._members.setdefault(comm, []).append(worker)
        return view

    # ── On ──────────────────────────────────────────────────────────────────

    def settle(self, now_ns: int, *, final: bool = False) -> None:
        """Judge what can be judged.

        Args:
            now_ns: On the clock of arrivals.
            final: Nothing more will come: judge everything that is here.
        """
        n_ranks = np.asarray(self._comms["n_ranks"], np.int64)
        ops = self._take_ready(now_ns, final=final)
        self._ledger.grow(len(self._ranks))
        self._pairing.grow(len(self._ranks), len(self._view_comm))
        self._evidence.grow(len(self._ranks))
        if ops.size:
            self._sum_up(ops)
            self._ledger.add(ops)
        self._ledger.settle(now_ns, n_ranks, final=final)
        keys = self._pairing.number(ops, n_ranks, final=final)
        split_by_group(keys, lambda worker, comm, rows: self._join(worker, comm, rows, now_ns))
        for depth in sorted({group.depth for group in self._groups.values()}):
            self._compare(
                [group for group in self._groups.values() if group.depth == depth],
                now_ns,
                final=final,
            )

    def _compare(self, groups: Sequence[PeerGroup], now_ns: int, *, final: bool) -> None:
        """Judge what is complete within groups none of which a worker went to from another of them."""
        segments = self._pairing.segments()
        paired = []
        comm_of_view, is_link = self._link_views()
        for group in groups:
            if not group.is_open:
                self._open(group, now_ns, final=final)
            if group.late:
                self._widen(group, now_ns, final=final)
            if group.is_open and not group.late:
                taken = take_complete(
                    group, segments, now_ns, self.settings.patience_ns, final=final
                )
                if taken is not None:
                    paired.append((group, taken))
                    self._evidence.siblings.note_links(group.members, taken, comm_of_view, is_link)
        self._evidence.observe(paired)

    def _take_ready(self, now_ns: int, *, final: bool) -> Records:
        """Operations whose predecessors had time to arrive, sorted by worker and entry, without repeats."""
        if not self._arrived:
            return np.zeros(0, OP)
        rows = np.concatenate(self._arrived)
        n_ranks = np.asarray(self._comms["n_ranks"])[rows["comm"]]
        order = np.lexsort((
            rows["arrived_ns"],
            rows["seq"],
            n_ranks,
            rows["op"],
            rows["entry_ns"],
            rows["worker"],
        ))
        rows = rows[order]
        done_seq = np.asarray(self._views["done"])[rows["view"]]
        done_ns = np.asarray(self._workers["done_ns"])[rows["worker"]]
        is_stale = (rows["seq"] <= done_seq) | (rows["entry_ns"] <= done_ns)
        is_stale |= _is_repeat(rows)
        self.counts.stale_ops += int(is_stale.sum())
        rows = rows[~is_stale]
        frontier = np.full(len(self._ranks), np.iinfo(np.int64).min)
        is_aged = (now_ns - rows["arrived_ns"] >= self.settings.reorder_ns) | final
        np.maximum.at(frontier, rows["worker"][is_aged], rows["entry_ns"][is_aged])
        is_ready = rows["entry_ns"] <= frontier[rows["worker"]]
        ready: Records = rows[is_ready]
        kept = rows[~is_ready]
        self._arrived, self._n_pending = ([kept] if kept.size else []), int(kept.size)
        done_ns = np.asarray(self._workers["done_ns"])
        np.maximum.at(done_ns, ready["worker"], ready["entry_ns"])
        np.maximum.at(np.asarray(self._views["done"]), ready["view"], ready["seq"])
        return ready

    def _sum_up(self, ops: Records) -> None:
        worker = ops["worker"]
        np.add.at(np.asarray(self._own["own"]), worker, np.maximum(ops["own_ns"], 0))
        np.add.at(np.asarray(self._own["n_ops"]), worker, 1)
        np.add.at(np.asarray(self._own["n_enqueue"]), worker, ops["is_enqueue"].astype(np.int64))
        self.counts.enqueue_ops += int(ops["is_enqueue"].sum())
        first, last = np.asarray(self._workers["first_ns"]), np.asarray(self._workers["last_ns"])
        begins = np.flatnonzero(np.diff(worker, prepend=-1))
        is_fresh = first[worker[begins]] < 0
        first[worker[begins[is_fresh]]] = ops["entry_ns"][begins[is_fresh]]
        np.maximum.at(last, worker, ops["entry_ns"] + np.maximum(ops["inside_ns"], 0))

    def _join(self, worker: int, comm: int, rows: Records, now_ns: int) -> None:
        """Hand a worker's keys to its peer group, which it joins if need be."""
        rank = self._ranks[worker]
        key = (comm, role_of(rank), rank.cluster_id)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = PeerGroup(comm, since_ns=now_ns)
        before = self._group_of.get(worker)
        if worker not in group.members and worker not in group.late:
            if not group.is_open:
                group.members.append(worker)
            elif group.n_widened < _MAX_WIDENED:
                group.late_ns = group.late_ns if group.late else now_ns
                group.late.append(worker)
            else:
                self.counts.late_members += 1
                return
        if before is not None and before is not group:
            before.gone_upto[worker] = FOREVER - 1
            group.gone_upto.pop(worker, None)
            group.depth = max(group.depth, before.depth + 1)
            if group.is_open and worker in group.members:
                self._evidence.settle_in(group, worker)
        self._group_of[worker] = group
        group.pending.append(rows)
        group.n_pending += rows.size

    def _open(self, group: PeerGroup, now_ns: int, *, final: bool) -> None:
        """Fix a group's members once every worker on its communicator has chosen its peers, or after patience."""
        waited = now_ns - (group.since_ns or 0) >= self.settings.patience_ns
        if not (waited or final or self._is_settled(group)):
            return
        group.members.sort(key=self._order_of)
        group.is_open, group.since_ns = True, None
        self._evidence.add_group(group)

    def _widen(self, group: PeerGroup, now_ns: int, *, final: bool) -> None:
        """Take up workers that joined an open group: a spare, or ranks that a restarted job was extended by."""
        waited = now_ns - group.late_ns >= self.settings.patience_ns
        n_ranks = int(np.asarray(self._comms["n_ranks"])[group.comm]) if group.comm >= 0 else 0
        is_whole = len(group.members) + len(group.late) == n_ranks
        if not (waited or final or is_whole):
            return
        group.members = sorted([*group.members, *group.late], key=self._order_of)
        group.late, group.n_widened = [], group.n_widened + 1
        self._evidence.add_group(group)

    def _is_settled(self, group: PeerGroup) -> bool:
        if group.comm == BY_LABELS:
            return False
        on_comm = self._members[group.comm]
        n_ranks = int(np.asarray(self._comms["n_ranks"])[group.comm])
        return len(on_comm) >= n_ranks and all(worker in self._group_of for worker in on_comm)

    def _order_of(self, worker: int) -> tuple[tuple[tuple[str, str], ...], str, int, str]:
        rank = self._ranks[worker]
        return rank.labels, rank.job, rank.rank, rank.node_id

    # ── Out ─────────────────────────────────────────────────────────────────

    def judgements(self, *, with_history: bool = False) -> list[Judgement]:
        """The verdicts as of the last `settle`, one judgement per job, in a canonical order.

        Args:
            with_history: Name workers whose alarm has cleared since too; for reports on a whole recording.
        """
        waits = self._ledger.wait_ns
        own, n_ops = (np.asarray(self._own[name], np.int64) for name in ("own", "n_ops"))
        n_enqueue = np.asarray(self._own["n_enqueue"], np.int64)
        first, last = (
            np.asarray(self._workers[name], np.int64) for name in ("first_ns", "last_ns")
        )
        links = self._links()
        workers = [
            WorkerFacts(
                rank=rank,
                group=self._evidence.home_of(at) or self._group_of.get(at),
                own_ns=int(own[at]),
                wait_ns=int(waits[at]) if at < waits.size else 0,
                n_ops=int(n_ops[at]),
                n_enqueue=int(n_enqueue[at]),
                span_ns=max(int(last[at] - first[at]), 0),
                links=links.get(at, {}),
            )
            for at, rank in enumerate(self._ranks)
        ]
        facts = Facts(
            workers=workers,
            members=self._members,
            comm_names=self._comm_names,
            view_comm=self._view_comm,
            evidence=self._evidence,
            ledger=self._ledger,
            settings=self.settings.detector,
            stage_links=self._stage_links(),
        )
        return build_judgements(facts, self._count_all(), with_history=with_history)

    def _links(self) -> dict[int, dict[int, int]]:
        """Every worker's two-member communicators: worker → slot → communicator."""
        n_ranks = np.asarray(self._comms["n_ranks"])
        slots = self._pairing.slots()
        links: dict[int, dict[int, int]] = {}
        for (worker, comm), view in self._view_of.items():
            if n_ranks[comm] == 2 and view < slots.size and slots[view] >= 0:
                links.setdefault(worker, {})[int(slots[view])] = comm
        return links

    def _link_views(self) -> tuple[IntArray, IntArray]:
        """Communicator of each view, and 1 where it is a link between two stages."""
        comms = np.array(self._view_comm, np.int64)
        slots = self._pairing.slots()
        known = np.full(comms.size, -1, np.int64)
        known[: slots.size] = slots[: comms.size]
        n_ranks = np.asarray(self._comms["n_ranks"], np.int64)
        is_exchange = np.isin(op_of_slot(known), (CollectiveOp.SEND, CollectiveOp.RECV))
        return comms, ((known >= 0) & is_exchange & (n_ranks[comms] == 2)).astype(np.int64)

    def _stage_links(self) -> dict[int, dict[int, int]]:
        """Every worker's links between stages: worker → communicator → the worker at the other end."""
        _, is_link = self._link_views()
        links: dict[int, dict[int, int]] = {}
        for (worker, comm), view in self._view_of.items():
            others = [other for other in self._members[comm] if other != worker]
            if is_link[view] and len(others) == 1:
                links.setdefault(worker, {})[comm] = others[0]
        return links

    def _count_all(self) -> dict[str, int]:
        return {
            "ops": self.counts.ops,
            "stale_ops": self.counts.stale_ops,
            "enqueue_ops": self.counts.enqueue_ops,
            "refused_workers": self.counts.refused_workers,
            "dropped_ops": self.counts.dropped_ops,
            "late_members": self.counts.late_members,
            "unpaired_ops": self._pairing.n_unpaired,
            "matched_ops": self._ledger.n_matched,
            "incomplete_ops": self._ledger.n_incomplete,
            "alone_ops": self._ledger.n_alone,
            "pending_ops": self._n_pending,
        }


def _is_repeat(rows: Records) -> BoolArray:
    """All but the first of rows with the same view and sequence number, in the given order."""
    order = np.lexsort((np.arange(rows.size), rows["seq"], rows["view"]))
    view, seq = rows["view"][order], rows["seq"][order]
    repeats = np.zeros(rows.size, bool)
    repeats[order[1:]] = (view[1:] == view[:-1]) & (seq[1:] == seq[:-1])
    return repeats
