"""From recorded rows to what agents would have reported, without inventing anything.

A compute interval is the own time before the communication that follows it; where compute follows compute, the boundary
itself is recorded as an operation on a communicator of the worker alone. Gaps that the recording does not explain
count as neither own time nor waiting. Sends and receives go on two-member communicators of each replica's pipeline, one
per link and direction, so that the k-th send meets the k-th receive; gradient and parameter collectives on one
communicator per stage; the embedding's on one per replica; the clipping of gradients, which exchanges one
norm, on one of the whole job.

Source: kinds of operation in ByteDance StragglerAnalysis recordings of Megatron-LM jobs (docs/specs/trace-format.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.errors import BadDataError
from ingero.job_traces.model import STEP, JobTrace, TraceRows
from ingero.model.arrays import BoolArray, IntArray, Records
from ingero.model.collectives import (
    COLLECTIVE_OP,
    UNKNOWN_NS,
    ClockKind,
    CollectiveOp,
    CollectiveRun,
    Rank,
)
from ingero.units import NS_PER_S

_STAGE, _LINK_UP, _LINK_DOWN, _EMBEDDING, _WORKER, _JOB = range(6)
_NORM_BYTES: Final = 4
"""Clipping exchanges one float32: the squared norm."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """How one kind of operation is read: compute when ``op`` is None."""

    op: CollectiveOp | None
    scope: int = _WORKER
    peer: int = 0
    n_bytes: int = UNKNOWN_NS
    is_microbatch: bool = False


def _find_kind(name: str) -> _Kind | None:
    """How to read an operation of this name; None when it is not known."""
    exact = {
        "forward-compute": _Kind(None, is_microbatch=True),
        "backward-compute": _Kind(None, is_microbatch=True),
        "forward-send": _Kind(CollectiveOp.SEND, _LINK_UP),
        "forward-recv": _Kind(CollectiveOp.RECV, _LINK_UP, peer=-1),
        "backward-send": _Kind(CollectiveOp.SEND, _LINK_DOWN),
        "backward-recv": _Kind(CollectiveOp.RECV, _LINK_DOWN, peer=1),
        "optimizer-clip-main-grad": _Kind(CollectiveOp.ALL_REDUCE, _JOB, n_bytes=_NORM_BYTES),
    }
    if name in exact:
        return exact[name]
    for suffix, op in (
        ("all-reduce", CollectiveOp.ALL_REDUCE),
        ("all-gather", CollectiveOp.ALL_GATHER),
        ("reduce-scatter", CollectiveOp.REDUCE_SCATTER),
        ("broadcast", CollectiveOp.BROADCAST),
    ):
        if name.endswith(suffix):
            if name.startswith("layernorm"):
                return _Kind(op, _WORKER)
            return _Kind(op, _EMBEDDING if name.startswith("embedding") else _STAGE)
    if name.endswith("compute") or name == "gc" or name.startswith("optimizer"):
        return _Kind(None)
    return None


def _hash_comm(*parts: object) -> str:
    text = "/".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _place_steps(rows: TraceRows) -> tuple[IntArray, IntArray, Records]:
    """Each row's step index and start on a timeline on which steps follow each other; and the steps."""
    numbers, step_idx = np.unique(rows.step, return_inverse=True)
    start_ns = np.round(rows.start_s * NS_PER_S).astype(np.int64)
    span_ns = np.zeros(numbers.size, np.int64)
    end_ns = start_ns + np.round(rows.duration_s * NS_PER_S).astype(np.int64)
    np.maximum.at(span_ns, step_idx, end_ns)
    low_ns = np.full(numbers.size, np.iinfo(np.int64).max)
    np.minimum.at(low_ns, step_idx, start_ns)
    length = span_ns - low_ns
    begin = np.cumsum(length) - length
    steps = np.zeros(numbers.size, STEP)
    steps["step"], steps["begin_ns"], steps["end_ns"] = numbers, begin, begin + length
    return step_idx, begin[step_idx] + start_ns - low_ns[step_idx], steps


def _own_times(
    worker: IntArray, is_compute: BoolArray, is_microbatch: BoolArray, duration_ns: IntArray
) -> tuple[IntArray, BoolArray]:
    """Own time of each row that ends a compute interval, and which rows do; rows sorted by worker and start."""
    follows = np.zeros(worker.size, bool)
    follows[:-1] = worker[1:] == worker[:-1]
    next_microbatch = np.zeros(worker.size, bool)
    next_microbatch[:-1] = is_microbatch[1:]
    is_boundary = is_microbatch & follows & next_microbatch
    is_end = ~is_compute | is_boundary
    is_last = ~follows
    cut = is_end | is_last
    interval: IntArray = np.cumsum(cut) - cut
    own = np.zeros(int(interval[-1]) + 1, np.int64)
    np.add.at(own, interval[is_compute], duration_ns[is_compute])
    return own[interval], is_end


