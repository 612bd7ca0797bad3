"""Who waits for whom, with ranks that wait for the same ones taken together.

Of ten thousand ranks in one operation each waits for the same few: what follows from a wait is found once for all of
them, so that the work grows with the ranks and not with the pairs of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping


class WaitGraph:
    """The waits of one job.

    Args:
        waits: Whom each waiting rank waits for.
    """

    def __init__(self, waits: Mapping[int, frozenset[int]]) -> None:
        self._waits = waits
        self._waiters: dict[frozenset[int], list[int]] = defaultdict(list)
        for rank, targets in waits.items():
            self._waiters[targets].append(rank)
        self._waits_for: dict[int, list[frozenset[int]]] = defaultdict(list)
        for targets in self._waiters:
            for target in targets:
                self._waits_for[target].append(targets)
        self._sorted = {targets: tuple(sorted(targets)) for targets in self._waiters}
        self._blocked: dict[tuple[int, ...], tuple[int, ...]] = {}

    def find_awaited(self) -> set[int]:
        """Ranks that others wait for and that wait for none."""
        return self._waits_for.keys() - self._waits.keys()

    def get_targets(self, rank: int) -> tuple[int, ...]:
        """Whom a waiting rank waits for, ascending."""
        return self._sorted[self._waits[rank]]

    def find_blocked(self, rank: int) -> tuple[int, ...]:
        """Every other rank that waits for this one, directly or through others, ascending."""
        alike = tuple(map(id, self._waits_for.get(rank, ())))
        blocked = self._blocked.get(alike)
        if blocked is None:
            blocked = self._blocked[alike] = tuple(sorted(self._find_waiting([rank])))
        return tuple(one for one in blocked if one != rank) if rank in self._waits else blocked

    def find_circles(self, roots: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Sets of ranks that reach each other and no root: a deadlock, or a link that carries nothing."""
        excused = self._find_waiting(roots)
        held = {
            targets: ranks for targets, ranks in self._waiters.items() if ranks[0] not in excused
        }
        following = {
            targets: {self._waits[one] for one in targets if one in self._waits} for targets in held
        }
        circles = []
        for together in _find_components(following):
            waiting = {rank for targets in together for rank in held[targets]}
            circle = waiting & frozenset[int]().union(*together)
            if circle:
                circles.append(tuple(sorted(circle)))
        return tuple(sorted(circles))

    def _find_waiting(self, ranks: Iterable[int]) -> set[int]:
        """Ranks that wait for one of these, directly or through others."""
        found, stack, seen = set[int](), list(ranks), set[int]()
        while stack:
            for targets in self._waits_for.get(stack.pop(), ()):
                if id(targets) not in seen:
                    seen.add(id(targets))
                    new = [one for one in self._waiters[targets] if one not in found]
                    found.update(new)
                    stack.extend(new)
        return found


def _find_components(
    following: Mapping[frozenset[int], Collection[frozenset[int]]],
) -> Iterator[set[frozenset[int]]]:
    """Nodes that reach each other, by the method of Kosaraju and Sharir; a node alone too."""
    preceding = defaultdict(list)
    for node, others in following.items():
        for other in others:
            preceding[other].append(node)
    done = set[frozenset[int]]()
    for start in reversed(_list_finished(following)):
        if start in done:
            continue
        done.add(start)
        together, stack = {start}, [start]
        while stack:
            new = [one for one in preceding[stack.pop()] if one not in done]
            done.update(new)
            together.update(new)
            stack.extend(new)
        yield together


def _list_finished(
    following: Mapping[frozenset[int], Collection[frozenset[int]]],
) -> list[frozenset[int]]:
    """Nodes in the order in which a search in depth leaves them."""
    finished, seen = [], set[frozenset[int]]()
    for start in following:
        if start in seen:
            continue
        seen.add(start)
        path = [(start, iter(following[start]))]
        while path:
            node, rest = path[-1]
            new = next((one for one in rest if one not in seen), None)
            if new is None:
                finished.append(node)
                path.pop()
            else:
                seen.add(new)
                path.append((new, iter(following[new])))
    return finished
