"""Processors that change attributes and leave data out: from each encoding, in each signal."""

import asyncio
import json

import pytest

from ingero.config import parse_model
from ingero.errors import ConfigError, PermanentError
from ingero.fleet.component import ComponentId
from ingero.fleet.consumer import Batch
from ingero.fleet.processors import attributes, resource
from ingero.fleet.processors import filter as filtering
from ingero.otlp.codec import Export, decode_export, encode_json, encode_protobuf, structs
from ingero.otlp.names import ContentType, Signal
from ingero.testing.host import KeptBatches, ManualHost


def kv(**values):
    kinds = {str: "stringValue", int: "intValue", float: "doubleValue", bool: "boolValue"}
    return [{"key": key, "value": {kinds[type(one)]: one}} for key, one in values.items()]


def metric(name, **labels):
    return {
        "name": name,
        "gauge": {"dataPoints": [{"timeUnixNano": "1", "asDouble": 1, "attributes": kv(**labels)}]},
    }


def metrics(*found, **on):
    return {
        "resourceMetrics": [
            {"resource": {"attributes": kv(**on)}, "scopeMetrics": [{"metrics": found}]}
        ]
    }


def logs(*found, **on):
    return {
        "resourceLogs": [
            {"resource": {"attributes": kv(**on)}, "scopeLogs": [{"logRecords": found}]}
        ]
    }


def spans(*found, **on):
    return {
        "resourceSpans": [{"resource": {"attributes": kv(**on)}, "scopeSpans": [{"spans": found}]}]
    }


def run(module, settings, signal, body, *, is_message=False):
    """What a processor passes on, as JSON; None when it passed nothing on."""
    factory, kept, host = module.FACTORY, KeptBatches(), ManualHost()
    export = decode_export(json.dumps(body).encode(), signal, ContentType.JSON)
    if is_message:
        export = decode_export(encode_protobuf(export), signal, ContentType.PROTOBUF)
    before = encode_json(export)
    made = factory.create(
        ComponentId(factory.type), parse_model(factory.config, settings), signal, kept
    )
    asyncio.run(made.start(host))
    made.consume(Batch(signal, export, 7))
    assert encode_json(export) == before, "a batch that others have was changed"
    (passed,) = kept.batches or [None]
    assert passed is None or passed.received_wall_ns == 7
    return None if passed is None else json.loads(encode_json(passed.export)), host


ACTIONS = [
    ([{"action": "insert", "key": "a", "value": "x"}], {"a": "old"}, {"a": "old"}),
    ([{"action": "insert", "key": "b", "value": 3}], {"a": "old"}, {"a": "old", "b": 3}),
    ([{"action": "update", "key": "a", "value": True}], {"a": "old"}, {"a": True}),
    ([{"action": "update", "key": "b", "value": "x"}], {"a": "old"}, {"a": "old"}),
    (
        [{"action": "upsert", "key": "a", "from_attribute": "b"}],
        {"a": 1, "b": 2.5},
        {"a": 2.5, "b": 2.5},
    ),
    ([{"action": "upsert", "key": "a", "from_attribute": "c"}], {"a": 1}, {"a": 1}),
    ([{"action": "delete", "key": "a"}], {"a": 1, "ab": 2}, {"ab": 2}),
    ([{"action": "delete", "pattern": "^a"}], {"a": 1, "ab": 2, "b": 3}, {"b": 3}),
    (
        [{"action": "extract", "key": "h", "pattern": r"^(?P<rack>\w+)-(?P<n>\d+)"}],
        {"h": "r7-12.x", "n": 5},
        {"h": "r7-12.x", "n": "12", "rack": "r7"},
    ),
    ([{"action": "extract", "key": "h", "pattern": "(?P<n>z)"}], {"h": "r7"}, {"h": "r7"}),
    ([{"action": "convert", "key": "a", "converted_type": "int"}], {"a": "12"}, {"a": 12}),
    ([{"action": "convert", "key": "a", "converted_type": "int"}], {"a": "12x"}, {"a": "12x"}),
    ([{"action": "convert", "key": "a", "converted_type": "string"}], {"a": True}, {"a": "true"}),
    (
        [
            {"action": "upsert", "key": "b", "from_attribute": "a"},
            {"action": "delete", "key": "a"},
        ],
        {"a": "moved"},
        {"b": "moved"},
    ),
]


