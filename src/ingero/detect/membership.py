"""Which workers form a peer group, from when on, and how a group changes when workers join or move."""

from __future__ import annotations

from typing import Final

from ingero.detect.arrivals import JudgeCounts
from ingero.detect.evidence import RankEvidence
from ingero.detect.groups import PeerGroup
from ingero.detect.peers import BY_LABELS, role_of
from ingero.detect.registry import Registry
from ingero.model.arrays import Records

_MAX_WIDENED: Final = 64
"""How often a group adds late members; each time its evidence starts anew, but for workers in alarm."""


class Membership:
    """The peer groups of all jobs.

    Args:
        registry: The workers and communicators.
        evidence: Where groups are compared.
        patience_ns: How long a group waits for members, on the clock of arrivals.
        counts: What is counted as a late member.
    """

    def __init__(
        self, registry: Registry, evidence: RankEvidence, patience_ns: int, counts: JudgeCounts
    ) -> None:
        self._registry = registry
        self._evidence = evidence
        self._patience_ns = patience_ns
        self._counts = counts
        self._groups: dict[tuple[int, tuple[tuple[str, str], ...], str], PeerGroup] = {}
        self._group_of: dict[int, PeerGroup] = {}

    def find_group(self, worker: int) -> PeerGroup | None:
        """The group that a worker is compared in or will be; None before it has any."""
        return self._evidence.home_of(worker) or self._group_of.get(worker)

    def list_by_depth(self) -> list[list[PeerGroup]]:
        """All groups, those first that no worker joined from another of them."""
        groups = list(self._groups.values())
        depths = sorted({group.depth for group in groups})
        return [[group for group in groups if group.depth == depth] for depth in depths]

    def join(self, worker: int, comm: int, rows: Records, now_ns: int) -> None:
        """Add rows of KEY to a worker's peer group, which the worker joins if it is not a member."""
        rank = self._registry.ranks[worker]
        key = (comm, role_of(rank), rank.cluster_id)
        group = self._groups.setdefault(key, PeerGroup(comm, first_ns=now_ns, since_ns=now_ns))
        group.last_ns = now_ns
        before = self._group_of.get(worker)
        if worker not in group.members and worker not in group.late:
            if not group.is_open:
                group.members.append(worker)
            elif group.n_widened < _MAX_WIDENED:
                group.late_ns = group.late_ns if group.late else now_ns
                group.late.append(worker)
            else:
                self._counts.late_members += 1
                return
        if before is not None and before is not group:
            before.gone.add(worker)
            group.depth = max(group.depth, before.depth + 1)
            if group.is_open and worker in group.members:
                self._evidence.settle_in(group, worker)
        group.gone.discard(worker)
        self._group_of[worker] = group
        group.pending.append(rows)
        group.n_pending += rows.size

    def settle(self, group: PeerGroup, now_ns: int, *, final: bool) -> bool:
        """Fix a group's members or add late ones when it is time; whether it can be compared now.

        It is time once every worker on its communicator has chosen its peers, or when patience ends.
        """
        if not group.is_open:
            waited = now_ns - (group.since_ns or 0) >= self._patience_ns
            if not (waited or final or self._is_settled(group)):
                return False
            group.is_open, group.since_ns = True, None
            self._fix_members(group)
        elif group.late:
            waited = now_ns - group.late_ns >= self._patience_ns
            is_whole = len(group.members) + len(group.late) == self._n_ranks(group)
            if not (waited or final or is_whole):
                return False
            group.n_widened += 1
            self._fix_members(group)
        return True

    def _fix_members(self, group: PeerGroup) -> None:
        def order(worker: int) -> tuple[tuple[tuple[str, str], ...], str, int, str]:
            rank = self._registry.ranks[worker]
            return rank.labels, rank.job, rank.rank, rank.node_id

        group.members = sorted([*group.members, *group.late], key=order)
        group.late = []
        self._evidence.add_group(group)

    def _n_ranks(self, group: PeerGroup) -> int:
        """Members of the group's communicator; 0 when labels define it."""
        return 0 if group.comm == BY_LABELS else int(self._registry.n_ranks[group.comm])

    def _is_settled(self, group: PeerGroup) -> bool:
        if group.comm == BY_LABELS:
            return False
        on_comm = self._registry.members[group.comm]
        is_whole = len(on_comm) >= self._n_ranks(group)
        return is_whole and all(worker in self._group_of for worker in on_comm)
