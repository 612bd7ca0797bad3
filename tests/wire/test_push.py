"""The score map's reader: recorded pushes, batched agents, and what is missing."""

import pytest

from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
    merge_exports,
)
from ingero.otlp.names import Signal
from ingero.wire.push import UNKNOWN_RANK, ResourceCache, read_push


def load(data_dir, name):
    body = (data_dir / f"wire_samples/{name}.json").read_bytes()
    return decode_export(body, Signal.METRICS, "application/json")


def as_protobuf(export):
    return decode_protobuf(encode_protobuf(export), Signal.METRICS)


def as_json(export):
    return decode_export(encode_json(export), Signal.METRICS, "application/json")


ENCODINGS = pytest.mark.parametrize("encode", [as_protobuf, as_json])


@ENCODINGS
@pytest.mark.parametrize(
    ("name", "score", "state"),
    [
        ("push_active", 0.94, "active"),
        ("push_first_calibrating", 0.27, "calibrating"),
        ("push_straggler", 0.42, "active"),
    ],
)
def test_recorded_pushes_are_read(data_dir, encode, name, score, state):
    (facts,) = read_push(encode(load(data_dir, name)), ResourceCache())
    assert facts.health_score == pytest.approx(score, abs=1e-12)
    assert (facts.state, facts.workload_type) == (state, "unknown")
    assert facts.cohort == "8a5edab282632443"
    assert (facts.resource.node_id, facts.resource.cluster_id) == ("n1", "prod a")
    assert (facts.resource.rank, facts.resource.world_size) == (3, 8)
    assert facts.gpu_model == "NVIDIA H100 80GB HBM3"
    assert facts.straggler_event is None


@ENCODINGS
def test_recorded_events_are_read(data_dir, encode):
    cache = ResourceCache()
    (on,) = read_push(encode(load(data_dir, "straggler_event_1")), cache)
    (off,) = read_push(encode(load(data_dir, "straggler_event_0")), cache)
    assert (on.straggler_event, off.straggler_event) == (1, 0)
    assert on.event_id == "76b99833-b5c2-424e-bda3-956adbef4bcf"
    assert on.event_id != off.event_id
    assert on.health_score is None
    assert on.event_attributes == {
        "ingero.detection_mode": "fleet",
        "threshold": 0.9,
        "score": 0.41999999999999993,
        "dominant_signal": "throughput",
    }


def push(node, score, **resource):
    points = [build_number(score, 1, {"ingero.node.state": "active"})]
    attributes = {"ingero.node.id": node, "ingero.cluster.id": "c", **resource}
    return build_metrics(attributes, [build_gauge("ingero.node.health_score", points)], "s")


@ENCODINGS
def test_a_collector_s_batch_of_agents_is_one_fact_each_in_order(encode):
    batch = merge_exports([push(f"n{i}", i / 10) for i in range(5)])
    facts = read_push(encode(batch), ResourceCache())
    assert [(one.resource.node_id, one.health_score) for one in facts] == [
        (f"n{i}", i / 10) for i in range(5)
    ]


@ENCODINGS
def test_rank_zero_is_a_rank_and_absence_is_not_zero(encode):
    ranked = push("n", 1.0, **{"ingero.node.rank": 0, "ingero.world_size": 8})
    (facts,) = read_push(encode(ranked), ResourceCache())
    assert (facts.resource.rank, facts.resource.world_size) == (0, 8)
    (facts,) = read_push(encode(push("n", 1.0)), ResourceCache())
    assert (facts.resource.rank, facts.resource.world_size) == (UNKNOWN_RANK, 0)


@ENCODINGS
def test_attributes_of_the_wrong_type_are_absent(encode):
    wrong = {"ingero.node.id": 7, "ingero.node.rank": "3", "ingero.world_size": True}
    (facts,) = read_push(encode(push("n", 1.0, **wrong)), ResourceCache())
    assert (facts.resource.node_id, facts.resource.rank, facts.resource.world_size) == (
        "",
        UNKNOWN_RANK,
        0,
    )


@ENCODINGS
def test_an_integer_score_is_a_score_and_the_last_point_counts(encode):
    points = [build_number(0.5, 1), build_number(1, 2)]
    metric = build_gauge("ingero.node.health_score", points)
    (facts,) = read_push(encode(build_metrics({}, [metric], "s")), ResourceCache())
    assert (facts.health_score, type(facts.health_score)) == (1.0, float)


@ENCODINGS
def test_a_score_without_points_or_of_another_kind_is_no_score(encode):
    from ingero.otlp.codec import structs

    empty = build_gauge("ingero.node.health_score", [])
    kindless = structs.Metric(name="ingero.node.health_score")
    valueless = build_gauge("ingero.node.health_score", [structs.NumberDataPoint()])
    histogram = structs.Metric(
        name="ingero.node.health_score",
        histogram=structs.Histogram([structs.HistogramDataPoint(count=1)]),
    )
    for metric in (empty, kindless, valueless, histogram):
        (facts,) = read_push(encode(build_metrics({}, [metric], "s")), ResourceCache())
        assert facts.health_score is None


def test_an_unchanged_resource_is_read_once_and_a_changed_one_again():
    cache = ResourceCache()
    (one,) = read_push(as_protobuf(push("n", 0.1)), cache)
    (two,) = read_push(as_protobuf(push("n", 0.2)), cache)
    (three,) = read_push(as_protobuf(push("n", 0.2, **{"ingero.provider": "aws"})), cache)
    assert one.resource is two.resource
    assert three.resource.provider == "aws"
    assert len(cache) == 2


def test_ever_new_resources_do_not_grow_the_cache():
    cache = ResourceCache(max_entries=10)
    for i in range(100):
        read_push(as_protobuf(push(f"n{i}", 0.1)), cache)
    assert len(cache) <= 10
    read_push(as_protobuf(push("x" * 100_000, 0.1)), cache)
    (facts,) = read_push(as_protobuf(push("x" * 100_000, 0.1)), cache)
    assert facts.resource.node_id == "x" * 100_000
    assert len(cache) <= 10
