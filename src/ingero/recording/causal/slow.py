"""Which calls are slow: against their own kind, size and stream, never against all calls together."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingero.model.arrays import IntArray
from ingero.model.operations import OpKind
from ingero.recording.causal.evidence import EventRows, Evidence, Process, remembered, split_by
from ingero.units import NS_PER_US

_MIN_CALLS: Final = 10
_RATIO: Final = 3.0
_MIN_EXTRA_NS: Final = 50 * NS_PER_US
_SIZED: Final = (OpKind.COPY, OpKind.ALLOC, OpKind.HOST_ALLOC)


def _classes(evidence: Evidence, calls: EventRows) -> list[IntArray]:
    """Keys of the groups within which durations may be compared."""
    arg0 = evidence.column("arg0", calls)
    sizes = np.zeros(len(calls), np.int64)
    is_sized = np.isin(calls.kinds, _SIZED)
    sizes[is_sized] = np.log2(np.maximum(arg0[is_sized], 1)).astype(np.int64)
    streams = np.zeros(len(calls), np.int64)
    is_launch = np.isin(calls.kinds, (OpKind.LAUNCH, OpKind.GRAPH_LAUNCH))
    streams[is_launch] = evidence.column("arg1", calls)[is_launch]
    is_sync = calls.kinds == OpKind.SYNC
    streams[is_sync] = arg0[is_sync]
    return [calls.codes, sizes, streams]


def iter_classes(evidence: Evidence, calls: EventRows) -> list[EventRows]:
    """Calls in groups of one operation, one size class and one stream, each in time order."""
    return list(split_by(calls, _classes(evidence, calls)))


@remembered
def find_slow(evidence: Evidence, process: Process) -> EventRows:
    """Calls slower than three times their class's median; classes of fewer than ten calls have no say."""
    slow = [np.empty(0, np.int64)]
    for same in iter_classes(evidence, process.calls):
        if len(same) >= _MIN_CALLS:
            typical = np.median(same.durations)
            limit = max(_RATIO * typical, typical + _MIN_EXTRA_NS)
            slow.append(same.idx[same.durations > limit])
    return process.calls.where(np.isin(process.calls.idx, np.concatenate(slow)))
