"""Bodies that nobody wrote: whatever they hold, they are answered, and so is the next push of another tenant."""

import os

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from tests.echo.process import TEAM_A, TEAM_B, Served, metrics, point
from tests.echo.test_poison import to_protobuf

from ingero.errors import BadDataError

EDGES = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)]
NUMBERS = ["NaN", "Infinity", "-Infinity", 1e308, -0.0, 5e-324, 0.5]
TEXTS = [
    "",
    "x",
    "\0",
    "train-1",
    "\n",
    "ü" * 300,
    "💥" * 100,
    "'; DROP TABLE events",
    "v" * 20_000,
]
NAMES = [
    *(
        "ingero.cluster.id",
        "ingero.node.id",
        "ingero.world_size",
        "ingero.node.rank",
        "ingero.provider",
    ),
    *(
        "host.name",
        "k8s.node.name",
        "cluster_id",
        "node_id",
        "ingero.node.state",
        "ingero.gpu_model",
    ),
    *(
        "ingero.gpu_count",
        "ingero.rank",
        "v.rank",
        "v.start_ns",
        "v.end_wall_ns",
        "v.slowdown",
        "v.victims",
    ),
    *(
        "v.evidence_log10",
        "v.lost_gpu_ms",
        "v.amount",
        "v.gpu_seconds",
        "v.score",
        "v.incident_id",
        "quantile",
    ),
    *(
        "ingero.collective.comm",
        "ingero.collective.n_ranks",
        "ingero.collective.clock",
        "",
        "k" * 300,
    ),
]
METRICS = [
    "ingero.node.health_score",
    "ingero.node.info",
    "ingero.node.straggler_event",
    "m",
    "",
    "m" * 300,
]
EVENTS = [
    *("ingero.verdict", "ingero.fleet.cost", "ingero.fleet.episode", "x.incident", "other", ""),
    "ingero.collective.batch",
]

integers = st.one_of(st.sampled_from(EDGES), st.integers(-(2**65), 2**65)).flatmap(
    lambda value: st.sampled_from([value, str(value)])
)
unsigned = st.one_of(st.sampled_from([abs(edge) for edge in EDGES]), st.integers(0, 2**64)).map(str)
numbers = st.one_of(st.sampled_from(NUMBERS), st.floats(allow_nan=False, allow_infinity=False))
texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=30))
scalars = st.one_of(
    st.booleans().map(lambda value: {"boolValue": value}),
    integers.map(lambda value: {"intValue": value}),
    numbers.map(lambda value: {"doubleValue": value}),
    texts.map(lambda value: {"stringValue": value}),
    st.sampled_from([{}, {"bytesValue": "AAECAw=="}, None]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: {"arrayValue": {"values": items}}),
        st.lists(st.tuples(texts, inner), max_size=3).map(
            lambda items: {"kvlistValue": {"values": [{"key": k, "value": v} for k, v in items]}}
        ),
    ),
    max_leaves=6,
)
attributes = st.lists(
    st.builds(
        lambda key, value: {"key": key, "value": value},
        st.one_of(st.sampled_from(NAMES), texts),
        values,
    ),
    max_size=6,
)
lists_of_counts = st.lists(unsigned, max_size=5)
side = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"offset": st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**31])},
        optional={"bucketCounts": lists_of_counts},
    ),
)
data_point = st.fixed_dictionaries(
    {"timeUnixNano": unsigned},
    optional={
        "attributes": attributes,
        "asDouble": numbers,
        "asInt": integers,
        "startTimeUnixNano": unsigned,
        "flags": st.integers(0, 3),
        "count": unsigned,
        "sum": numbers,
        "min": numbers,
        "max": numbers,
        "bucketCounts": lists_of_counts,
        "explicitBounds": st.lists(numbers, max_size=5),
        "scale": st.sampled_from([0, 20, -10, -2000, 2000, 2**31 - 1, -(2**31)]),
        "zeroCount": unsigned,
        "zeroThreshold": numbers,
        "positive": side,
        "negative": side,
        "quantileValues": st.lists(
            st.fixed_dictionaries({"quantile": numbers, "value": numbers}), max_size=3
        ),
    },
)
group = st.fixed_dictionaries(
    {"dataPoints": st.lists(data_point, max_size=3)},
    optional={"aggregationTemporality": st.integers(-1, 3)},
)
metric = st.builds(
    lambda name, kind, points: {"name": name, kind: points},
    st.sampled_from(METRICS),
    st.sampled_from(["gauge", "sum", "histogram", "exponentialHistogram", "summary"]),
    group,
)
record = st.fixed_dictionaries(
    {"timeUnixNano": unsigned, "eventName": st.sampled_from(EVENTS), "attributes": attributes},
    optional={"body": values, "severityNumber": st.integers(-5, 30), "severityText": texts},
)
span = st.fixed_dictionaries(
    {
        "startTimeUnixNano": unsigned,
        "endTimeUnixNano": unsigned,
        "name": texts,
        "attributes": attributes,
    },
    optional={
        "traceId": st.sampled_from(["", "ab" * 16, "ab" * 100]),
        "spanId": st.sampled_from(["cd" * 8, "cd" * 9]),
        "parentSpanId": st.sampled_from(["", "cd" * 8]),
        "status": st.fixed_dictionaries({"code": st.sampled_from([0, 2, 3, -1])}),
    },
)


