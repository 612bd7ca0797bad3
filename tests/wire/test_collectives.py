"""Columnar collective batches against their specification."""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.errors import BadDataError
from ingero.model.collectives import (
    COLLECTIVE_OP,
    MAX_SEQ,
    ClockKind,
    CollectiveOp,
    CollectiveRun,
    Rank,
)
from ingero.otlp.codec import (
    build_logs,
    build_value,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
    structs,
)
from ingero.otlp.names import Signal
from ingero.wire.collectives import (
    MAX_DURATION_NS,
    MAX_EXPORT_OPS,
    MAX_OPS,
    build_collectives,
    pack_ops,
    read_collectives,
    unpack_ops,
)

SPEC = Path(__file__).parents[2] / "docs/specs/collective-batch.md"
EXAMPLE = np.array(
    [
        (7, 1_000_000, 200, -1, 1 << 20, CollectiveOp.ALL_REDUCE, 0),
        (8, 1_000_500, 150, 300, 1 << 20, CollectiveOp.ALL_REDUCE, 0),
        (9, 1_001_100, 180, 450, 1 << 20, CollectiveOp.ALL_REDUCE, 0),
    ],
    COLLECTIVE_OP,
)

rows = st.lists(
    st.tuples(
        st.integers(0, MAX_SEQ),
        st.integers(0, 2**63 - 1),
        st.integers(-1, MAX_DURATION_NS),
        st.integers(-1, MAX_DURATION_NS),
        st.integers(-1, 2**63 - 1),
        st.sampled_from(CollectiveOp),
        st.just(0),
    ),
    max_size=40,
)


def run_of(ops, **changes):
    values = {
        "rank": Rank("prod a", "n1", 3, 2, (("dp", "0"), ("pp", "1")), "4711"),
        "comm": "00000000deadbeef",
        "comm_rank": 1,
        "n_ranks": 8,
        "clock": ClockKind.DEVICE,
        "ops": ops,
    }
    return CollectiveRun(**{**values, **changes})


def obvious_decode(body):
    """The specification's formulas, one integer at a time."""
    n = struct.unpack_from("<I", body, 8)[0]
    at, columns = 120, []
    for c in range(6):
        mode, width, first, base = struct.unpack_from("<BBQQ", body, 12 + 18 * c)
        total, values = first, []
        for i in range(n):
            offset = int.from_bytes(body[at + i * width : at + (i + 1) * width], "little")
            total = (total + base + offset) % 2**64
            value = total if mode else (base + offset) % 2**64
            values.append(value if c == 0 or value < 2**63 else value - 2**64)
        at += width * n
        columns.append(values)
    return [(*row, 0) for row in zip(*columns, strict=True)]  # the last is an attribute


@given(rows)
def test_any_rows_come_back_and_match_the_specification(values):
    ops = np.array(values, COLLECTIVE_OP)
    body = pack_ops(ops)
    assert unpack_ops(body).tolist() == ops.tolist()
    assert obvious_decode(body) == ops.tolist()


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_bad_data(body):
    with pytest.raises(BadDataError):
        unpack_ops(body)


@given(rows, st.data())
def test_a_changed_byte_gives_rows_or_bad_data(values, data):
    body = bytearray(pack_ops(np.array(values, COLLECTIVE_OP)))
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    try:
        ops = unpack_ops(bytes(body))
    except BadDataError:
        return
    assert len(ops) == len(values)
    assert ops["op"].max(initial=0) <= max(CollectiveOp)
    assert ops["entry_ns"].min(initial=0) >= 0


def test_the_example_in_the_specification_is_what_the_code_does():
    block = re.search(r"```hex\n(.*?)```", SPEC.read_text(), re.DOTALL)[1]
    body = bytes.fromhex(re.sub(r"#.*", "", block))
    assert unpack_ops(body).tolist() == EXAMPLE.tolist()
    assert pack_ops(EXAMPLE) == body


def test_a_thousand_ordinary_operations_take_under_half_of_their_rows():
    rng = np.random.default_rng(7)
    ops = np.zeros(1000, COLLECTIVE_OP)
    ops["seq"] = np.arange(1000)
    ops["inside_ns"] = rng.integers(10**5, 10**7, 1000)
    ops["own_ns"] = rng.integers(10**6, 10**8, 1000)
    ops["entry_ns"] = 1_795_230_273_280_661_023 + np.cumsum(ops["inside_ns"] + ops["own_ns"])
    ops["op"] = CollectiveOp.ALL_REDUCE
    assert len(pack_ops(ops)) < ops.nbytes / 2


