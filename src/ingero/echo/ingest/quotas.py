"""`QuotaMeter`: what each bearer has written against what it may write in the mean."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ingero.serving.bearer import Principal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

BURST_NS: Final = 10 * NS_PER_S
"""What a bearer that was silent may write at once, as time of its quota."""
_MAX_KEYS: Final = 8192
"""Rows and bytes of as many bearers as there are; the least recently used is forgotten and starts anew."""


class QuotaMeter:
    """Written rows and bytes as time: a quota of 100 a second has 200 rows cost two seconds.

    A request is let in while the time that a bearer has used lies in the past, and pays when its size is known; so one
    request may go beyond, and the next waits for it. Not thread-safe: one event loop owns it.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._used_ns: OrderedDict[tuple[str, str], int] = OrderedDict()

    def find_wait(self, principal: Principal) -> int:
        """Nanoseconds until a bearer may write again; 0 when it may now."""
        now_ns = self._clock.mono_ns()
        kinds = ("rows", "bytes")
        used = [self._used_ns.get((principal.digest, kind), now_ns) for kind in kinds]
        return max(0, *(until_ns - now_ns for until_ns in used))

    def charge(self, principal: Principal, *, n_rows: int = 0, n_bytes: int = 0) -> None:
        """Write down what was written."""
        quota = principal.quota
        self._charge((principal.digest, "rows"), n_rows, quota.rows_per_second)
        self._charge((principal.digest, "bytes"), n_bytes, quota.bytes_per_second)

    def _charge(self, key: tuple[str, str], amount: int, per_second: int | None) -> None:
        if per_second is None or not amount:
            return
        least_ns = self._clock.mono_ns() - BURST_NS
        used_ns = max(self._used_ns.get(key, least_ns), least_ns)
        self._used_ns[key] = used_ns + amount * NS_PER_S // per_second
        self._used_ns.move_to_end(key)
        if len(self._used_ns) > _MAX_KEYS:
            self._used_ns.popitem(last=False)