def read(found):
    """Attributes of OTLP/JSON by key; 64-bit integers are text on the wire."""
    values = {}
    for one in found:
        ((kind, value),) = one["value"].items()
        values[one["key"]] = int(value) if kind == "intValue" else value
    return values


@pytest.mark.parametrize("is_message", [False, True], ids=["json", "protobuf"])
@pytest.mark.parametrize(("actions", "before", "after"), ACTIONS)
def test_actions_do_what_the_collector_says(actions, before, after, is_message):
    sent = metrics(metric("m", **before), **before)
    found, _ = run(attributes, {"actions": actions}, Signal.METRICS, sent, is_message=is_message)
    (entry,) = found["resourceMetrics"]
    (point,) = entry["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"]
    assert read(point["attributes"]) == after
    assert read(entry["resource"]["attributes"]) == before
    found, _ = run(resource, {"attributes": actions}, Signal.METRICS, sent, is_message=is_message)
    assert read(found["resourceMetrics"][0]["resource"]["attributes"]) == after


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("string", 1.0, "1"),
        ("string", 0.25, "0.25"),
        ("string", 1e-6, "0.000001"),
        ("string", 2e-7, "2e-7"),
        ("string", 1e20, "100000000000000000000"),
        ("string", -1.5e21, "-1.5e+21"),
        ("string", 7, "7"),
        ("int", "+12", 12),
        ("int", "1_000", "1_000"),
        ("int", " 12", " 12"),
        ("int", "٣", "٣"),
        ("int", 2.9, 2),
        ("double", "1_0.5", "1_0.5"),
        ("double", "1e400", "1e400"),
        ("double", ".5E1", 5.0),
        ("double", "5.", 5.0),
        ("double", "٣", "٣"),
    ],
)
def test_conversions_are_those_of_the_collector(kind, before, after):
    actions = [{"action": "convert", "key": "a", "converted_type": kind}]
    sent = metrics(metric("m", a=before))
    found, _ = run(attributes, {"actions": actions}, Signal.METRICS, sent)
    ((value,),) = (
        one["attributes"][0]["value"].items()
        for entry in found["resourceMetrics"]
        for one in entry["scopeMetrics"][0]["metrics"][0]["gauge"]["dataPoints"]
    )
    wanted = {str: "stringValue", int: "intValue", float: "doubleValue"}[type(after)]
    assert value == (wanted, str(after) if wanted == "intValue" else after)


def test_records_and_spans_are_changed_too():
    add = {"actions": [{"action": "insert", "key": "l", "value": ["a", 1]}]}
    for signal, body in (
        (Signal.LOGS, logs({"body": {"stringValue": "b"}})),
        (Signal.TRACES, spans({"name": "s"})),
    ):
        found, _ = run(attributes, add, signal, body)
        assert '"arrayValue":{"values":[{"stringValue":"a"},{"intValue":"1"}]}' in json.dumps(
            found, separators=(",", ":")
        )


@pytest.mark.parametrize(
    ("action", "description"),
    [
        ({"action": "hash", "key": "a"}, "insert"),
        ({"action": "insert", "key": "a"}, "exactly one of value and from_attribute"),
        ({"action": "insert", "value": 1}, "needs a key"),
        ({"action": "insert", "key": "a", "value": 1, "pattern": "x"}, "does not read pattern"),
        ({"action": "insert", "key": "a", "value": 2**63}, "64-bit"),
        (
            {"action": "insert", "key": "a", "from_context": "x"},
            "metadata of the connection is not kept",
        ),
        ({"action": "delete"}, "key or pattern"),
        ({"action": "delete", "pattern": "("}, "no regular expression"),
        ({"action": "extract", "key": "a", "pattern": "(x)"}, "named groups"),
        ({"action": "convert", "key": "a"}, "converted_type"),
    ],
)
def test_senseless_actions_are_refused_with_the_reason(action, description):
    with pytest.raises(ConfigError) as raised:
        parse_model(attributes.AttributesConfig, {"actions": [action]})
    assert description in str(raised.value)


