"""Standings over the wire, in both encodings, and what is refused."""

import pytest

from ingero.model.collectives import CollectiveOp, Rank
from ingero.model.progress import Ending, RankProgress
from ingero.otlp.codec import (
    build_attributes,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
)
from ingero.otlp.names import ContentType, Signal
from ingero.wire.names import Attribute
from ingero.wire.progress import build_progress, read_progress

POD = (("k8s.namespace.name", "ml"), ("k8s.pod.name", "train-0"))
ALL = [
    RankProgress(Rank("c", "n", 3), "00000000000000ab", 1, 4, 10, 9, CollectiveOp.ALL_REDUCE, 7),
    RankProgress(Rank("c", "n", -1), "00000000000000ab", 0, 4, 10, None, CollectiveOp.UNKNOWN, 0),
    RankProgress(
        Rank("c", "m", 0, job="b", resource=POD),
        "ffffffffffffffff",
        2,
        4,
        0,
        0,
        CollectiveOp.BROADCAST,
        1,
        True,
    ),
    RankProgress(
        Rank("c", "m", 1),
        "ffffffffffffffff",
        3,
        4,
        5,
        5,
        CollectiveOp.BROADCAST,
        1,
        True,
        Ending(7, 9, 0),
    ),
    RankProgress(
        Rank("c", "m", 2),
        "ffffffffffffffff",
        1,
        4,
        5,
        5,
        CollectiveOp.BROADCAST,
        1,
        is_stopped=True,
    ),
]


@pytest.mark.parametrize("encoding", ["protobuf", "json"])
def test_what_is_built_is_read_again(encoding):
    export = build_progress(ALL, 5)
    if encoding == "protobuf":
        read = read_progress(decode_protobuf(encode_protobuf(export), Signal.LOGS))
    else:
        read = read_progress(decode_export(encode_json(export), Signal.LOGS, ContentType.JSON))
    assert read.found == ALL
    assert [one.rank.resource for one in read.found] == [one.rank.resource for one in ALL]
    assert read.n_refused == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (Attribute.COLLECTIVE_COMM, "xyz"),
        (Attribute.COLLECTIVE_COMM_RANK, 4),
        (Attribute.COLLECTIVE_N_RANKS, 0),
        (Attribute.PROGRESS_ENTERED, -1),
        (Attribute.PROGRESS_LEFT, 11),
        (Attribute.PROGRESS_STILL_NS, True),
    ],
)
def test_bad_record_costs_itself_and_says_why(key, value):
    export = build_progress(ALL[:2], 5)
    record = export.tree.resource_logs[0].scope_logs[0].log_records[0]
    kept = [item for item in record.attributes if item.key != key]
    record.attributes = kept + build_attributes({key: value})
    read = read_progress(export)
    assert read.found == ALL[1:2]
    assert read.n_refused == 1
    assert str(key) in read.first_problem
