"""Whom the ranks of a hung job wait for, as it is defined: each waiting rank is asked about each other member.

For states that hide nothing: every wait is recorded, no stack was read, and nothing says when.
"""

from collections import defaultdict

from ingero.detect.mismatches import find_mismatches
from ingero.model.hang import HangCause


class DirectHang:
    """``waits`` by rank: for whom; ``roots`` by rank: why, where and whom each blocks; ``deadlocks``."""

    def __init__(self, states):
        self.states = {state.rank: state for state in states}
        self.groups = {name: group for state in states for name, group in state.groups.items()}
        self.mixed = {op.group for s in states for op in s.pending if op.peer is not None}
        self.mismatches = find_mismatches(states)
        self.missed = {}
        waiting = {r: s for r, s in sorted(self.states.items()) if s.pending and not s.is_stopped}
        stuck = self.find_stopped(waiting) | self.find_mismatched()
        stuck |= {
            rank: (HangCause.STUCK, state.pending[0].group, state.pending[0].seq)
            for rank, state in waiting.items()
            if self.is_stuck(state) and not self.is_beyond(state.pending[0])
        }
        self.waits = {rank: self.find_targets(rank, stuck) for rank in waiting if rank not in stuck}
        at_fault = stuck | self.find_guilty()
        roots = self.find_roots(at_fault)
        self.roots = {
            rank: root
            for rank, root in roots.items()
            if rank in at_fault or not self.is_unsure(rank, roots)
        }
        reached = {rank: reach(rank, self.waits) for rank in self.waits}
        self.deadlocks = {
            tuple(sorted(one for one in reached[rank] if rank in reached.get(one, ())))
            for rank in self.waits
            if rank in reached[rank] and not reached[rank] & roots.keys()
        }

    def entered(self, rank, group, seq):
        last = self.states[rank].entered.get(group) if rank in self.states else None
        return None if last is None or group in self.mixed else last >= seq

    def left(self, rank, group, seq):
        last = self.states[rank].left.get(group) if rank in self.states else None
        return last is not None and group not in self.mixed and last >= seq

    def is_beyond(self, op):
        known = self.mismatches.get(op.group)
        return op.peer is None and known is not None and op.seq >= known.seq

    def is_stuck(self, state):
        op = state.pending[0]
        peers = [rank for rank in self.groups[op.group].ranks if rank != state.rank]
        return (
            op.peer is None
            and any(self.left(rank, op.group, op.seq) for rank in peers)
            and all(self.entered(rank, op.group, op.seq) is not False for rank in peers)
            and not self.find_stopped_in(peers, op)
        )

    def find_stopped_in(self, ranks, op):
        known = {m for m in ranks if m in self.states and self.states[m].is_stopped}
        return {m for m in known if not self.left(m, op.group, op.seq)}

    def find_stopped(self, waiting):
        found = {}
        for op in sorted((s.pending[0] for s in waiting.values()), key=lambda op: op.seq):
            for rank in self.groups[op.group].ranks:
                is_stopped = rank in self.states and self.states[rank].is_stopped
                if is_stopped and not self.left(rank, op.group, op.seq):
                    found.setdefault(rank, (HangCause.STOPPED, op.group, op.seq))
        return found

    def find_mismatched(self):
        if not any(self.is_beyond(op) for state in self.states.values() for op in state.pending):
            return {}
        return {
            rank: (HangCause.MISMATCHED, name, one.seq)
            for name, one in self.mismatches.items()
            for rank in one.odd
        }

    def find_targets(self, rank, stuck):
        op = self.states[rank].pending[0]
        members = [one for one in self.groups[op.group].ranks if one != rank]
        if op.peer is not None:
            members = self.find_peers(rank, op)
            here = {m for m in members if self.is_held_in(m, op)}
            behind = members - {m for m in here if rank in self.find_peers(m, op)}
            self.note(op, behind)
        elif self.is_beyond(op):
            known = self.mismatches[op.group]
            behind = {m for m in members if m not in self.states}
            behind |= {m for m in members if self.entered(m, op.group, known.seq) is False}
            if not known.odd:
                mine = known.entered.get(rank)
                behind |= {m for m, theirs in known.entered.items() if theirs != mine} - {rank}
            self.note(op, behind - known.entered.keys())
        else:
            behind = {m for m in members if m not in self.states}
            behind |= {m for m in members if self.entered(m, op.group, op.seq) is False}
            behind = behind or self.find_stopped_in(members, op)
            behind = behind or {m for m in members if not self.is_held_in(m, op)}
            self.note(op, behind)
        return behind | {m for m in members if m in stuck}

    def find_peers(self, rank, op):
        ops = [one for one in self.states[rank].pending if one.peer is not None]
        return {one.peer for one in ops if is_same(one, op)}

    def is_held_in(self, rank, op):
        pending = self.states[rank].pending if rank in self.states else ()
        return bool(pending) and is_same(pending[0], op)

    def is_unsure(self, rank, roots):
        """Whether only batches wait for it, each for another peer too, and there is another root."""
        (cause, _, _), is_p2p = self.missed[rank]
        batches = [self.waits[r] for r in self.waits if self.states[r].pending[0].peer is not None]
        is_alone = len(roots) == 1 or any(targets == {rank} for targets in batches)
        return cause == HangCause.ABSENT and is_p2p and not is_alone

    def note(self, op, behind):
        for rank in behind:
            cause = HangCause.ABSENT if rank in self.states else HangCause.SILENT
            known = self.missed.get(rank)
            if known is None or (known[1] and op.peer is None):
                self.missed[rank] = ((cause, op.group, op.seq), op.peer is not None)

    def find_guilty(self):
        guilty = {}
        for peer in sorted(self.waits):
            first, *rest = self.states[peer].pending
            for later in rest:
                for rank in self.groups[later.group].ranks if later.peer is None else ():
                    is_alike = rank in self.waits and self.is_held_in(rank, first)
                    if is_alike and self.entered(rank, later.group, later.seq) is False:
                        guilty.setdefault(rank, (HangCause.ABSENT, later.group, later.seq))
        return guilty

    def find_roots(self, at_fault):
        waiters = defaultdict(set)
        for rank, targets in self.waits.items():
            for target in targets:
                waiters[target].add(rank)
        roots = {}
        for rank in (waiters.keys() - self.waits.keys()) | at_fault.keys():
            why = at_fault.get(rank) or self.missed.get(rank, (None,))[0]
            if why is not None:
                roots[rank] = (*why, tuple(sorted(reach(rank, waiters) - {rank})))
        return roots


def is_same(one, other):
    return (one.group, one.seq, one.peer is None) == (other.group, other.seq, other.peer is None)


def reach(start, edges):
    seen, stack = set(), [start]
    while stack:
        for following in edges.get(stack.pop(), ()):
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return seen