def test_choosing_by_include_and_ottl_is_refused_aloud():
    for module, settings, description in (
        (
            attributes,
            {"actions": [{"action": "delete", "key": "a"}], "include": {}},
            "pipeline of its own",
        ),
        (filtering, {"error_mode": "ignore"}, "OTTL"),
        (filtering, {"metrics": {"metric": ['name == "a"']}}, "OTTL"),
        (
            filtering,
            {"metrics": {"include": {"match_type": "regexp", "metric_names": ["("]}}},
            "no regular expression",
        ),
    ):
        with pytest.raises(ConfigError, match=description):
            parse_model(module.FACTORY.config, settings)


def names(found, *path):
    if found is None:
        return []
    entries = [one for entry in next(iter(found.values())) for one in entry[path[0]]]
    return [
        item.get("name") or item["body"]["stringValue"] for one in entries for item in one[path[1]]
    ]


@pytest.mark.parametrize("is_message", [False, True], ids=["json", "protobuf"])
@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({"include": {"match_type": "strict", "metric_names": ["a.b"]}}, ["a.b"]),
        ({"include": {"match_type": "regexp", "metric_names": ["^a", "c$"]}}, ["a.b", "a_b", "c"]),
        ({"exclude": {"match_type": "regexp", "metric_names": ["a.b"]}}, ["c", "d"]),
        ({"exclude": {"match_type": "strict", "metric_names": ["a.b", "c"]}}, ["a_b", "d"]),
        ({"exclude": {"match_type": "strict", "resource_attributes": [{"key": "n", "value": "1"}]}}, ["a.b", "a_b", "c", "d"]),
        ({"exclude": {"match_type": "strict", "resource_attributes": [{"key": "n", "value": 1}]}}, []),
        ({"include": {"match_type": "regexp", "resource_attributes": [{"key": "host", "value": "^gpu"}]}}, ["a.b", "a_b", "c", "d"]),
        ({"include": {"match_type": "strict", "resource_attributes": [{"key": "nobody"}]}}, []),
        (
            {
                "include": {"match_type": "regexp", "metric_names": ["^[a-c]"]},
                "exclude": {"match_type": "strict", "metric_names": ["c"]},
            },
            ["a.b", "a_b"],
        ),
        ({"exclude": {"match_type": "strict", "metric_names": ["c"], "resource_attributes": [{"key": "n", "value": 2}]}}, ["a.b", "a_b", "d"]),
        ({"exclude": {"match_type": "strict", "metric_names": ["x"], "resource_attributes": [{"key": "n", "value": 1}]}}, []),
        ({"include": {"match_type": "strict", "metric_names": ["c"], "resource_attributes": [{"key": "n", "value": 2}]}}, []),
        ({"exclude": {"match_type": "strict"}}, ["a.b", "a_b", "c", "d"]),
        ({}, ["a.b", "a_b", "c", "d"]),
    ],
)  # fmt: skip
def test_metrics_that_are_left_out_are_counted(settings, left, is_message):
    sent = metrics(*(metric(name) for name in ("a.b", "a_b", "c", "d")), n=1, host="gpu-1")
    found, host = run(filtering, {"metrics": settings}, Signal.METRICS, sent, is_message=is_message)
    assert names(found, "scopeMetrics", "metrics") == left
    assert (found is None) == (not left)
    counted = host.read("otelcol_processor_filter_datapoints_filtered_total", processor="filter")
    assert counted == 4 - len(left)


