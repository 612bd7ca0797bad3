"""A job's collectives as its agents pushed them, in one Parquet file: a row an operation, whose it is, and labels.

Nothing is converted: own times, clocks and communicators are those that Fleet received. ``docs/specs/trace-format.md``
is the specification.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ingero.errors import BadDataError
from ingero.job_traces.model import STEP, JobTrace
from ingero.job_traces.parquet import create_parquet, open_parquet
from ingero.model.arrays import IntArray, Records
from ingero.model.collectives import (
    COLLECTIVE_OP,
    FULL_LIMIT,
    MAX_SEQ,
    ClockKind,
    CollectiveRun,
    Rank,
)
from ingero.units import NS_PER_S, NS_PER_US

if TYPE_CHECKING:
    import pyarrow as pa

RUNS: Final = b"ingero.runs"
LABELS: Final = b"ingero.labels"
_LIMIT_USE: Final = "limit_use"
_NAMES: Final = tuple(str(name) for name in COLLECTIVE_OP.names or ())
COLUMNS: Final = ("run", *_NAMES)
"""All that a file may have; `_LIMIT_USE` only where a rank had a CPU limit."""
_TIMES: Final = ("entry_ns", "inside_ns", "own_ns")
_ALIKE: Final = 0.9
"""Of the operations that a period has to foretell."""
_MAX_PERIOD: Final = 1000
"""Operations of a step that are tried."""


def is_operations(names: Iterable[str]) -> bool:
    """Whether a Parquet file with these columns is one of ours."""
    return set(COLUMNS) - {_LIMIT_USE} <= set(names)


def write_operations(
    path: Path,
    runs: Iterable[CollectiveRun],
    labels: Mapping[str, Any],
    onset_ns: int | None = None,
) -> None:
    """Write what agents pushed, on a clock that begins with the first operation.

    Times are rounded to microseconds: a probe's own cost is of that size, and the file is a third as long.

    Args:
        path: The file.
        runs: In any order, all on one clock; those of one rank on one communicator become one.
        labels: JSON-able; they are what is known of the truth, and no detector reads them.
        onset_ns: When a fault began, on the clock of the runs; ``onset_s`` of the labels.
    """
    import pyarrow as pa  # noqa: PLC0415 - 100 ms that only a writer should pay
    import pyarrow.parquet as pq  # noqa: PLC0415

    whole = merge_runs(runs)
    ops = (
        np.concatenate([run.ops for run in whole]) if whole else np.zeros(0, COLLECTIVE_OP)
    ).copy()
    origin_ns = int(ops["entry_ns"].min()) if ops.size else 0
    ops["entry_ns"] -= origin_ns
    onset_s = None if onset_ns is None else round((onset_ns - origin_ns) / NS_PER_S, 3)
    for name in _TIMES:
        known = ops[name] >= 0
        ops[name][known] = (ops[name][known] + NS_PER_US // 2) // NS_PER_US * NS_PER_US
    columns: dict[str, Any] = {name: ops[name] for name in _NAMES}
    columns["run"] = np.repeat(np.arange(len(whole)), [run.ops.size for run in whole])
    if not ops[_LIMIT_USE].any():
        del columns[_LIMIT_USE]
    table = pa.table({
        name: columns[name] for name in COLUMNS if name in columns
    }).replace_schema_metadata({
        RUNS: json.dumps([_describe(run) for run in whole]),
        LABELS: json.dumps({**labels, "onset_s": onset_s}),
    })
    with create_parquet(path) as file:
        pq.write_table(
            table,
            file,
            compression="zstd",
            compression_level=19,
            use_dictionary=["run", "n_bytes", "op"],
            column_encoding=dict.fromkeys(("seq", *_TIMES), "DELTA_BINARY_PACKED"),
            write_statistics=False,
        )


def merge_runs(runs: Iterable[CollectiveRun]) -> list[CollectiveRun]:
    """One run for each rank, communicator and clock; of an operation that was pushed twice the first stays."""
    parts = defaultdict(list)
    for run in runs:
        parts[run.rank.worker, run.comm, run.clock].append(run)
    merged = []
    for key in sorted(parts):
        ops = np.concatenate([run.ops for run in parts[key]])
        ops = ops[np.unique(ops["seq"], return_index=True)[1]]
        merged.append(replace(parts[key][0], ops=ops[np.argsort(ops["entry_ns"], kind="stable")]))
    return merged


def _describe(run: CollectiveRun) -> dict[str, Any]:
    return {
        "node_id": run.rank.node_id,
        "rank": run.rank.rank,
        "n_gpus": run.rank.n_gpus,
        "job": run.rank.job,
        "labels": dict(run.rank.labels),
        "comm": run.comm,
        "comm_rank": run.comm_rank,
        "n_ranks": run.n_ranks,
        "clock": run.clock.name.lower(),
    }


def read_labels(path: Path) -> dict[str, Any]:
    """What is known of a recording beside its operations; empty where it has none.

    Raises:
        BadDataError: It is no Parquet file, or its labels are no JSON object.
    """
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with open_parquet(path) as file:
            found = json.loads((pq.read_schema(file).metadata or {}).get(LABELS, b"{}"))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadDataError(f"{path}: its labels cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise BadDataError(f"{path}: its labels are {found!r:.60}; a JSON object")
    return found


def build_operations_trace(table: pa.Table, name: str) -> JobTrace:
    """Turn a file's rows into what each worker's agent reported.

    Raises:
        BadDataError: There are no rows, or they do not fit what the file says of their runs.
    """
    ops = np.zeros(table.num_rows, COLLECTIVE_OP)
    try:
        for column in _NAMES:
            if column != _LIMIT_USE:
                ops[column] = table[column].to_numpy()
            elif column in table.column_names:
                ops[column] = np.clip(table[column].to_numpy(), 0, FULL_LIMIT)
        at = table["run"].to_numpy()
        stated = json.loads((table.schema.metadata or {})[RUNS])
        runs = [_build_run(run, name, ops[at == number]) for number, run in enumerate(stated)]
    except (KeyError, TypeError, ValueError) as error:
        raise BadDataError(f"{name}: its runs cannot be read: {error!r}") from error
    if (ops["seq"] > MAX_SEQ).any():
        raise BadDataError(f"{name}: column seq holds {ops['seq'].max()}; at most {MAX_SEQ}")
    runs = [run for run in runs if run.ops.size]
    if not runs or (at < 0).any() or (at >= len(stated)).any():
        raise BadDataError(f"{name}: {table.num_rows} operations of {len(runs)} known runs")
    by_rank: dict[Rank, list[CollectiveRun]] = defaultdict(list)
    for run in runs:
        by_rank[run.rank].append(run)
    ranks = tuple(sorted(by_rank, key=lambda rank: rank.worker))
    steps = find_steps([by_rank[rank] for rank in ranks])
    return JobTrace(name, ranks, tuple(tuple(by_rank[rank]) for rank in ranks), steps)


def _build_run(stated: Mapping[str, Any], name: str, ops: Records) -> CollectiveRun:
    labels = tuple(sorted((str(key), str(value)) for key, value in stated["labels"].items()))
    return CollectiveRun(
        rank=Rank(
            cluster_id=name,
            node_id=str(stated["node_id"]),
            rank=int(stated["rank"]),
            n_gpus=int(stated["n_gpus"]),
            labels=labels,
            job=str(stated["job"]),
        ),
        comm=str(stated["comm"]),
        comm_rank=int(stated["comm_rank"]),
        n_ranks=int(stated["n_ranks"]),
        clock=ClockKind[str(stated["clock"]).upper()],
        ops=ops,
    )


def find_steps(runs: list[list[CollectiveRun]]) -> Records:
    """Where the job's steps lie: each begins where the first worker enters the first operation of its period.

    A training loop calls the same operations on the same communicators in each step, so a step is the shortest period
    of what a worker calls, once it calls it evenly: in the second half of what it reported.

    Args:
        runs: By worker.

    Returns:
        Rows of STEP, numbered from 0; the last ends with the last operation of all.
    """
    entered, kinds = _list_calls(runs[0])
    period = _find_period(kinds[kinds.size // 2 :])
    begin = entered[kinds.size % period :: period]
    ends = [run.ops["entry_ns"] + np.maximum(run.ops["inside_ns"], 0) for of in runs for run in of]
    steps = np.zeros(begin.size, STEP)
    steps["step"], steps["begin_ns"] = np.arange(begin.size), begin
    steps["end_ns"] = np.append(begin[1:], max(int(end.max()) for end in ends))
    return steps


def _list_calls(runs: list[CollectiveRun]) -> tuple[IntArray, IntArray]:
    """When one worker entered each operation, ascending, and a number for what it called there."""
    entered = np.concatenate([run.ops["entry_ns"] for run in runs])
    called = np.concatenate([
        np.stack([np.full(run.ops.size, at), run.ops["op"], run.ops["n_bytes"]], axis=1)
        for at, run in enumerate(runs)
    ])
    order = np.argsort(entered, kind="stable")
    return entered[order], np.unique(called[order], axis=0, return_inverse=True)[1].ravel()


def _find_period(kinds: IntArray) -> int:
    """The shortest period of a sequence; 1 where it has none. A barrier, a checkpoint or a job's end may be between."""
    for period in range(1, min(_MAX_PERIOD, kinds.size // 2) + 1):
        if np.mean(kinds[period:] == kinds[:-period]) >= _ALIKE:
            return period
    return 1
