"""OTLP exports: recorded bodies, both encodings, and everything the proto can say."""

import base64
import json
import math
from pathlib import Path

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from ingero.errors import BadDataError
from ingero.otlp.codec import (
    Export,
    PointKind,
    Temporality,
    build_gauge,
    build_logs,
    build_metrics,
    build_number,
    build_sum,
    build_value,
    decode_export,
    decode_protobuf,
    encode_json,
    encode_protobuf,
    iter_log_rows,
    iter_points,
    merge_exports,
    split_export,
    structs,
)
from ingero.otlp.codec.convert import MESSAGES, find_struct, tree_to_message
from ingero.otlp.codec.export import MAX_NESTED_VALUES
from ingero.otlp.codec.values import tree_value
from ingero.otlp.names import Signal
from ingero.wire.push import ResourceCache, read_push

DATA = Path(__file__).parents[1] / "data"
RECORDED = (DATA / "wire_samples/push_active.json").read_bytes()
JSON = "application/json"
PROTOBUF = "application/x-protobuf"
BODIES = [
    "push_active",
    "push_first_calibrating",
    "push_straggler",
    "straggler_event_0",
    "straggler_event_1",
]


def load(data_dir, name):
    return (data_dir / f"wire_samples/{name}.json").read_bytes()


def from_json(body, signal=Signal.METRICS):
    return decode_export(body, signal, JSON)


# What the proto knows, the structs know.

LEFT_OUT = {
    "key_strindex",  # profiling signal only
    "string_value_strindex",
    "entity_refs",  # in development; no component reads it
}


def descriptors():
    seen, waiting = {}, [message.DESCRIPTOR for message in MESSAGES.values()]
    while waiting:
        descriptor = waiting.pop()
        if descriptor.full_name not in seen and descriptor.name != "EntityRef":
            seen[descriptor.full_name] = descriptor
            waiting += [field.message_type for field in descriptor.fields if field.message_type]
    return seen


@pytest.mark.parametrize("descriptor", descriptors().values(), ids=descriptors())
def test_every_proto_field_has_a_struct_field_or_is_left_out_on_purpose(descriptor):
    struct = find_struct(descriptor)
    missing = {field.name for field in descriptor.fields} - set(struct.__struct_fields__)
    assert missing <= LEFT_OUT
    assert set(struct.__struct_fields__) <= {field.name for field in descriptor.fields}
    camel = {field.name: field.camelcase_name for field in descriptor.fields}
    assert dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)) == {
        name: camel[name] for name in struct.__struct_fields__
    }


# Recorded bodies.


@pytest.mark.parametrize("name", BODIES)
def test_recorded_bodies_survive_every_encoding(data_dir, name):
    export = from_json(load(data_dir, name))
    by_protobuf = decode_protobuf(encode_protobuf(export), Signal.METRICS)
    assert by_protobuf.tree == export.tree
    assert from_json(encode_json(by_protobuf)).tree == export.tree
    assert by_protobuf.n_items == export.n_items == (1 if "event" in name else 10)


@pytest.mark.parametrize("name", BODIES)
def test_recorded_bodies_read_as_google_s_own_json_parser_reads_them(data_dir, name):
    body = load(data_dir, name)
    reference = json_format.Parse(body, ExportMetricsServiceRequest())
    assert from_json(body).message == reference


def test_points_of_both_encodings_are_the_same(data_dir):
    export = from_json(load(data_dir, "push_active"))
    by_protobuf = decode_protobuf(encode_protobuf(export), Signal.METRICS)

    def rows(one):
        return [
            (p.name, p.kind, p.unit, p.value, p.attributes, p.resource, p.scope, p.time_unix_nano)
            for p in iter_points(one)
        ]

    assert rows(export) == rows(by_protobuf)
    score = rows(export)[0]
    assert score == (
        "ingero.node.health_score",
        PointKind.GAUGE,
        "1",
        0.94,
        {
            "ingero.node.state": "active",
            "ingero.workload_type": "unknown",
            "ingero.cgroup_path_hash": "8a5edab282632443",
        },
        {
            "ingero.node.id": "n1",
            "ingero.cluster.id": "prod a",
            "ingero.world_size": 8,
            "ingero.node.rank": 3,
            "ingero.provider": "aws",
        },
        ("ingero.health", "0.10.0"),
        1_795_230_273_280_661_023,
    )


# The JSON dialects.


