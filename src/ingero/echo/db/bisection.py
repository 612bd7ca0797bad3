"""Find the rows of a failed group that the database does not take, so that every other row is stored.

Halving: a request that is at fault costs a logarithm of attempts, and the group's other requests none of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ingero.echo.db.errors import BadRowsError, BrokenInstanceError
from ingero.echo.db.rows import Rows
from ingero.errors import BadDataError, IngeroError, StoreError

Commit = Callable[[Sequence[Rows]], None]
MAX_ATTEMPTS: Final = 1024
"""Commits spent on one group; a commit is an fdatasync, and other senders wait for the next group."""
_ATTEMPTS_A_REQUEST: Final = 64
"""Commits spent on one request that is at fault; what is left of it then is refused with the rest."""


class GroupBisector:
    """Stores what can be stored of one group.

    Args:
        commit: Stores requests whole or not at all.
        max_attempts: Commits after which what is left is to be sent again.
    """

    def __init__(self, commit: Commit, max_attempts: int = MAX_ATTEMPTS) -> None:
        self._commit = commit
        self._n_left = max_attempts

    def settle(self, group: Sequence[Rows]) -> list[IngeroError | None]:
        """Store a group; for each request what went wrong with all of it, or None."""
        try:
            self._attempt(group)
        except BadRowsError as error:
            if len(group) == 1:
                return [self._settle_one(group[0], error)]
            half = len(group) // 2
            return [*self.settle(group[:half]), *self.settle(group[half:])]
        except BrokenInstanceError as error:
            return self._settle_broken(group, error)
        except IngeroError as error:
            return [error] * len(group)
        return [None] * len(group)

    def _settle_broken(
        self, group: Sequence[Rows], error: BrokenInstanceError
    ) -> list[IngeroError | None]:
        """After a failure that took the instance along, twice: the rows' fault only if some others can be stored."""
        if len(group) == 1:
            return [error]
        half = len(group) // 2
        parts = (group[:half], group[half:])
        is_stored = [self._try(part) for part in parts]
        if not any(is_stored):
            return [error] * len(group)
        outcomes: list[IngeroError | None] = []
        for part, was_stored in zip(parts, is_stored, strict=True):
            outcomes += [None] * len(part) if was_stored else self.settle(part)
        return outcomes

    def _try(self, group: Sequence[Rows]) -> bool:
        try:
            self._attempt(group)
        except IngeroError:
            return False
        return True

    def _settle_one(self, rows: Rows, error: BadRowsError) -> IngeroError | None:
        try:
            n_stored = self._sift(rows, error, self._n_left - _ATTEMPTS_A_REQUEST)
        except IngeroError as failed:
            return failed  # what is stored already is recognised when it comes again
        if n_stored:
            return None
        return BadDataError(f"the database does not take it: {rows.outcome.why}")

    def _sift(self, rows: Rows, error: BadRowsError, until_left: int) -> int:
        """Store a request's rows but for those that cannot be; how many parts were."""
        halves = rows.split() if self._n_left > until_left else None
        if halves is None:
            rows.outcome.n_refused += max(1, rows.n_rows)
            rows.outcome.why = rows.outcome.why or error.message
            return 0
        n_stored = 0
        for half in halves:
            try:
                self._attempt([half])
            except BadRowsError as failed:
                n_stored += self._sift(half, failed, until_left)
            else:
                n_stored += 1
        return n_stored

    def _attempt(self, group: Sequence[Rows]) -> None:
        if self._n_left <= 0:
            raise StoreError("too many rows of this moment cannot be stored; send again")
        self._n_left -= 1
        self._commit(group)
