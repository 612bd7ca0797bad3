"""Native histograms and exemplars: the protobuf exposition, who gets it, and what a real Prometheus makes of it."""

import math
import time
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import AlwaysOnExemplarFilter, MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_open_metrics,
)
from tests.e2e.prometheus import each_prometheus, serve_config
from tests.fleet.exporters.scraped import (
    NODE,
    WALL,
    Scraped,
    gauge_export,
    labelled,
    sample,
    series,
)

from ingero.fleet.exporters.prometheus.formats import ExpositionFormat, choose_format
from ingero.fleet.exporters.prometheus.protobuf import METRIC_FAMILY
from ingero.fleet.helpers.prometheus_histograms import NativeHistogram, build_spans, read_native
from ingero.fleet.helpers.prometheus_names import build_labels, format_labels, read_labels
from ingero.otlp.codec import (
    build_gauge,
    build_metrics,
    build_number,
    build_sum,
    decode_export,
    encode_protobuf,
    structs,
)
from ingero.otlp.names import ContentType, Signal
from ingero.testing.fleet import build_fleet_config, run_fleet
from ingero.testing.waiting import wait_until
from ingero.units import NS_PER_S

PROTOBUF = {"accept": ExpositionFormat.PROTOBUF.value}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def exponential(scale=0, offset=0, counts=(), zero=0, negative=(), **more):
    """A point; its count is that of its buckets unless it is given."""
    total = sum(counts) + sum(negative) + zero
    return structs.ExponentialHistogramDataPoint(**{
        "time_unix_nano": WALL, "count": total, "sum": 1.5, "scale": scale, "zero_count": zero,
        "positive": structs.Buckets(offset, list(counts)), "negative": structs.Buckets(0, list(negative)), **more,
    })  # fmt: skip


def histogram_export(*points, temporality=2, is_message=False):
    data = structs.ExponentialHistogram(list(points), aggregation_temporality=temporality)
    metric = structs.Metric(name="wait", unit="s", exponential_histogram=data)
    export = build_metrics(NODE, [metric], "s")
    if is_message:
        export = decode_export(encode_protobuf(export), Signal.METRICS, ContentType.PROTOBUF)
    return export