def point(text):
    body = '{"resourceMetrics":[{"scopeMetrics":[{"metrics":[{"name":"m","sum":{"dataPoints":[%s]}}]}]}]}'
    return from_json((body % text).encode())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"asInt":5}', 5),
        ('{"asInt":"5"}', 5),
        ('{"asInt":"-9223372036854775808"}', -(2**63)),
        ('{"asInt":9223372036854775807}', 2**63 - 1),
        ('{"asDouble":1}', 1.0),
        ('{"asDouble":"1.5"}', 1.5),
        ('{"asDouble":"Infinity"}', math.inf),
        ('{"asDouble":"-Infinity"}', -math.inf),
        ('{"asDouble":0}', 0.0),
        ('{"asInt":0,"timeUnixNano":"18"}', 0),
        ('{"asInt":0,"timeUnixNano":18}', 0),
        ("{}", None),
        ('{"asInt":null,"attributes":null,"exemplars":null}', None),
        ('{"asInt":3,"attributes":null,"later":{"x":[1]},"flags":null}', 3),
    ],
)
def test_numbers_come_as_numbers_or_strings(text, value):
    for export in (point(text), decode_protobuf(encode_protobuf(point(text)), Signal.METRICS)):
        (row,) = iter_points(export)
        assert (type(row.value), row.value) == (type(value), value)


def test_nan_survives_both_encodings():
    export = point('{"asDouble":"NaN"}')
    for again in (
        from_json(encode_json(export)),
        decode_protobuf(encode_protobuf(export), Signal.METRICS),
    ):
        assert math.isnan(next(iter_points(again)).value)


@pytest.mark.parametrize(
    "text",
    [
        '{"asInt":"x"}',
        '{"asInt":1.5}',
        '{"asInt":9223372036854775808}',
        '{"asInt":"-9223372036854775809"}',
        '{"timeUnixNano":-1}',
        '{"timeUnixNano":"18446744073709551616"}',
        '{"timeUnixNano":"2026-01-01"}',
        '{"asDouble":"x"}',
        '{"asDouble":1e999}',
        '{"attributes":{}}',
        '{"attributes":[null]}',
        '{"attributes":[{"key":1}]}',
        '{"exemplars":[{"traceId":"xyz"}]}',
        '{"exemplars":[{"traceId":"abc"}]}',
        '{"asInt":null,"flags":-1}',
    ],
)
def test_what_does_not_fit_is_bad_data(text):
    with pytest.raises(BadDataError, match="JSON"):
        point(text)


def test_what_decodes_from_json_always_encodes_as_protobuf():
    # Otherwise one hostile body would fail a whole merged batch at an exporter.
    body = b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"kind":2147483648}]}]}]}'
    with pytest.raises(BadDataError):
        from_json(body, Signal.TRACES)


