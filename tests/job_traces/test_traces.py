"""Reading recordings and turning them into what agents would have reported."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.support.synthetic_jobs import JobShape, build_work, normal_noise, run_job, write_trace

from ingero.errors import BadDataError
from ingero.job_traces.convert import build_job_trace
from ingero.job_traces.model import TraceRows, iter_pushes
from ingero.job_traces.operations import read_labels
from ingero.job_traces.readers import PACKAGED, find_packaged, read_straggler_rows, read_trace
from ingero.model.collectives import CollectiveOp
from ingero.units import NS_PER_S

OPS = (
    "forward-compute",
    "forward-send",
    "forward-recv",
    "gc",
    "grads-reduce-scatter",
    "backward-compute",
)


def rows(*table, optypes=OPS):
    """Each row: dp, stage, step, optype, start, duration."""
    dp, stage, step = (np.array([row[i] for row in table], np.int64) for i in range(3))
    optype = np.array([optypes.index(row[3]) for row in table], np.int64)
    start, duration = (np.array([row[i] for row in table], float) for i in (4, 5))
    return TraceRows(dp, stage, step, optype, start, duration, optypes)


def simulated(n_dp=2, n_stages=3, n_steps=2):
    shape = JobShape(n_dp, n_stages, n_microbatches=4, n_steps=n_steps)
    work = build_work(shape, normal_noise(0.02), np.random.default_rng(0))
    return run_job(shape, work)


def test_compute_is_the_own_time_of_the_communication_behind_it():
    trace = build_job_trace(
        rows(
            (0, 0, 7, "forward-compute", 0.0, 0.2),
            (0, 0, 7, "gc", 0.2, 0.05),
            (0, 0, 7, "grads-reduce-scatter", 0.3, 0.1),
            (1, 0, 7, "grads-reduce-scatter", 0.2, 0.2),
        ),
        "t",
    )
    first, second = (runs[0].ops for runs in trace.runs)
    assert first["own_ns"].tolist() == [250_000_000], "the gap of 50 ms is nobody's work"
    assert first["entry_ns"].tolist() == [300_000_000]
    assert first["inside_ns"].tolist() == [100_000_000]
    assert second["own_ns"].tolist() == [0]
    assert trace.find_step(300_000_000) == 7


def test_compute_behind_compute_ends_at_a_boundary_of_the_worker_alone():
    trace = build_job_trace(
        rows(
            (0, 0, 1, "backward-compute", 0.0, 0.4),
            (0, 0, 1, "forward-compute", 0.4, 0.2),
            (0, 0, 1, "forward-send", 0.6, 0.1),
            (0, 1, 1, "forward-recv", 0.0, 0.7),
        ),
        "t",
    )
    boundary, send = sorted(trace.runs[0], key=lambda run: run.n_ranks)
    assert boundary.ops["own_ns"].tolist() == [400_000_000]
    assert boundary.ops["inside_ns"].tolist() == [0]
    assert boundary.ops["op"].tolist() == [CollectiveOp.UNKNOWN]
    assert send.ops["own_ns"].tolist() == [200_000_000]


def test_in_a_batched_exchange_the_send_comes_first_whatever_the_order_of_rows():
    names = ("forward-compute", "backward-recv", "forward-send")
    table = [(0, 0, 1, "forward-compute", 0.0, 0.2)]
    for order in (names[1:], names[:0:-1]):
        batch = [(0, 0, 1, name, 0.2, 0.1) for name in order]
        peer = [(0, 1, 1, "backward-recv", 0.0, 0.1)]
        trace = build_job_trace(rows(*table, *batch, *peer, optypes=names), "t")
        own = {int(run.ops["op"][0]): run.ops["own_ns"].tolist() for run in trace.runs[0]}
        assert own == {CollectiveOp.SEND: [200_000_000], CollectiveOp.RECV: [0]}


def test_steps_follow_each_other_without_the_gaps_between_their_numbers():
    trace = build_job_trace(
        rows(
            (0, 0, 404, "grads-reduce-scatter", 0.5, 1.5),
            (0, 0, 16, "grads-reduce-scatter", 0.0, 1.0),
        ),
        "t",
    )
    assert trace.steps["step"].tolist() == [16, 404]
    assert trace.steps["begin_ns"].tolist() == [0, NS_PER_S]
    assert [trace.find_step(t) for t in (0, NS_PER_S, 2 * NS_PER_S, 9 * NS_PER_S, -1)] == [
        16,
        404,
        404,
        None,
        None,
    ]


def test_every_operation_meets_its_partners_under_one_sequence_number():
    trace = build_job_trace(simulated(), "t")
    seqs, members = {}, {}
    for runs in trace.runs:
        for run in runs:
            seqs.setdefault(run.comm, []).append(run.ops["seq"].tolist())
            members.setdefault(run.comm, []).append((run.n_ranks, run.comm_rank, run.rank))
    for comm, of_comm in seqs.items():
        assert all(one == of_comm[0] for one in of_comm)
        assert len(of_comm) == members[comm][0][0]
        assert sorted(m[1] for m in members[comm]) == list(range(len(of_comm)))
    sizes = sorted(found[0][0] for found in members.values())
    assert sizes == [1] * 4 + [2] * 11, "links 2×2×2, stages 3, first and last stages' boundaries 4"


def test_a_send_waits_for_nobody_that_is_not_its_receiver():
    trace = build_job_trace(simulated(n_dp=1), "t")
    by_comm = {}
    for runs in trace.runs:
        for run in runs:
            by_comm.setdefault(run.comm, []).append(run)
    links = [pair for pair in by_comm.values() if len(pair) == 2]
    assert links
    for one, other in links:
        stages = {int(dict(run.rank.labels)["stage"]) for run in (one, other)}
        assert max(stages) - min(stages) == 1
        kinds = {int(run.ops["op"][0]) for run in (one, other)}
        assert kinds == {CollectiveOp.SEND, CollectiveOp.RECV}


def test_pushes_carry_every_operation_once_and_only_what_has_ended():
    trace = build_job_trace(simulated(), "t")
    carried, previous = 0, 0
    for push in iter_pushes(trace, NS_PER_S // 2):
        assert push.at_ns >= previous
        previous = push.at_ns
        for run in push.runs:
            assert (run.ops["entry_ns"] + run.ops["inside_ns"] < push.at_ns).all()
            carried += run.ops.size
    assert carried == trace.n_ops


def test_health_of_a_slow_worker_falls_below_its_peers():
    table = simulated(n_dp=4, n_stages=1, n_steps=4)
    slow = (table.dp == 2) & (table.optype <= 1)
    trace = build_job_trace(table.with_durations(np.where(slow, 2.0, 1.0) * table.duration_s), "t")
    first = list(iter_pushes(trace, 2 * NS_PER_S))[:4]
    scores = [push.health_score for push in first]
    assert min(scores) == scores[2]


def test_a_written_trace_reads_back_as_it_was(tmp_path):
    table = simulated()
    path = tmp_path / "trace-x.parquet"
    write_trace(table, path)
    back = read_straggler_rows(path)
    for name in ("dp", "stage", "step", "optype"):
        assert (getattr(back, name) == getattr(table, name)).all()
    assert back.start_s == pytest.approx(table.start_s, rel=1e-6)
    assert read_trace(path).name == "x"
    assert read_trace(path).workers[0].n_gpus == 1
    (tmp_path / "meta-x.yaml").write_text("trial_name: x\ntp_size: 8\n")
    assert read_trace(path).workers[0].n_gpus == 8


def test_plain_strings_other_types_and_chunks_are_read_alike(tmp_path):
    table = simulated()
    path = tmp_path / "a.parquet"
    write_trace(table, path)
    plain = pq.read_table(path)
    at = plain.column_names.index("optype")
    plain = plain.set_column(at, "optype", plain["optype"].cast(pa.string()))
    at = plain.column_names.index("dp_rank")
    plain = plain.set_column(at, "dp_rank", plain["dp_rank"].cast(pa.float64()))
    half = plain.num_rows // 2
    chunked = pa.concat_tables([plain.slice(0, half), plain.slice(half)])
    pq.write_table(chunked, tmp_path / "b.parquet", row_group_size=100)
    one, two = read_trace(path), read_trace(tmp_path / "b.parquet")
    assert one.n_ops == two.n_ops
    assert [w.labels for w in one.workers] == [w.labels for w in two.workers]


def test_rows_of_unknown_kind_or_without_a_duration_are_left_out_and_counted():
    table = rows(
        (0, 0, 1, "grads-reduce-scatter", 0.0, 1.0),
        (0, 0, 1, "cosmic-ray", 0.0, 1.0),
        (0, 0, 1, "grads-reduce-scatter", 1.0, float("nan")),
        optypes=("grads-reduce-scatter", "cosmic-ray"),
    )
    trace = build_job_trace(table, "t")
    assert (trace.n_ops, trace.n_unknown_rows) == (1, 2)


@pytest.mark.parametrize(
    ("content", "description"),
    [
        (b"", "not a trace of a known format"),
        (b"hello, world", "not a trace of a known format"),
        (b"PAR1 and then nothing", "cannot be read as Parquet"),
    ],
)
def test_foreign_and_truncated_files_are_refused_with_the_reason(tmp_path, content, description):
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(BadDataError, match=description):
        read_trace(path)


def test_a_name_that_is_not_utf8_is_one(tmp_path, data_dir):
    recording = data_dir / "jobs/ddp.cpu-hog-3.s0.parquet"
    named = tmp_path / os.fsdecode(b"job\xff.parquet")
    shutil.copy(recording, named)
    trace = read_trace(named)
    assert trace.n_ops == read_trace(recording).n_ops
    assert {worker.cluster_id for worker in trace.workers} == {r"job\xff"}  # it is sent as UTF-8
    assert read_labels(named) == read_labels(recording)


def test_no_thread_of_arrows_holds_a_file_of_pythons(monkeypatch, data_dir):
    """The last to let go of one while Python ends, it ends the process by SIGABRT."""
    read, seen = pq.read_table, []
    monkeypatch.setattr(
        pq, "read_table", lambda file, **options: seen.append(file) or read(file, **options)
    )
    for path in (find_packaged("AR"), *sorted((data_dir / "cpu_limits").glob("*.parquet"))):
        read_trace(path)
    assert len(seen) >= 2
    assert {type(file) for file in seen} == {pa.OSFile}


def test_missing_files_and_missing_columns_are_named(tmp_path):
    with pytest.raises(BadDataError, match="No such file"):
        read_trace(tmp_path / "none.parquet")
    pq.write_table(pa.table({"step": [1], "stage": [0]}), tmp_path / "y.parquet")
    with pytest.raises(BadDataError, match="dp_rank, optype, start_ts, duration"):
        read_trace(tmp_path / "y.parquet")


def test_a_trace_without_rows_is_refused(tmp_path):
    write_trace(simulated(), tmp_path / "z.parquet")
    empty = pq.read_table(tmp_path / "z.parquet").slice(0, 0)
    pq.write_table(empty, tmp_path / "z.parquet")
    with pytest.raises(BadDataError, match="no rows"):
        read_trace(tmp_path / "z.parquet")


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_recordings_are_there_with_their_provenance(name):
    path = find_packaged(name)
    assert isinstance(path, Path)
    assert read_trace(path).n_ops > 0
    assert "github.com" in path.with_name("PROVENANCE.md").read_text()
    assert find_packaged(name + "?") is None


def test_virtual_pipeline_stages_share_links_in_the_order_of_time():
    """With several chunks per stage the last stage sends to the first: a link like any other."""
    table = rows(
        (0, 0, 1, "forward-compute", 0.0, 1.0),
        (0, 1, 1, "forward-send", 1.0, 0.1),
        (0, 0, 1, "forward-recv", 1.0, 0.1),
        optypes=("forward-compute", "forward-send", "forward-recv"),
    )
    trace = build_job_trace(table, "t")
    comms = {run.comm for runs in trace.runs for run in runs if run.n_ranks == 2}
    assert len(comms) == 1
    assert replace(trace, name="u").n_ops == trace.n_ops