def test_where_a_process_runs_is_on_its_resource_and_says_nothing_of_who_it_is():
    pods = [(("k8s.namespace.name", "ml"), ("k8s.pod.name", name)) for name in ("a", "b")]
    ranks = [Rank("c", "n", rank, resource=pods[rank % 2]) for rank in range(3)]
    export = build_collectives([run_of(EXAMPLE, rank=rank) for rank in ranks], 5)
    assert len(export.tree.resource_logs) == 2
    read = read_collectives(decode_protobuf(encode_protobuf(export), Signal.LOGS))
    places = {run.rank.rank: run.rank.resource for run in read.runs}
    assert places == {0: pods[0], 1: pods[1], 2: pods[0]}
    assert ranks[0] == Rank("c", "n", 0)


def test_a_place_that_is_no_text_or_too_long_is_left_out():
    bad = (("k8s.pod.name", "x" * 257), ("slurm.job.id", 7), ("container.id", ""))
    rank = Rank("c", "n", 0, resource=bad)
    (run,) = read_collectives(build_collectives([run_of(EXAMPLE, rank=rank)], 5)).runs
    assert run.rank.resource == ()


def patched(at, *values):
    body = bytearray(pack_ops(EXAMPLE))
    body[at : at + len(values)] = bytes(values)
    return bytes(body)


HEADERS = {"magic": 0, "version": 4, "columns": 5, "reserved": 6, "mode": 12, "width": 13}


@pytest.mark.parametrize("at", HEADERS.values(), ids=HEADERS)
def test_a_header_of_another_kind_is_refused(at):
    with pytest.raises(BadDataError):
        unpack_ops(patched(at, 77))


def test_a_length_that_is_not_what_the_header_says_is_refused_before_allocation():
    body = pack_ops(EXAMPLE)
    for wrong in (body[:-1], body + b"\0", patched(8, 0xFF, 0xFF, 0, 0), patched(8, *b"\xff" * 4)):
        with pytest.raises(BadDataError, match=r"says it has|operations"):
            unpack_ops(wrong)


def test_an_op_column_without_width_is_refused():
    # 65 535 operations in 120 bytes would otherwise be 2.7 MB of rows.
    body = bytearray(pack_ops(EXAMPLE[:0]))
    struct.pack_into("<I", body, 8, MAX_OPS - 1)
    body[12 + 18 * 5 + 1] = 0
    with pytest.raises(BadDataError, match="op column"):
        unpack_ops(bytes(body))


@pytest.mark.parametrize(
    ("column", "value"),
    [("entry_ns", -1), ("inside_ns", -2), ("own_ns", -2), ("n_bytes", -2),
     ("inside_ns", MAX_DURATION_NS + 1), ("own_ns", MAX_DURATION_NS + 1),
     ("seq", MAX_SEQ + 1), ("seq", 2**63 - 1), ("seq", 2**64 - 1)],
)  # fmt: skip
def test_values_out_of_range_are_refused(column, value):
    ops = EXAMPLE.copy()
    ops[column][1] = value
    with pytest.raises(BadDataError, match=column):
        unpack_ops(pack_ops(ops))


def test_an_operation_of_a_later_version_is_unknown():
    ops = EXAMPLE.copy()
    ops["op"] = (1, 200, 3)
    assert unpack_ops(pack_ops(ops))["op"].tolist() == [1, CollectiveOp.UNKNOWN, 3]


def through(export, encoding):
    if encoding == "protobuf":
        return decode_protobuf(encode_protobuf(export), Signal.LOGS)
    if encoding == "json":
        return decode_export(encode_json(export), Signal.LOGS, "application/json")
    return export


def assert_same(left, right):
    assert (left.rank, left.comm, left.comm_rank) == (right.rank, right.comm, right.comm_rank)
    assert (left.n_ranks, left.clock) == (right.n_ranks, right.clock)
    assert left.ops.tolist() == right.ops.tolist()


@pytest.mark.parametrize("encoding", ["built", "protobuf", "json"])
def test_runs_of_several_nodes_survive_the_wire(encoding):
    runs = [
        run_of(EXAMPLE),
        run_of(EXAMPLE[:1], rank=Rank("prod a", "n1", 0), clock=ClockKind.ENQUEUE),
        run_of(EXAMPLE[1:], rank=Rank("prod b", "n2", -1), comm="0" * 16, comm_rank=0, n_ranks=1),
    ]
    read = read_collectives(through(build_collectives(runs, 5), encoding))
    assert (read.n_refused, read.first_problem) == (0, "")
    assert len(read.runs) == 3
    for got, sent in zip(read.runs, runs, strict=True):
        assert_same(got, sent)