def test_integers_beyond_32_bits_and_ids_are_written_by_the_rules():
    export = build_logs(
        {},
        [
            structs.LogRecord(
                time_unix_nano=2**62,
                severity_number=9,
                trace_id="0123456789abcdef0123456789abcdef",
                body=build_value(b"\xff\x00"),
            )
        ],
        "s",
    )
    record = json.loads(encode_json(export))["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]
    assert record == {
        "timeUnixNano": str(2**62),
        "severityNumber": 9,
        "traceId": "0123456789abcdef0123456789abcdef",
        "body": {"bytesValue": base64.b64encode(b"\xff\x00").decode()},
    }
    message = export.message.resource_logs[0].scope_logs[0].log_records[0]
    assert message.trace_id == bytes.fromhex("0123456789abcdef0123456789abcdef")
    assert message.body.bytes_value == b"\xff\x00"


# Round trips.

texts = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    texts,
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
attributes = st.dictionaries(texts, values, max_size=3)
numbers = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
times = st.integers(0, 2**63 - 1)


def histogram_points():
    return st.builds(
        structs.HistogramDataPoint,
        time_unix_nano=times,
        count=times,
        sum=st.none() | st.floats(allow_nan=False),
        bucket_counts=st.lists(times, max_size=3),
        explicit_bounds=st.lists(st.floats(allow_nan=False), max_size=3),
        flags=st.integers(0, 2**32 - 1),
        min=st.none() | st.floats(allow_nan=False),
    )


def metrics():
    numbers_of = st.lists(st.builds(build_number, numbers, times, attributes), max_size=3)
    gauges = st.builds(build_gauge, texts, numbers_of, texts, texts)
    sums = st.builds(build_sum, texts, numbers_of, texts, texts)
    histograms = st.builds(
        structs.Metric,
        name=texts,
        histogram=st.builds(
            structs.Histogram,
            data_points=st.lists(histogram_points(), max_size=2),
            aggregation_temporality=st.sampled_from([0, 1, 2]),
        ),
    )
    return st.lists(st.one_of(gauges, sums, histograms), max_size=3)


exports = st.builds(build_metrics, attributes, metrics(), texts, texts)


@given(exports)
def test_metrics_survive_protobuf_and_json(export):
    by_protobuf = decode_protobuf(encode_protobuf(export), Signal.METRICS)
    by_json = from_json(encode_json(export))
    assert by_protobuf.tree == export.tree
    assert by_json.tree == export.tree
    assert encode_protobuf(by_json) == encode_protobuf(export)
    assert by_protobuf.n_items == by_json.n_items == sum(1 for _ in iter_points(export))


@given(exports)
def test_rows_of_both_encodings_are_the_same(export):
    by_protobuf = decode_protobuf(encode_protobuf(export), Signal.METRICS)
    for mine, theirs in zip(iter_points(export), iter_points(by_protobuf), strict=True):
        theirs.raw = mine.raw
        assert mine == theirs


@given(values)
def test_any_value_survives(value):
    built = build_value(value)
    assert tree_value(built) == value
    export = build_logs({}, [structs.LogRecord(body=built)], "s")
    for again in (export, decode_protobuf(encode_protobuf(export), Signal.LOGS)):
        (row,) = iter_log_rows(again)
        assert row.body == value


@given(st.binary(max_size=300), st.sampled_from(list(Signal)), st.sampled_from([JSON, PROTOBUF]))
def test_arbitrary_bytes_are_an_export_or_bad_data(body, signal, content_type):
    try:
        export = decode_export(body, signal, content_type)
    except BadDataError:
        return
    assert export.size_bytes == len(body)
    assert export.n_items >= 0
    assert decode_protobuf(encode_protobuf(export), signal).n_items == export.n_items


@settings(max_examples=200)
@given(st.data())
def test_a_changed_byte_in_a_recorded_body_is_an_export_or_bad_data(data):
    body = bytearray(RECORDED)
    at = data.draw(st.integers(0, len(body) - 1))
    body[at] = data.draw(st.integers(0, 255))
    try:
        export = from_json(bytes(body))
    except BadDataError:
        return
    list(iter_points(export))
    encode_protobuf(export)


# Merging and cutting.


@given(st.lists(exports, min_size=1, max_size=4), st.data())
def test_merging_keeps_every_point_in_order_whatever_the_encodings(several, data):
    mixed = [
        decode_protobuf(encode_protobuf(one), Signal.METRICS) if data.draw(st.booleans()) else one
        for one in several
    ]
    before = [encode_protobuf(one) for one in mixed]
    merged = merge_exports(mixed)
    expected = [(p.name, p.value) for one in several for p in iter_points(one)]
    assert [(p.name, p.value) for p in iter_points(merged)] == expected
    assert merged.size_bytes == sum(one.size_bytes for one in mixed)
    assert [encode_protobuf(one) for one in mixed] == before


def test_only_exports_of_one_signal_merge():
    with pytest.raises(BadDataError):
        merge_exports([])
    with pytest.raises(BadDataError):
        merge_exports([build_metrics({}, [], "s"), build_logs({}, [], "s")])


@given(st.lists(exports, min_size=1, max_size=3), st.integers(1, 5))
def test_cutting_gives_full_parts_and_every_point_in_order(several, max_items):
    whole = merge_exports(several)
    parts = split_export(whole, max_items)
    sizes = [part.n_items for part in parts]
    assert sum(sizes) == whole.n_items
    assert all(size == max_items for size in sizes[:-1])
    assert sizes[-1] <= max_items

    def rows(export):
        return [
            (p.name, p.kind, p.value, p.attributes, p.resource, p.scope, p.temporality)
            for p in iter_points(export)
        ]

    assert [row for part in parts for row in rows(part)] == rows(whole)


def test_logs_are_cut_too():
    records = [structs.LogRecord(severity_text=str(i)) for i in range(5)]
    parts = split_export(build_logs({"a": 1}, records, "s"), 2)
    rows = [[row.severity_text for row in iter_log_rows(part)] for part in parts]
    assert rows == [["0", "1"], ["2", "3"], ["4"]]


# Smaller promises.


def test_sums_built_here_are_cumulative_and_ints_stay_ints():
    export = build_metrics({}, [build_sum("s", [build_number(3, 1)])], "x")
    (row,) = iter_points(decode_protobuf(encode_protobuf(export), Signal.METRICS))
    assert (row.kind, row.value, row.is_monotonic) == (PointKind.SUM, 3, True)
    assert (row.temporality, type(row.value)) == (Temporality.CUMULATIVE, int)


def test_a_stale_point_is_marked():
    export = point('{"flags":1}')
    assert next(iter_points(export)).is_stale


def test_values_that_otlp_cannot_hold_are_bad_data():
    for value in (2**63, object(), {"a": {1}}):
        with pytest.raises(BadDataError):
            build_value(value)


def test_a_tree_with_a_value_out_of_range_is_bad_data_as_protobuf():
    tree = structs.MetricsRequest([structs.ResourceMetrics(schema_url=7)])
    with pytest.raises(BadDataError, match="protobuf"):
        tree_to_message(tree)


def test_conversion_happens_once_and_only_when_asked(data_dir):
    export = from_json(load(data_dir, "push_active"))
    assert not export.is_message
    assert export.message is export.message
    wrapped = Export.from_message(Signal.METRICS, export.message)
    assert wrapped.is_message
    assert wrapped.tree is wrapped.tree


def test_another_content_type_is_bad_data():
    with pytest.raises(BadDataError, match="text/plain"):
        decode_export(b"", Signal.METRICS, "text/plain")


@pytest.mark.parametrize("kind", ["application/json", "application/x-protobuf"])
def test_an_export_is_read_the_same_after_somebody_asked_for_its_other_form(kind, data_dir):
    body = (data_dir / "wire_samples/push_active.json").read_bytes()
    export = decode_export(body, Signal.METRICS, "application/json")
    if kind != "application/json":
        export = decode_export(encode_protobuf(export), Signal.METRICS, kind)
    root, is_message, metrics = export.root, export.is_message, export.metrics
    points = [(point.name, point.value, point.resource) for point in iter_points(export)]
    facts = read_push(export, ResourceCache())
    assert export.tree.resource_metrics
    assert export.message.resource_metrics
    assert (export.root, export.is_message, export.metrics) == (root, is_message, metrics)
    assert [(point.name, point.value, point.resource) for point in iter_points(export)] == points
    assert read_push(export, ResourceCache()) == facts


def _nest(kind, n_levels, text="x"):
    value = {"stringValue": text}
    for _ in range(n_levels):
        one = value if kind == "arrayValue" else {"key": text, "value": value}
        value = {kind: {"values": [one]}}
    return value


def _log(value):
    return {"resourceLogs": [{"scopeLogs": [{"logRecords": [{"body": value}]}]}]}


def _exemplar(value):
    exemplar = {"filteredAttributes": [{"key": "a", "value": value}]}
    metric = {"name": "h", "histogram": {"dataPoints": [{"exemplars": [exemplar]}]}}
    return {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}


PLACES = pytest.mark.parametrize(
    ("place", "signal"), [(_log, Signal.LOGS), (_exemplar, Signal.METRICS)], ids=["log", "exemplar"]
)


@PLACES
@pytest.mark.parametrize("kind", ["arrayValue", "kvlistValue"])
@pytest.mark.parametrize("text", ["x", "]}]}", "[{[{", '\\"]}'])
def test_json_is_taken_as_deep_as_protobuf_reads_it_back_and_refused_beyond(
    place, signal, kind, text
):
    body = json.dumps(place(_nest(kind, MAX_NESTED_VALUES, text))).encode()
    export = decode_export(body, signal, "application/json")
    assert encode_json(decode_protobuf(encode_protobuf(export), signal)) == encode_json(export)
    body = json.dumps(place(_nest(kind, MAX_NESTED_VALUES + 1, text))).encode()
    spelled = body.replace(b"Value", b"V\\u0061lue")
    for one in (body, spelled, body.replace(b'{"resource', b'{"x": null, "resource', 1)):
        with pytest.raises(BadDataError, match="30 lists and maps"):
            decode_export(one, signal, "application/json")


def test_many_lists_and_maps_beside_one_another_are_taken():
    records = [{"body": _nest("kvlistValue", 3, text)} for text in ("a", "[{", "}]", "\u00e9")] * 50
    body = json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}).encode()
    assert decode_export(body, Signal.LOGS, "application/json").n_items == 200
