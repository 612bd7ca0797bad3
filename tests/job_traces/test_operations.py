"""Recordings of what agents pushed: written, read and judged again."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingero.errors import BadDataError
from ingero.job_traces.operations import find_steps, read_labels, write_operations
from ingero.job_traces.readers import find_packaged, read_trace
from ingero.model.collectives import COLLECTIVE_OP, ClockKind, CollectiveOp, CollectiveRun, Rank

MS = 1_000_000
HOUR = 3_600_000 * MS


def run_of(rank, comm, rows, *, clock=ClockKind.SYNC, job="job"):
    """Each row: seq, entry (ms after an hour), inside, own (ms), bytes."""
    ops = np.zeros(len(rows), COLLECTIVE_OP)
    for at, (seq, entry, inside, own, n_bytes) in enumerate(rows):
        times = (HOUR + int(entry * MS), int(inside * MS), int(own * MS))
        ops[at] = (seq, *times, n_bytes, CollectiveOp.ALL_REDUCE, 0)
    who = Rank("prod", f"host-{rank}", rank, n_gpus=2, labels=(("dp", str(rank)),), job=job)
    return CollectiveRun(who, comm, rank, 2, clock, ops)


def steps_of(rank, n, comm="a" * 16):
    """A loop of two operations, 10 ms each."""
    rows = [(i, 10 * i + rank, 2, 7.5, 400 if i % 2 else 100) for i in range(2 * n)]
    return run_of(rank, comm, rows)


def test_what_was_pushed_is_read_again_with_whose_it_is_on_a_clock_of_its_own(tmp_path):
    path = tmp_path / "trace-x.parquet"
    runs = [steps_of(1, 3), steps_of(0, 3)]
    write_operations(path, runs, {"job": "ddp.py"}, onset_ns=HOUR + 30 * MS)
    trace = read_trace(path)
    assert [
        (w.cluster_id, w.node_id, w.rank, w.n_gpus, w.labels, w.job) for w in trace.workers
    ] == [
        ("x", "host-0", 0, 2, (("dp", "0"),), "job"),
        ("x", "host-1", 1, 2, (("dp", "1"),), "job"),
    ]
    for (run,), given in zip(trace.runs, reversed(runs), strict=True):
        assert (run.comm, run.comm_rank, run.n_ranks, run.clock) == (
            given.comm,
            given.comm_rank,
            given.n_ranks,
            given.clock,
        )
        assert (run.ops["entry_ns"] == given.ops["entry_ns"] - HOUR).all()
        for name in ("seq", "inside_ns", "own_ns", "n_bytes", "op"):
            assert run.ops[name].tolist() == given.ops[name].tolist()
    assert read_labels(path) == {"job": "ddp.py", "onset_s": 0.03}


def test_a_file_may_have_any_name_and_one_that_exists_is_replaced(tmp_path):
    path = tmp_path / os.fsdecode(b"trace-\xff.parquet")
    path.write_bytes(b"1" * 100_000)
    write_operations(path, [steps_of(0, 3), steps_of(1, 3)], {"seed": 1})
    assert read_trace(path).n_ops == 12
    assert read_labels(path)["seed"] == 1


def test_the_use_of_a_cpu_limit_is_kept_where_there_is_one(tmp_path):
    runs = [steps_of(0, 3), steps_of(1, 3)]
    write_operations(tmp_path / "without.parquet", runs, {})
    assert "limit_use" not in pq.read_schema(tmp_path / "without.parquet").names
    assert not read_trace(tmp_path / "without.parquet").runs[0][0].ops["limit_use"].any()
    runs[1].ops["limit_use"] = (0, 1, 500, 999, 1000, 1000)
    path = tmp_path / "with.parquet"
    write_operations(path, runs, {})
    kept = [run.ops["limit_use"].tolist() for (run,) in read_trace(path).runs]
    assert kept == [[0] * 6, [0, 1, 500, 999, 1000, 1000]]
    table = pq.read_table(path)
    at = table.schema.get_field_index("limit_use")
    strange = pa.array([-5, 70_000] * 6, pa.int64())
    pq.write_table(table.set_column(at, "limit_use", strange), path)
    assert read_trace(path).runs[0][0].ops["limit_use"].tolist() == [0, 1000] * 3


def test_times_are_kept_to_the_microsecond_and_an_unknown_one_stays_unknown(tmp_path):
    run = run_of(0, "b" * 16, [(0, 0, 1.0004, 2.0006, 100)])
    run.ops["own_ns"][0] = -1
    path = tmp_path / "t.parquet"
    write_operations(path, [run], {})
    (read,) = read_trace(path).runs[0]
    assert (read.ops["inside_ns"][0], read.ops["own_ns"][0]) == (1_000_000, -1)


def test_pushes_of_one_rank_become_one_run_and_a_repeated_push_counts_once(tmp_path):
    whole = steps_of(0, 4)
    parts = [
        CollectiveRun(whole.rank, whole.comm, 0, 2, whole.clock, ops)
        for ops in (whole.ops[4:], whole.ops[:4], whole.ops[2:6])
    ]
    path = tmp_path / "t.parquet"
    write_operations(path, parts, {})
    (run,) = read_trace(path).runs[0]
    assert run.ops["seq"].tolist() == list(range(8))


def test_a_step_is_the_shortest_period_of_what_a_worker_calls_once_it_calls_it_evenly():
    warm_up = [(100 + i, i, 1, 1, 7 + i) for i in range(5)]
    loop = [(i, 10 + 10 * i, 2, 5, (100, 400, 100)[i % 3]) for i in range(30)]
    steps = find_steps([[run_of(0, "c" * 16, warm_up + loop)]])
    loop_begins = [HOUR + 10 * MS + 30 * MS * k for k in range(10)]
    assert steps["begin_ns"].tolist()[-10:] == loop_begins
    assert steps["end_ns"].tolist()[-1] == HOUR + (10 + 290 + 2) * MS
    assert (steps["end_ns"][:-1] == steps["begin_ns"][1:]).all()


def test_a_worker_that_calls_without_a_period_has_a_step_an_operation():
    rows = [(i, i, 0, 0, i * i) for i in range(9)]
    assert find_steps([[run_of(0, "d" * 16, rows)]]).size == 9


def test_labels_of_a_file_without_any_are_empty():
    assert read_labels(find_packaged("AR")) == {}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda table: table.slice(0, 0), "0 operations of 0 known runs"),
        (lambda table: table.replace_schema_metadata({}), "its runs cannot be read"),
        (lambda table: table.replace_schema_metadata({"ingero.runs": "[]"}), "of 0 known runs"),
        (lambda table: table.replace_schema_metadata({"ingero.runs": '[{"rank": 0}]'}), "labels"),
    ],
)
def test_a_damaged_file_is_refused_with_what_is_wrong(tmp_path, change, told):
    path = tmp_path / "t.parquet"
    write_operations(path, [steps_of(0, 2)], {})
    pq.write_table(change(pq.read_table(path)), path)
    with pytest.raises(BadDataError, match=told):
        read_trace(path)


def test_a_file_with_a_sequence_number_that_nobody_can_count_on_from_is_refused(tmp_path):
    path = tmp_path / "t.parquet"
    write_operations(path, [run_of(0, "a" * 16, [(2**63 - 1, 0, 1, 1, 100)])], {})
    with pytest.raises(BadDataError, match="column seq holds 9223372036854775807"):
        read_trace(path)


def test_labels_that_are_no_object_are_refused(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({"ingero.labels": "[1]"}), path)
    with pytest.raises(BadDataError, match="a JSON object"):
        read_labels(path)
