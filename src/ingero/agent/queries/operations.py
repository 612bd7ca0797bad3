"""Statistics of operations: exact where the recording counted, from its rows where it did not."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from ingero.agent.causal.evidence import Evidence, Process, Rows, split_by
from ingero.model.events import op_name, source_name
from ingero.model.recording import Recording
from ingero.model.untrusted import clean


class OperationAnswer(msgspec.Struct, frozen=True):
    """One operation of one process."""

    node: str
    pid: int
    process: str
    source: str
    op: str
    rows: Annotated[int, msgspec.Meta(description="calls with a row; percentiles are of these")]
    count: Annotated[int, msgspec.Meta(description="calls there were, at least")]
    total_ms: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    wall_pct: Annotated[
        float, msgspec.Meta(description="time under way / watched time, in percent")
    ]


def list_operations(recording: Recording) -> list[OperationAnswer]:
    """Every operation of every process, most total time first; nested driver calls are rows of their own."""
    evidence = Evidence(recording)
    found = [
        _summarise(evidence, process, rows)
        for process in evidence.processes
        for rows in split_by(process.rows, [process.rows.codes])
    ]
    return sorted(found, key=lambda op: (-op.total_ms, op.node, op.pid, op.op))


def _summarise(evidence: Evidence, process: Process, rows: Rows) -> OperationAnswer:
    source, op = int(rows.codes[0]) >> 8, int(rows.codes[0]) & 0xFF
    durations = rows.durations
    count = evidence.books.count(process.node, process.pid, ((source, op),), process.window_ns)
    p50, p95, p99 = np.percentile(durations, (50, 95, 99), method="inverted_cdf") / 1e3
    return OperationAnswer(
        node=evidence.recording.nodes[process.node],
        pid=process.pid,
        process=clean(process.name),
        source=source_name(source),
        op=op_name(source, op),
        rows=len(rows),
        count=count.seen,
        total_ms=round(float(durations.sum()) / 1e6, 3),
        p50_us=round(float(p50), 1),
        p95_us=round(float(p95), 1),
        p99_us=round(float(p99), 1),
        max_us=round(float(durations.max()) / 1e3, 1),
        wall_pct=round(100 * rows.intervals.total_ns / process.watched_ns, 2),
    )