def request(word, scope, inner, item):
    own = [{"key": "ingero.cluster.id", "value": {"stringValue": "train-1"}}]
    resource = attributes.flatmap(lambda more: st.sampled_from([own + more, more]))
    entry = st.builds(
        lambda found, items: {"resource": {"attributes": found}, scope: [{inner: items}]},
        resource,
        st.lists(item, max_size=3),
    )
    return st.lists(entry, max_size=2).map(lambda entries: {word: entries})


requests = st.one_of(
    st.tuples(st.just("metrics"), request("resourceMetrics", "scopeMetrics", "metrics", metric)),
    st.tuples(st.just("logs"), request("resourceLogs", "scopeLogs", "logRecords", record)),
    st.tuples(st.just("traces"), request("resourceSpans", "scopeSpans", "spans", span)),
)


N_BODIES = 150 if os.environ.get("INGERO_PROPERTIES") == "any" else 50
"""`make fuzz` sends more; one body is six requests."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    fast = ("--set", "group_commit=1ms", "--set", "otlp_rate_per_second=1e6")
    with Served(tmp_path_factory.mktemp("echo"), *fast) as echo:
        yield echo


def other_tenant_is_answered(served):
    body = to_protobuf("metrics", metrics([point()], cluster="prod-9"))
    assert served.push(body, token=TEAM_B).status_code == 200


@pytest.mark.timeout(280)
def test_no_body_ends_ingest(served):
    """As JSON, as protobuf, and as protobuf with bytes changed; from a tenant and from an operator."""

    @settings(max_examples=N_BODIES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        asked=requests,
        damage=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    )
    def one_body(asked, damage):
        signal, body = asked
        answers = [served.push(body, signal, TEAM_A), served.push(body, signal)]
        try:
            encoded = to_protobuf(signal, body)
        except (BadDataError, msgspec.DecodeError):
            encoded = b""
        answers += [served.push(encoded, signal, TEAM_A), served.push(encoded, signal)]
        if encoded:
            broken = bytearray(encoded)
            for at, byte in damage:
                broken[at % len(broken)] = byte
            answers.append(served.push(bytes(broken), signal))
        assert {answer.status_code for answer in answers} <= {200, 400, 403}
        other_tenant_is_answered(served)

    one_body()
    assert (served.state("/readyz"), served.state("/healthz")) == (200, 200)
    assert served.metric("ingero_echo_commits_total", outcome="failed") == 0
    refused = ("time", "size", "cluster", "histogram", "batch")
    told = [served.metric("ingero_echo_records_refused_total", reason=reason) for reason in refused]
    assert sum(told) > 0
    log = served.log.read_text()
    assert "because of a defect" not in log
    assert "Traceback" not in log