@pytest.mark.parametrize("encoding", ["built", "protobuf", "json"])
def test_the_use_of_a_cpu_limit_is_the_mean_of_the_record_and_absent_without_one(encoding):
    ops = EXAMPLE.copy()
    ops["limit_use"] = (900, 920, 1000)
    read = read_collectives(through(build_collectives([run_of(ops), run_of(EXAMPLE)], 5), encoding))
    assert [run.ops["limit_use"].tolist() for run in read.runs] == [[940] * 3, [0] * 3]


def test_more_than_the_whole_limit_is_the_whole_and_a_whole_number_is_one():
    export = build_logs(
        RESOURCE,
        [record(rank__cpu_limit_utilization=used) for used in (1.25, 1, 0, float("inf"))],
        "ingero.collectives",
    )
    used = [run.ops["limit_use"].tolist()[0] for run in read_collectives(export).runs]
    assert used == [1000, 1000, 0, 1000]


def test_a_long_run_is_cut_into_records():
    ops = np.zeros(MAX_OPS + 5, COLLECTIVE_OP)
    ops["seq"] = np.arange(len(ops))
    export = build_collectives([run_of(ops)], 5)
    assert export.n_items == 2
    read = read_collectives(export)
    assert [len(run.ops) for run in read.runs] == [MAX_OPS, 5]
    assert read.runs[1].ops["seq"].tolist() == list(range(MAX_OPS, MAX_OPS + 5))


def test_operations_beyond_the_export_s_bound_are_refused():
    full = np.zeros(MAX_OPS, COLLECTIVE_OP)
    n_runs = MAX_EXPORT_OPS // MAX_OPS
    read = read_collectives(build_collectives([run_of(full)] * (n_runs + 1), 5))
    assert (len(read.runs), read.n_refused) == (n_runs, 1)


GOOD = {
    "ingero.collective.comm": "00000000deadbeef",
    "ingero.collective.comm_rank": 1,
    "ingero.collective.n_ranks": 8,
    "ingero.collective.clock": "device",
}
RESOURCE = {"ingero.node.id": "n1", "ingero.cluster.id": "c"}


def record(body=None, **attributes):
    named = {f"ingero.{key.replace('__', '.')}": value for key, value in attributes.items()}
    from ingero.otlp.codec import build_attributes

    return structs.LogRecord(
        event_name="ingero.collective.batch",
        body=build_value(pack_ops(EXAMPLE) if body is None else body),
        attributes=build_attributes({**GOOD, **named}),
    )


@pytest.mark.parametrize(
    "bad",
    [
        record(body=b""),
        record(body=b"IGCB"),
        record(body="text"),
        record(collective__comm="DEADBEEF00000000"),
        record(collective__comm="deadbeef"),
        record(collective__comm=7),
        record(collective__comm_rank=8),
        record(collective__comm_rank=-1),
        record(collective__comm_rank=True),
        record(collective__n_ranks=0),
        record(collective__n_ranks=2**40),
        record(collective__clock="gps"),
        record(collective__clock=[1]),
        record(rank="first"),
        record(rank__gpus=0),
        record(rank__cpu_limit_utilization=-0.1),
        record(rank__cpu_limit_utilization=float("nan")),
        record(rank__cpu_limit_utilization=True),
        record(rank__cpu_limit_utilization="all"),
        record(rank__labels="dp=0"),
        record(rank__labels={str(i): "" for i in range(33)}),
        record(rank__labels={"dp": "x" * 300}),
    ],
)
@pytest.mark.parametrize("encoding", ["built", "protobuf"])
def test_a_bad_record_costs_only_itself(bad, encoding):
    export = build_logs(RESOURCE, [record(), bad, record()], "ingero.collectives")
    read = read_collectives(through(export, encoding))
    assert (len(read.runs), read.n_refused) == (2, 1)
    assert read.first_problem


def test_other_log_records_are_passed_over():
    other = structs.LogRecord(body=build_value("hello"), event_name="device.app.lifecycle")
    read = read_collectives(build_logs(RESOURCE, [other, record()], "s"))
    assert (len(read.runs), read.n_refused) == (1, 0)


def test_a_batch_without_a_node_is_refused():
    read = read_collectives(build_logs({"ingero.cluster.id": "c"}, [record()], "s"))
    assert (read.runs, read.n_refused) == ([], 1)
    assert "ingero.node.id" in read.first_problem
