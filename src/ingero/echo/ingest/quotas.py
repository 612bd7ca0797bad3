"""What bearers have written against what they may write: rows and bytes in the mean, and different series in a day."""

from __future__ import annotations

import threading
from collections import OrderedDict
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from ingero.echo.db.deduplication import KeyGeneration, Keys
from ingero.model.arrays import BoolArray
from ingero.serving.bearer import Principal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

BURST_NS: Final = 10 * NS_PER_S
"""What a bearer that was silent may write at once, as time of its quota."""
GENERATION_NS: Final = 12 * 3600 * NS_PER_S
"""A series counts until it was silent for one to two of these."""
_MAX_KEYS: Final = 8192
"""Rows and bytes of as many bearers as there are; the least recently used is forgotten and starts anew."""


class QuotaKind(StrEnum):
    """What is bounded; value of the label ``quota``."""

    ROWS = "rows"
    BYTES = "bytes"
    SERIES = "series"
    STORAGE = "storage"


class QuotaWait(NamedTuple):
    """How long a bearer must wait, and for which of its quotas."""

    wait_ns: int
    kind: QuotaKind


class _Used(NamedTuple):
    """How far the time is used that a bearer has paid with, and what a second of it was worth."""

    until_ns: int
    per_second: int


class QuotaMeter:
    """Written rows and bytes as time: a quota of 100 a second has 200 rows cost two seconds.

    A request is let in while the time that a bearer has used lies in the past, and pays when its size is known; so one
    request may go beyond, and the next waits for it. Where a quota is changed, what is owed goes by the new one. Not
    thread-safe: one event loop owns it.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used: OrderedDict[tuple[str, QuotaKind], _Used] = OrderedDict()

    def find_wait(self, principal: Principal) -> QuotaWait | None:
        """How long until a bearer may write again, by the quota that it must wait for longest; None when it may now."""
        quota, now_ns = principal.quota, self._clock.mono_ns()
        waits = (
            QuotaWait(
                self._find_used_ns((principal.digest, kind), per_second, now_ns) - now_ns, kind
            )
            for kind, per_second in (
                (QuotaKind.ROWS, quota.rows_per_second),
                (QuotaKind.BYTES, quota.bytes_per_second),
            )
            if per_second is not None
        )
        longest = max(waits, default=None)
        return longest if longest is not None and longest.wait_ns > 0 else None

    def charge(self, principal: Principal, *, n_rows: int = 0, n_bytes: int = 0) -> None:
        """Write down what was written."""
        quota = principal.quota
        self._charge((principal.digest, QuotaKind.ROWS), n_rows, quota.rows_per_second)
        self._charge((principal.digest, QuotaKind.BYTES), n_bytes, quota.bytes_per_second)

    def _find_used_ns(self, key: tuple[str, QuotaKind], per_second: int, now_ns: int) -> int:
        used = self._used.get(key)
        if used is None:
            return now_ns - BURST_NS
        owed_ns = used.until_ns - now_ns
        if owed_ns <= 0:
            return used.until_ns
        return now_ns + owed_ns * used.per_second // per_second

    def _charge(self, key: tuple[str, QuotaKind], amount: int, per_second: int | None) -> None:
        if per_second is None or not amount:
            return
        now_ns = self._clock.mono_ns()
        used_ns = max(self._find_used_ns(key, per_second, now_ns), now_ns - BURST_NS)
        self._used[key] = _Used(used_ns + amount * NS_PER_S // per_second, per_second)
        self._used.move_to_end(key)
        if len(self._used) > _MAX_KEYS:
            self._used.popitem(last=False)


class SeriesMeter:
    """The series of each bearer that has a quota of them, exactly, at 8 to 16 bytes each. Any thread.

    It begins anew with the process, so a restart lets in as many again.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._windows: dict[str, _SeriesWindow] = {}

    def count(self, principal: Principal) -> int:
        """Series of a bearer that count now."""
        with self._lock:
            window = self._windows.get(principal.digest)
            if window is None:
                return 0
            window.rotate(self._clock.mono_ns())
            return window.n_active

    def admit(self, principal: Principal, series: Keys) -> BoolArray:
        """Mask of the rows within the quota, shape (n,): of series that it has, and of new ones while there is room.

        Args:
            principal: One with a quota of series.
            series: Hash of what each row is about.
        """
        limit = principal.quota.max_series
        assert limit is not None
        now_ns = self._clock.mono_ns()
        with self._lock:
            window = self._windows.setdefault(principal.digest, _SeriesWindow(now_ns))
            window.rotate(now_ns)
            return window.admit(series, limit)


class _SeriesWindow:
    """Series of the running generation and of the one before it."""

    def __init__(self, now_ns: int) -> None:
        self._newer = KeyGeneration(now_ns)
        self._older = KeyGeneration(now_ns)
        self.n_active = 0

    def rotate(self, now_ns: int) -> None:
        """Forget what was silent for a generation."""
        while now_ns - self._newer.opened_ns >= GENERATION_NS:
            opened_ns = self._newer.opened_ns + GENERATION_NS
            if now_ns - opened_ns >= 2 * GENERATION_NS:
                opened_ns = now_ns
            self._older, self._newer = self._newer, KeyGeneration(opened_ns)
            self.n_active = self._older.n_keys

    def admit(self, series: Keys, limit: int) -> BoolArray:
        different, place_idx = np.unique(series, return_inverse=True)
        is_newer = self._newer.is_member(different)
        is_older = self._older.is_member(different) & ~is_newer
        new_idx = np.flatnonzero(~(is_newer | is_older))
        room = max(0, limit - self.n_active)
        taken_idx, refused_idx = new_idx[:room], new_idx[room:]
        self.n_active += len(taken_idx)
        added = np.concatenate((different[is_older], different[taken_idx]))
        if len(added):
            self._newer.add(added)
        is_taken = np.ones(len(different), dtype=np.bool_)
        is_taken[refused_idx] = False
        return is_taken[place_idx]
