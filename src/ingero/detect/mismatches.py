"""Where members of a communicator entered different operations under one sequence number.

Every member of a communicator has to enter the same collectives in the same order (NCCL user guide, "Collective
Operations"). Where two entered different ones in the same place, one of them left the order, and what follows there is
no longer comparable.

Pure functions over `ingero.model.hang.RankState`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ingero.model.hang import RankState, RecordedOp


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first place of a communicator where its members disagree.

    Attributes:
        seq: The sequence number there.
        entered: What each rank entered there; ranks of which that is not known are left out.
        odd: Ranks that entered another operation than most; empty when no operation was entered by more than half.
    """

    seq: int
    entered: Mapping[int, str]
    odd: frozenset[int]


def find_mismatches(states: Iterable[RankState]) -> dict[str, Mismatch]:
    """The first disagreement in each communicator, by its name; communicators without one are left out."""
    by_group: dict[str, dict[int, Mapping[int, RecordedOp]]] = {}
    for state in states:
        for group, ops in state.recorded.items():
            by_group.setdefault(group, {})[state.rank] = ops
    found = {group: _find_first(ops) for group, ops in by_group.items() if len(ops) > 1}
    return {group: mismatch for group, mismatch in found.items() if mismatch is not None}


def _find_first(ops_by_rank: Mapping[int, Mapping[int, RecordedOp]]) -> Mismatch | None:
    n_entered = Counter(seq for ops in ops_by_rank.values() for seq in ops)
    for seq in sorted(seq for seq, n in n_entered.items() if n > 1):
        entered = {rank: ops[seq] for rank, ops in ops_by_rank.items() if seq in ops}
        signatures = _signatures(entered)
        if len(set(signatures.values())) > 1:
            usual, n_usual = Counter(signatures.values()).most_common(1)[0]
            is_clear = 2 * n_usual > len(signatures)
            odd = {rank for rank, signature in signatures.items() if signature != usual}
            return Mismatch(seq, signatures, frozenset(odd if is_clear else ()))
    return None


def _signatures(entered: Mapping[int, RecordedOp]) -> dict[int, str]:
    """What each rank entered, as text; sizes count only where every rank has one that must be the same."""
    has_sizes = all(op.elements is not None for op in entered.values())
    return {
        rank: f"{op.kind} of {op.elements} {op.dtype}" if has_sizes else op.kind
        for rank, op in entered.items()
    }