def read_varint(body, at):
    number = shift = 0
    while True:
        number |= (body[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if body[at - 1] < 0x80:
            return number, at


def families(body):
    """The messages of a body, by name."""
    found, at = {}, 0
    while at < len(body):
        size, at = read_varint(body, at)
        family = METRIC_FAMILY.FromString(body[at : at + size])
        found[family.name] = family
        at += size
    return found


def scrape(scraped, *exports):
    body = scraped.scrape(lambda: [scraped.push(one) for one in exports], headers=PROTOBUF, is_bytes=True)  # fmt: skip
    assert scraped.content_type == ExpositionFormat.PROTOBUF
    return families(body)


def numbers():
    """Of each type that is one number: a counter, a gauge and an untyped one."""
    counter = build_sum("jobs", [build_number(7, WALL, {"q": 'a"b\\c\n'})], unit="")
    gauges = [("low", -0.5), ("zero", 0.0), ("high", float("inf")), ("waiting_count", 3.0)]
    named = [build_gauge(name, [build_number(value, WALL)], "") for name, value in gauges]
    return build_metrics(NODE, [counter, *named], "s")


@pytest.mark.parametrize("name", ["push_active.json", "straggler_event_1.json", None])
def test_both_encodings_of_a_page_have_the_same_series(name):
    export = numbers() if name is None else sample(name)
    text = Scraped(send_timestamps=True)
    wanted = series(text.scrape(lambda: text.push(export)))
    found = {}
    for family in scrape(Scraped(send_timestamps=True), export).values():
        assert family.help
        for metric in family.metric:
            labels = {pair.name: pair.value for pair in metric.label}
            value = {0: metric.counter, 1: metric.gauge, 3: metric.untyped}[family.type].value
            found[labelled(family.name, **labels)] = value
            assert metric.timestamp_ms > 0
    assert found == wanted
    assert len(found) >= 1


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_labels_are_read_back_from_their_text(attributes):
    labels = build_labels(attributes.items())
    assert dict(read_labels(format_labels(labels))) == {k: v for k, v in labels.items() if v}


@pytest.mark.parametrize("is_message", [False, True], ids=["json", "protobuf"])
def test_an_exponential_histogram_becomes_a_native_one(is_message):
    point = exponential(scale=1, offset=-2, counts=[3, 0, 0, 5, 6], zero=2, negative=[4])
    family = scrape(Scraped(), histogram_export(point, is_message=is_message))["wait_seconds"]
    (metric,) = family.metric
    found = metric.histogram
    assert (family.type, found.sample_count, found.sample_sum, found.schema) == (4, 20, 1.5, 1)
    assert (found.zero_count, found.zero_threshold) == (2, 1e-128)
    assert [(one.offset, one.length) for one in found.positive_span] == [(-1, 1), (2, 2)]
    assert list(found.positive_delta) == [3, 2, 1]
    assert [(one.offset, one.length) for one in found.negative_span] == [(1, 1)]
    assert list(found.negative_delta) == [4]
    assert [(one.upper_bound, one.cumulative_count) for one in found.bucket] == [(math.inf, 20)]


def test_text_shows_count_and_sum_of_an_exponential_histogram():
    scraped = Scraped()
    found = series(scraped.scrape(lambda: scraped.push(histogram_export(exponential(counts=[3])))))
    node = {"ingero_node_id": "n1", "ingero_cluster_id": "c1"}
    assert found == {
        labelled("wait_seconds_bucket", le="+Inf", **node): 3.0,
        labelled("wait_seconds_count", **node): 3.0,
        labelled("wait_seconds_sum", **node): 1.5,
    }


@given(
    st.lists(st.floats(1e-9, 1e9) | st.floats(-1e9, -1e-9), max_size=60),
    st.integers(-4, 12),
    st.integers(0, 6),
)
def test_each_value_is_in_the_bucket_that_prometheus_looks_for_it_in(values, scale, shift):
    """Prometheus: bucket ``i`` of schema ``n`` reaches from ``2 ** ((i - 1) * 2 ** -n)``, without it, to the next."""

    def index_otlp(value):
        return math.ceil(math.log2(abs(value)) * 2.0**scale) - 1

    def side(sign):
        indices = sorted(index_otlp(value) for value in values if value * sign > 0)
        if not indices:
            return structs.Buckets()
        counts = [0] * (indices[-1] - indices[0] + 1)
        for one in indices:
            counts[one - indices[0]] += 1
        return structs.Buckets(indices[0], counts)

    positive, negative = side(1), side(-1)
    if max(len(positive.bucket_counts), len(negative.bucket_counts)) > 4096:
        return
    point = structs.ExponentialHistogramDataPoint(
        count=len(values), scale=scale, positive=positive, negative=negative
    )
    native = read_native(point)
    native = native.widen(max(-4, native.schema - shift))
    for sign, counts in ((1, native.positive), (-1, native.negative)):
        mine = [abs(value) for value in values if value * sign > 0]
        assert sum(counts.values()) == len(mine)
        for bucket, count in counts.items():
            low, high = (2.0 ** (at * 2.0**-native.schema) for at in (bucket - 1, bucket))
            sure = sum(low * (1 + 1e-9) < one <= high * (1 - 1e-9) for one in mine)
            may = sum(low * (1 - 1e-9) <= one <= high * (1 + 1e-9) for one in mine)
            assert sure <= count <= may
        spans, deltas = build_spans(counts)
        assert read_back(spans, deltas) == counts


def read_back(spans, deltas):
    """As Prometheus reads spans."""
    found, at, count, left = {}, 0, 0, iter(deltas)
    for offset, length in spans:
        at += offset
        for _ in range(length):
            count += next(left)
            found[at] = count
            at += 1
    return found


@given(st.dictionaries(st.integers(-50, 50), st.integers(1, 99), max_size=12))
def test_spans_are_runs(counts):
    spans, _ = build_spans(counts)
    runs = [
        list(run) for _, run in groupby(enumerate(sorted(counts)), lambda pair: pair[1] - pair[0])
    ]
    assert [span.length for span in spans] == [len(run) for run in runs]


def test_deltas_add_up_in_the_coarser_resolution():
    scraped = Scraped()
    exports = [
        histogram_export(exponential(scale=1, offset=0, counts=[1, 2, 4]), temporality=1),
        histogram_export(exponential(scale=0, offset=0, counts=[8], zero=1), temporality=1),
    ]
    (metric,) = scrape(scraped, *exports)["wait_seconds"].metric
    found = metric.histogram
    assert (found.schema, found.sample_count, found.zero_count, found.sample_sum) == (0, 16, 1, 3.0)
    assert list(found.positive_delta) == [11, -7]
    huge = NativeHistogram(0, 1.0, (1 << 62) - 1, {}, {})
    assert huge.plus(NativeHistogram(0, 1.0, 1, {}, {})) is None


@pytest.mark.parametrize(
    "point",
    [
        exponential(scale=-5, counts=[1]),
        exponential(counts=[1, 2], count=4),
        exponential(counts=[1 << 63]),
        exponential(counts=[1], zero_threshold=math.nan),
        exponential(counts=[1], offset=2**31 - 1),
        exponential(counts=[1] * 5000),
    ],
    ids=["scale", "count", "huge", "threshold", "offset", "buckets"],
)
def test_what_prometheus_would_refuse_a_scrape_for_is_counted_and_not_shown(point):
    scraped = Scraped()
    text = scraped.scrape(
        lambda: [scraped.push(histogram_export(point)), scraped.push(gauge_export())],
        lambda: scraped.host.advance(NS_PER_S),
    )
    assert list(series(text).values()) == [1.0]
    name = "ingero_fleet_prometheus_unsupported_points_total"
    assert scraped.host.read(name, exporter="prometheus") == 1


def exemplar(value, second, **more):
    given = {"as_double": value, "time_unix_nano": WALL + second * NS_PER_S, "trace_id": TRACE}
    return structs.Exemplar(**{**given, "span_id": SPAN, **more})


LONG = [structs.KeyValue("note", structs.AnyValue(string_value="x" * 200)), structs.KeyValue("user", structs.AnyValue(string_value="u"))]  # fmt: skip


def exemplars_export(is_message):
    counted = build_number(7, WALL)
    counted.exemplars = [exemplar(1.0, 2), exemplar(2.0, 1)]
    gauged = build_number(3, WALL)
    gauged.exemplars = [exemplar(3.0, 1)]
    distributed = structs.HistogramDataPoint(
        time_unix_nano=WALL, count=6, sum=6.0, explicit_bounds=[0.1, 1.0], bucket_counts=[1, 2, 3],
        exemplars=[exemplar(0.05, 1), exemplar(0.1, 2), exemplar(5.0, 3, filtered_attributes=LONG, trace_id="00" * 16)],
    )  # fmt: skip
    export = build_metrics(
        NODE,
        [
            build_sum("jobs", [counted], unit=""),
            structs.Metric(name="g", gauge=structs.Gauge([gauged])),
            structs.Metric(name="wait", histogram=structs.Histogram([distributed], aggregation_temporality=2)),
        ],
        "s",
    )  # fmt: skip
    if is_message:
        export = decode_export(encode_protobuf(export), Signal.METRICS, ContentType.PROTOBUF)
    return export


SECONDS = WALL / NS_PER_S
IDS = {"trace_id": TRACE, "span_id": SPAN}


@pytest.mark.parametrize("is_message", [False, True], ids=["json", "protobuf"])
def test_exemplars_are_the_latest_of_a_counter_and_of_each_bucket(is_message):
    scraped = Scraped(enable_open_metrics=True)
    text = scraped.scrape(
        lambda: scraped.push(exemplars_export(is_message)),
        headers={"accept": "application/openmetrics-text; version=1.0.0"},
    )
    found = {
        (one.name, one.labels.get("le")): (one.exemplar.labels, one.exemplar.value, float(one.exemplar.timestamp))
        for family in parse_open_metrics(text)
        for one in family.samples
        if one.exemplar is not None
    }  # fmt: skip
    user = {"span_id": SPAN, "user": "u"}
    assert found == {
        ("jobs_total", None): (IDS, 1.0, SECONDS + 2),
        ("wait_bucket", "0.1"): (IDS, 0.1, SECONDS + 2),
        ("wait_bucket", "+Inf"): (user, 5.0, SECONDS + 3),
    }
    plain = Scraped()
    assert TRACE not in plain.scrape(lambda: plain.push(exemplars_export(is_message)))


def test_exemplars_stay_until_newer_ones_come_and_are_in_the_protobuf_too():
    point = exponential(counts=[4], exemplars=[exemplar(1.0, second) for second in range(12)])
    scraped = Scraped()
    later = histogram_export(exponential(counts=[5]))
    found = scrape(scraped, exemplars_export(is_message=False), histogram_export(point), later)
    (counter,) = found["jobs_total"].metric
    shown = counter.counter.exemplar
    assert {pair.name: pair.value for pair in shown.label} == IDS
    assert (shown.value, shown.timestamp.seconds) == (1.0, int(SECONDS) + 2)
    (native,) = found["wait_seconds"].metric
    at = [one.timestamp.seconds - int(SECONDS) for one in native.histogram.exemplars]
    assert at == list(range(2, 12))
    assert native.histogram.bucket[0].exemplar.timestamp.seconds == int(SECONDS) + 11
    (explicit,) = found["wait"].metric
    assert [one.HasField("exemplar") for one in explicit.histogram.bucket] == [True, False, True]
    assert [one.cumulative_count for one in explicit.histogram.bucket] == [1, 3, 6]


V3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;"
    "q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
V3_NATIVE = f"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,{V3}"  # fmt: skip
TEXT, OPEN, BINARY = ExpositionFormat


@pytest.mark.parametrize(
    ("accept", "has_open_metrics", "chosen"),
    [
        ("", True, TEXT),
        ("*/*", True, TEXT),
        (V3, True, OPEN),
        (V3, False, TEXT),
        (V3_NATIVE, True, BINARY),
        (V3_NATIVE.replace("delimited;q=0.7", "delimited;q=0.1"), True, OPEN),
        (V3_NATIVE.replace("delimited", "text"), True, OPEN),
        ("application/openmetrics-text;q=0,text/plain", True, TEXT),
        ("application/openmetrics-text;q=x", True, TEXT),
        ("image/png", True, TEXT),
        (";;,=,\x00", True, TEXT),
    ],
)
def test_the_scraper_gets_what_it_wants_most(accept, has_open_metrics, chosen):
    assert choose_format(accept, has_open_metrics=has_open_metrics) is chosen


def send_from_sdk(url, values):
    """Record these in a span of the OpenTelemetry SDK, as an exponential histogram, one with bounds and a counter."""
    view = View(instrument_name="step", aggregation=ExponentialBucketHistogramAggregation())
    reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{url}/v1/metrics"), 3_600_000)
    provider = MeterProvider(
        [reader], Resource({"ingero.node.id": "n1"}), AlwaysOnExemplarFilter(), views=[view]
    )
    meter = provider.get_meter("t")
    instruments = [meter.create_histogram("step", "s"), meter.create_histogram("plain", "s")]
    counter = meter.create_counter("steps")
    with TracerProvider().get_tracer("t").start_as_current_span("training") as span:
        for value in values:
            for one in instruments:
                one.record(value)
            counter.add(1)
    provider.force_flush()
    provider.shutdown()
    return trace.format_trace_id(span.get_span_context().trace_id)


@each_prometheus
@pytest.mark.slow
def test_a_real_prometheus_answers_with_quantiles_and_traces(binary, tmp_path):
    values = [0.1 * 1.05**step for step in range(100)]
    with run_fleet(build_fleet_config()) as fleet:
        target = fleet.addresses["exporters.prometheus"]
        job = {"job_name": "f", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": [{"targets": [target]}]}  # fmt: skip
        flag = "--enable-feature=native-histograms,exemplar-storage"
        with serve_config(tmp_path, {"scrape_configs": [job]}, flag, binary=binary) as prometheus:
            trace_id = send_from_sdk(fleet.url("receivers.otlp http", ""), values)
            wait_until(lambda: prometheus.number("histogram_count(step_seconds)") == 100, 60)
            for share in (0.1, 0.5, 0.9):
                found = prometheus.number(f"histogram_quantile({share}, step_seconds)")
                exact = values[round(share * 100) - 1]
                assert found == pytest.approx(exact, rel=0.06), (share, found)
            assert prometheus.number("histogram_sum(step_seconds)") == pytest.approx(sum(values))
            assert prometheus.number('plain_seconds_bucket{le="5.0"}') == sum(value <= 5 for value in values)  # fmt: skip
            assert prometheus.number("steps_total") == 100
            names = ("steps_total", "plain_seconds_bucket", "step_seconds")
            for name in names:
                found = wait_until(lambda name=name: prometheus.exemplars(name), 60)
                assert {labels["trace_id"] for labels, _ in found[name]} == {trace_id}
                assert all(time.time() > value > 0 for _, value in found[name])
