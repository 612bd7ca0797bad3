"""When operations on streams were over, as the host's waits for streams and devices show it."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import IntArray, Records

EVERY_STREAM: Final = -1
"""The stream of a wait for a whole device."""
_OF_A_DEVICE: Final = (EVERY_STREAM, 0, 1, 2)
"""What means another stream on each device: all of it, and the default streams by the numbers that cuda.h has."""

WAIT: Final = np.dtype([
    ("pid", "<u4"),
    ("stream", "<i8"),
    ("device", "<i4"),
    ("entry_ns", "<i8"),
    ("exit_ns", "<i8"),
    ("is_ordered", "?"),
])
"""One stream that a wait of a process ends, on the monotonic clock; device -1: it is not known of which."""


def end_rows(pending: Records, waits: Records) -> None:
    """Fill in when each row was left: the first end of a wait for its stream that began after its enqueue.

    Args:
        pending: With ``stream``, ``device``, ``exit_ns``, ``leave_ns`` (negative: not left), ``is_ordered``; changed.
        waits: Rows of WAIT of the same process.
    """
    if not len(pending) or not len(waits):
        return
    waits = waits[np.argsort(waits["entry_ns"], kind="stable")]
    for stream, device in np.unique(pending[["stream", "device"]]).tolist():
        is_there = (pending["stream"] == stream) & (pending["device"] == device)
        mine = np.flatnonzero(is_there & (pending["leave_ns"] < 0))
        ends = _find_waits_for(waits, stream, device)
        first = np.searchsorted(ends["entry_ns"], pending["exit_ns"][mine], "left")
        is_ended = first < len(ends)
        earliest = _find_least_from(ends["exit_ns"])[first[is_ended]]  # begun later, ended earlier
        for name, values in (("leave_ns", "exit_ns"), ("is_ordered", "is_ordered")):
            pending[name][mine[is_ended]] = ends[values][earliest]


def _find_waits_for(waits: Records, stream: int, device: int) -> Records:
    """Waits that may end what is on a stream of a device; -1: it is not known of which."""
    is_for = (waits["stream"] == stream) | (waits["stream"] == EVERY_STREAM)
    if device >= 0:
        is_other = (waits["device"] >= 0) & (waits["device"] != device)
        is_for &= ~(is_other & np.isin(waits["stream"], _OF_A_DEVICE))
    found: Records = waits[is_for]
    return found


def _find_least_from(values: IntArray) -> IntArray:
    """For each place, that of the least value from there on; shape (n,), as of ``values``."""
    reverse = values[::-1]
    is_least = reverse == np.minimum.accumulate(reverse)
    least = np.maximum.accumulate(np.where(is_least, np.arange(len(values)), 0))
    return (len(values) - 1 - least)[::-1]
