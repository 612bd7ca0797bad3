"""Statistics of operations: exact where the recording counted, and said where they are not."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ingero.model.events import op_name, source_name
from ingero.model.recording import Recording
from ingero.model.untrusted import clean
from ingero.recording.causal.evidence import Evidence
from ingero.recording.causal.exact import Statistics, compute_statistics


class OperationAnswer(msgspec.Struct, frozen=True):
    """One operation of one process."""

    node: str
    pid: int
    process: str
    source: str
    op: str
    basis: Annotated[
        str,
        msgspec.Meta(
            description=(
                "counted: every call, from the recorder's own counts; rows: every call has a row; estimate: "
                "from weighted "
                "rows, in whole or (a window that cuts a minute) in part; unknown: from rows, and nobody "
                "counted the others"
            )
        ),
    ]
    rows: Annotated[int, msgspec.Meta(description="calls with a row")]
    count: Annotated[int, msgspec.Meta(description="calls")]
    exact: Annotated[int, msgspec.Meta(description="calls that were counted one by one")]
    row_share: Annotated[float, msgspec.Meta(description="part of the calls that has a row")]
    in_flight: Annotated[
        int, msgspec.Meta(description="calls that had not returned; in no other number")
    ]
    errors: int
    total_ms: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float
    wall_pct: Annotated[
        float,
        msgspec.Meta(description="time in the calls of all threads / watched time, in percent"),
    ]


def list_operations(recording: Recording) -> list[OperationAnswer]:
    """Every operation of every process, most total time first; nested driver calls are rows of their own."""
    evidence = Evidence(recording)
    watched = {(p.node, p.pid): p.watched_ns for p in evidence.processes}
    of_node = [
        max(watch.unwatched.gaps(*recording.window_ns).total_ns, 1) for watch in evidence.watches
    ]
    found = [
        _answer(recording, one, watched.get((one.node, one.pid), of_node[one.node]))
        for one in compute_statistics(recording)
        if not evidence.is_observer(one.node, one.pid)
    ]
    return sorted(found, key=lambda op: (-op.total_ms, op.node, op.pid, op.op))


def _answer(recording: Recording, one: Statistics, watched_ns: int) -> OperationAnswer:
    p50, p95, p99 = (round(value / 1e3, 1) for value in one.quantiles)
    return OperationAnswer(
        node=recording.nodes[one.node],
        pid=one.pid,
        process=clean(recording.process_name(one.node, one.pid)),
        source=source_name(one.source),
        op=op_name(one.source, one.op),
        basis=one.basis.value,
        rows=one.rows,
        count=one.count,
        exact=one.exact,
        row_share=round(one.row_share, 4),
        in_flight=one.in_flight,
        errors=one.errors,
        total_ms=round(one.total_ns / 1e6, 6),
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        max_us=round(one.max_ns / 1e3, 1),
        wall_pct=round(100 * one.total_ns / watched_ns, 2),
    )
