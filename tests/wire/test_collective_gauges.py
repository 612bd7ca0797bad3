"""Older agents' per-event gauges, as their encoder sends them."""

import pytest

from ingero.model.collectives import UNKNOWN_NS, ClockKind, CollectiveOp
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_protobuf,
    encode_protobuf,
    merge_exports,
)
from ingero.otlp.names import Signal
from ingero.wire.collective_gauges import (
    UNKNOWN_COMM,
    parse_op,
    read_collective_gauges,
)
from ingero.wire.push import ResourceCache

NOW = 1_795_230_273_000_000_000
BOOT = 86_400_000_000_000  # a day of uptime


def event(at_ns, op="ncclAllReduce", ms=1.5, count=1024, comm="00000000deadbeef", **extra):
    attributes = {
        "nccl.op_type": op,
        "nccl.comm_id_hash": comm,
        "nccl.rank": extra.pop("rank", 2),
        "nccl.nranks": extra.pop("nranks", 8),
        "nccl.datatype": 7,
        "nccl.reduce_op": 0,
        **{f"nccl.{key}": value for key, value in extra.items()},
    }
    return [
        build_gauge("nccl.collective.duration_ms", [build_number(ms, at_ns, attributes)], "ms"),
        build_gauge("nccl.collective.bytes", [build_number(count, at_ns, attributes)], "By"),
    ]


def push(*events, node="n1", **resource):
    who = {"ingero.node.id": node, "ingero.cluster.id": "c", **resource}
    return build_metrics(who, [metric for pair in events for metric in pair], "ingero", "0.17.0")


def as_protobuf(export):
    return decode_protobuf(encode_protobuf(export), Signal.METRICS)


@pytest.fixture(params=["json", "protobuf"])
def read(request):
    def call(export, received=NOW):
        chosen = as_protobuf(export) if request.param == "protobuf" else export
        return read_collective_gauges(chosen, received, ResourceCache())

    return call


def test_times_since_boot_end_at_the_arrival_and_keep_their_distances(read):
    (run,) = read(push(event(BOOT), event(BOOT + 700), event(BOOT + 1000))).runs
    assert run.ops["entry_ns"].tolist() == [NOW - 1000, NOW - 300, NOW]


def test_plausible_times_are_kept(read):
    (run,) = read(push(event(NOW - 5_000))).runs
    assert run.ops["entry_ns"].tolist() == [NOW - 5_000]


def test_an_event_is_a_row_with_what_is_known_of_it(read):
    (run,) = read(push(event(BOOT, ms=2.25, count=10), **{"ingero.node.rank": 5})).runs
    assert (run.rank.node_id, run.rank.cluster_id, run.rank.rank) == ("n1", "c", 5)
    assert (run.comm, run.comm_rank, run.n_ranks) == ("00000000deadbeef", 2, 8)
    assert run.clock is ClockKind.ENQUEUE
    row = run.ops[0]
    assert (row["inside_ns"], row["own_ns"]) == (2_250_000, UNKNOWN_NS)
    assert row["n_bytes"] == 40  # ten float32
    assert (row["op"], row["seq"]) == (CollectiveOp.ALL_REDUCE, 0)


def test_events_are_grouped_by_communicator_and_rank_in_order(read):
    export = push(
        event(BOOT, comm="a" * 16),
        event(BOOT + 1, comm="b" * 16),
        event(BOOT + 2, comm="a" * 16, rank=3),
        event(BOOT + 3, comm="a" * 16, op="ncclReduceScatter"),
    )
    runs = read(export).runs
    assert [(run.comm[0], run.comm_rank, run.ops["seq"].tolist()) for run in runs] == [
        ("a", 2, [0, 1]),
        ("b", 2, [0]),
        ("a", 3, [0]),
    ]
    assert runs[0].ops["op"].tolist() == [CollectiveOp.ALL_REDUCE, CollectiveOp.REDUCE_SCATTER]


def test_nodes_of_one_batch_are_told_apart(read):
    both = merge_exports([push(event(BOOT)), push(event(BOOT), node="n2")])
    assert [run.rank.node_id for run in read(both).runs] == ["n1", "n2"]


def test_zeros_from_x86_agents_are_tolerated(read):
    (run,) = read(push(event(BOOT, comm="0" * 16, rank=0, nranks=0))).runs
    assert (run.comm, run.comm_rank, run.n_ranks) == (UNKNOWN_COMM, 0, 0)


def test_peers_of_sends_do_not_mix_up_their_sizes(read):
    export = push(
        event(BOOT, op="ncclSend", count=1, peer_rank=1),
        event(BOOT, op="ncclSend", count=2, peer_rank=2),
    )
    (run,) = read(export).runs
    assert run.ops["n_bytes"].tolist() == [4, 8]


def test_communicator_creation_is_no_operation_and_bad_values_are_counted(read):
    export = push(
        event(BOOT, op="ncclCommInitAll"),
        event(BOOT, ms=float("nan")),
        event(BOOT, ms=-1.0),
        event(BOOT, ms=1e300),
        event(BOOT, count=-4),
    )
    found = read(export)
    assert found.n_refused == 3
    assert found.runs[0].ops["n_bytes"].tolist() == [UNKNOWN_NS]


def test_an_unknown_type_of_element_leaves_the_size_unknown(read):
    export = push(event(BOOT, datatype=99))
    assert read(export).runs[0].ops["n_bytes"].tolist() == [UNKNOWN_NS]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("ncclAllReduce", CollectiveOp.ALL_REDUCE),
        ("allreduce", CollectiveOp.ALL_REDUCE),
        ("all_reduce", CollectiveOp.ALL_REDUCE),
        ("pncclAllGather", CollectiveOp.ALL_GATHER),
        ("ncclReduceScatter", CollectiveOp.REDUCE_SCATTER),
        ("ncclBcast", CollectiveOp.BROADCAST),
        ("ncclSend", CollectiveOp.SEND),
        ("ncclRecv", CollectiveOp.RECV),
        ("ncclFuture", CollectiveOp.UNKNOWN),
        ("", CollectiveOp.UNKNOWN),
        ("ncclCommInitAll", None),
    ],
)
def test_operation_names_of_both_spellings_are_one(name, op):
    assert parse_op(name) is op
