"""How many members of a communicator entered and left each of its operations, without asking each of them again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from operator import itemgetter


class GroupMembers:
    """The members of one communicator.

    Args:
        ranks: All of them.
        entered: The last collective that each entered, as far as it is known.
        left: The last one that each left, as far as it is known.
    """

    def __init__(
        self, ranks: Iterable[int], entered: Mapping[int, int], left: Mapping[int, int]
    ) -> None:
        self.ranks = frozenset(ranks)
        known = sorted(
            ((rank, entered[rank]) for rank in self.ranks if rank in entered), key=itemgetter(1)
        )
        self._by_entered = [rank for rank, _ in known]
        self._entered = [seq for _, seq in known]
        self._left_by = left
        self._left = sorted(left[rank] for rank in self.ranks if rank in left)

    def count_unknown(self) -> int:
        """Members of which it is not known what they entered."""
        return len(self.ranks) - len(self._entered)

    def count_absent(self, seq: int) -> int:
        """Members that are known not to have entered a collective."""
        return bisect_left(self._entered, seq)

    def find_absent(self, seq: int) -> list[int]:
        """Which those are."""
        return self._by_entered[: self.count_absent(seq)]

    def count_left(self, seq: int) -> int:
        """Members that are known to have left a collective."""
        return len(self._left) - bisect_left(self._left, seq)

    def find_held(self, ranks: frozenset[int], seq: int) -> frozenset[int]:
        """Which of some ranks are members that are not known to have left a collective."""
        return frozenset(r for r in ranks & self.ranks if self._left_by.get(r, seq - 1) < seq)