def test_records_are_chosen_by_severity_body_and_attributes():
    sent = logs(
        {"severityText": "INFO", "body": {"stringValue": "one"}, "attributes": kv(k="v")},
        {"severityText": "ERROR", "body": {"stringValue": "two"}},
        {"severityText": "ERROR", "body": {"stringValue": "three"}, "attributes": kv(k="w")},
    )
    for settings, left in (
        ({"include": {"match_type": "strict", "severity_texts": ["ERROR"]}}, ["two", "three"]),
        ({"exclude": {"match_type": "regexp", "bodies": ["^t"]}}, ["one"]),
        (
            {"include": {"match_type": "strict", "record_attributes": [{"key": "k"}]}},
            ["one", "three"],
        ),
        (
            {
                "include": {
                    "match_type": "regexp",
                    "record_attributes": [{"key": "k", "value": "v"}],
                }
            },
            ["one"],
        ),
    ):
        found, _ = run(filtering, {"logs": settings}, Signal.LOGS, sent)
        assert names(found, "scopeLogs", "logRecords") == left


def test_spans_are_chosen_by_name_and_attributes():
    sent = spans({"name": "a"}, {"name": "b", "attributes": kv(k=2)})
    for settings, left in (
        ({"exclude": {"match_type": "strict", "span_names": ["a"]}}, ["b"]),
        ({"exclude": {"match_type": "strict", "attributes": [{"key": "k", "value": 2}]}}, ["a"]),
    ):
        found, host = run(filtering, {"spans": settings}, Signal.TRACES, sent)
        assert names(found, "scopeSpans", "spans") == left
    assert host.read("otelcol_processor_filter_spans_filtered_total", processor="filter") == 1


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (200, "^2..$"),
        (-1, "^-1$"),
        (True, "^true$"),
        (False, "^false$"),
        (1.0, "^1$"),
        (-0.0, "^-0$"),
        (0.25, r"^0\.25$"),
        (1e22, "^10000000000000000000000$"),
        (1e-7, r"^0\.0000001$"),
        ("200", "^2"),
    ],
)
def test_a_pattern_fits_values_that_are_no_texts_as_the_collector_writes_them(value, pattern):
    sent = spans({"name": "a", "attributes": kv(k=value)}, {"name": "b", "attributes": kv(k="x")})
    for side, left in (("include", ["a"]), ("exclude", ["b"])):
        wanted = {"match_type": "regexp", "attributes": [{"key": "k", "value": pattern}]}
        found, _ = run(filtering, {"spans": {side: wanted}}, Signal.TRACES, sent)
        assert names(found, "scopeSpans", "spans") == left


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [
        ("^debug[[:space:]]", True),
        ("[^[:^alpha:]x]", True),
        ("[]a[:digit:]]", True),
        (r"\[[:a]", False),
        ("[:a]", False),
    ],
)
def test_posix_classes_are_refused_in_patterns(pattern, is_refused):
    for module, settings in (
        (filtering, {"logs": {"exclude": {"match_type": "regexp", "bodies": [pattern]}}}),
        (attributes, {"actions": [{"action": "delete", "pattern": pattern}]}),
    ):
        if is_refused:
            with pytest.raises(ConfigError, match="POSIX classes"):
                parse_model(module.FACTORY.config, settings)
        else:
            parse_model(module.FACTORY.config, settings)


@pytest.mark.parametrize("module", [attributes, filtering])
def test_json_that_does_not_fit_its_field_is_refused_for_good(module):
    settings = {
        attributes: {"actions": [{"action": "delete", "key": "a"}]},
        filtering: {"logs": {"exclude": {"match_type": "strict", "bodies": ["x"]}}},
    }[module]
    tree = structs.LogsRequest([structs.ResourceLogs(schema_url=7)])
    export, config = (
        Export.from_tree(Signal.LOGS, tree),
        parse_model(module.FACTORY.config, settings),
    )
    made = module.FACTORY.create(ComponentId("x"), config, Signal.LOGS, KeptBatches())
    with pytest.raises(PermanentError, match="protobuf"):
        made.consume(Batch(Signal.LOGS, export, 1))