def build_job_trace(rows: TraceRows, name: str, n_gpus_per_worker: int = 1) -> JobTrace:
    """Turn recorded rows into what each worker's agent would have reported.

    Raises:
        BadDataError: There is nothing to report: no rows, or none of a known kind.
    """
    kinds = [_find_kind(optype) for optype in rows.optypes]
    is_known = np.array([kind is not None for kind in kinds], bool)[rows.optype]
    is_known &= np.isfinite(rows.start_s) & np.isfinite(rows.duration_s) & (rows.duration_s >= 0)
    if not is_known.any():
        raise BadDataError(
            f"{name}: no operation of a known kind", hint="see docs/specs/trace-format.md"
        )
    n_unknown = int((~is_known).sum())
    rows = rows.where(is_known)
    step_idx, entry_ns, steps = _place_steps(rows)
    dps, dp_idx = np.unique(rows.dp, return_inverse=True)
    stages, stage_idx = np.unique(rows.stage, return_inverse=True)
    worker = dp_idx * stages.size + stage_idx
    is_compute_kind = np.array([kind is not None and kind.op is None for kind in kinds])
    # A batched exchange starts together: sends go first, whatever the order of the rows.
    is_send = np.array(["send" in optype for optype in rows.optypes], bool)
    order = np.lexsort((~is_send[rows.optype], entry_ns, step_idx, worker))
    table = _Table(
        worker=worker[order],
        dp_idx=dp_idx[order],
        stage_idx=stage_idx[order],
        step_idx=step_idx[order],
        optype=rows.optype[order],
        entry_ns=entry_ns[order],
        duration_ns=np.round(rows.duration_s[order] * NS_PER_S).astype(np.int64),
        is_compute=is_compute_kind[rows.optype[order]],
    )
    present = np.unique(worker)
    ranks = {
        int(w): Rank(
            cluster_id=name,
            node_id=f"dp{dps[w // stages.size]}-stage{stages[w % stages.size]}",
            rank=int(w),
            n_gpus=n_gpus_per_worker,
            labels=(("dp", str(dps[w // stages.size])), ("stage", str(stages[w % stages.size]))),
        )
        for w in present.tolist()
    }
    runs = _build_runs(table, kinds, (name, dps.size, stages.size), ranks)
    return JobTrace(name, tuple(ranks.values()), tuple(runs[w] for w in ranks), steps, n_unknown)


@dataclass(frozen=True, slots=True)
class _Table:
    """Known rows sorted by worker, step and start; every array of shape (n,)."""

    worker: IntArray
    dp_idx: IntArray
    stage_idx: IntArray
    step_idx: IntArray
    optype: IntArray
    entry_ns: IntArray
    duration_ns: IntArray
    is_compute: BoolArray


def _build_runs(
    table: _Table, kinds: list[_Kind | None], job: tuple[str, int, int], ranks: dict[int, Rank]
) -> dict[int, tuple[CollectiveRun, ...]]:
    """Every worker's runs, one per communicator."""
    name, _, n_stages = job
    known = [kind or _Kind(None) for kind in kinds]
    is_microbatch = np.array([kind.is_microbatch for kind in known])[table.optype]
    own_ns, is_end = _own_times(table.worker, table.is_compute, is_microbatch, table.duration_ns)
    at = np.flatnonzero(is_end)
    scope = np.array([kind.scope for kind in known])[table.optype[at]]
    peer = np.array([kind.peer for kind in known])[table.optype[at]]
    home = (
        table.stage_idx[at] + np.where(np.isin(scope, (_LINK_UP, _LINK_DOWN)), peer, 0)
    ) % n_stages
    home = np.where(np.isin(scope, (_EMBEDDING, _JOB)), 0, home)
    replica = np.where(np.isin(scope, (_STAGE, _JOB)), 0, table.dp_idx[at])
    comm = (scope * (int(table.dp_idx.max()) + 1) + replica) * n_stages + home
    seq = _sequence(table.worker[at], comm, table.step_idx[at])
    ops = np.zeros(at.size, COLLECTIVE_OP)
    boundary = table.is_compute[at]
    ops["seq"] = seq
    ops["entry_ns"] = table.entry_ns[at] + np.where(boundary, table.duration_ns[at], 0)
    ops["inside_ns"] = np.where(boundary, 0, table.duration_ns[at])
    ops["own_ns"] = own_ns[at]
    ops["n_bytes"] = np.array([kind.n_bytes for kind in known])[table.optype[at]]
    ops["op"] = np.array([kind.op or 0 for kind in known])[table.optype[at]]
    members = np.unique(comm * (int(table.worker.max()) + 1) + table.worker[at])
    member_comm, member_worker = np.divmod(members, int(table.worker.max()) + 1)
    order = np.lexsort((np.arange(at.size), comm, table.worker[at]))
    bounds = np.flatnonzero(np.diff(comm[order]) | np.diff(table.worker[at][order])) + 1
    runs: dict[int, list[CollectiveRun]] = {worker: [] for worker in ranks}
    for rows in np.split(order, bounds):
        worker, comm_id = int(table.worker[at[rows[0]]]), int(comm[rows[0]])
        of_comm = member_worker[member_comm == comm_id]
        runs[worker].append(
            CollectiveRun(
                rank=ranks[worker],
                comm=_hash_comm(name, comm_id),
                comm_rank=int(np.searchsorted(of_comm, worker)),
                n_ranks=of_comm.size,
                clock=ClockKind.DEVICE,
                ops=ops[rows],
            )
        )
    return {worker: tuple(of_worker) for worker, of_worker in runs.items()}


def _sequence(worker: IntArray, comm: IntArray, step_idx: IntArray) -> IntArray:
    """Sequence numbers that members count alike even where one recorded fewer operations in a step."""
    order = np.lexsort((np.arange(worker.size), step_idx, comm, worker))
    keys = np.stack([worker[order], comm[order], step_idx[order]])
    is_first = np.ones(worker.size, bool)
    is_first[1:] = (np.diff(keys, axis=1) != 0).any(axis=0)
    first = np.maximum.accumulate(np.where(is_first, np.arange(worker.size), 0))
    within = np.empty(worker.size, np.int64)
    within[order] = np.arange(worker.size) - first
    return step_idx * (int(within.max()) + 1) + within
