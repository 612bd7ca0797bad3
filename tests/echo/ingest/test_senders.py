"""Processes of one node whose points have the same names and attributes: their counters are each their own."""

import pytest
from tests.echo.ingest.test_rows import NOW_NS, read

from ingero.echo.ingest.intake import Intake
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import QueryContext
from ingero.otlp.codec import Export, build_attributes, structs
from ingero.otlp.names import Signal
from ingero.serving.bearer import Principal
from ingero.serving.query import get_query
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

ANY = Principal("d", "k", None)
NODE = {"ingero.cluster.id": "c1", "ingero.node.id": "n1"}
BY_INSTANCE = [(NODE | {"service.instance.id": name}, "s") for name in "ab"]
BY_SCOPE = [(NODE, name) for name in "ab"]
MINUTES = 10
DIRECTION = {"ingero.memcpy.direction": "h2d"}


def counter(name, value, at_ns, **attributes):
    point = structs.NumberDataPoint(build_attributes(attributes), 0, at_ns, as_int=value)
    return structs.Metric(name, sum=structs.Sum([point], 2, is_monotonic=True))


def gauge(name, value, at_ns):
    point = structs.NumberDataPoint([], 0, at_ns, as_double=value)
    return structs.Metric(name, gauge=structs.Gauge([point]))


def copies(count, at_ns):
    counts = [count, 0, 0] if count < 1_000 else [0, 0, count]
    attributes = build_attributes(DIRECTION)
    point = structs.HistogramDataPoint(attributes, 0, at_ns, count, 1.0, counts, [1.0, 5.0])
    return structs.Metric("gpu.memcpy.duration_ms", histogram=structs.Histogram([point], 2))


def report(sender, n, at_ns):
    """Everything that one process says at one moment; the first has counted for long."""
    value = (
        10 * n
        if sender[1] == "b" or sender[0].get("service.instance.id") == "b"
        else 10**6 + 10 * n
    )
    entries = [
        counter("gpu.kernel.launch.count", value, at_ns),
        counter("gpu.memcpy.bytes_total", value, at_ns, **DIRECTION),
        counter("gpu.memfrag.ioctl_event_total", value, at_ns),
        gauge("ingero.node.straggler_event", float(value >= 10**6), at_ns),
        gauge("ingero.node.degradation_warning", float(value >= 10**6), at_ns),
        copies(value, at_ns),
    ]
    resource, scope = sender
    return Export.from_tree(
        Signal.METRICS,
        structs.MetricsRequest([
            structs.ResourceMetrics(
                structs.Resource(build_attributes(resource)),
                [structs.ScopeMetrics(structs.InstrumentationScope(scope), entries)],
            )
        ]),
    )


@pytest.fixture(params=[BY_INSTANCE, BY_SCOPE], ids=["instance", "scope"])
def ask(store, request):
    """Asks a tool about two processes that reported in turns."""
    intake = Intake(store, ManualClock())
    for n in range(MINUTES):
        for i, sender in enumerate(request.param):
            at_ns = NOW_NS - (60 * (MINUTES - n) - 30 * i) * NS_PER_S
            store.write(intake.build(report(sender, n, at_ns), ANY, "").rows)

    def ask(name):
        query = get_query(QUERIES, name)
        with store.open_reader(60 * NS_PER_S) as reader:
            context = QueryContext(reader, None, NOW_NS, None)
            return query.run(context, query.args()).rows

    return ask


GROWN = 2 * 10 * (MINUTES - 1)


def test_counters_of_two_processes_are_added_and_not_mixed(ask):
    (launches,) = ask("fleet.cluster.kernel_launch_summary")
    assert launches.n_launches == GROWN
    assert launches.launches_per_s == pytest.approx(GROWN / (60 * (MINUTES - 1)))
    (spot,) = ask("fleet.cluster.memfrag_hotspots")
    assert spot.n_events == GROWN
    (copied,) = ask("fleet.cluster.memcpy_bandwidth_summary")
    assert copied.n_bytes == GROWN
    assert copied.n_copies == GROWN


def test_a_flag_that_one_process_raises_and_another_does_not_is_raised_once(ask):
    rows = ask("fleet.cluster.anomaly_list")
    assert sorted(row.kind for row in rows) == ["degradation", "straggler"]


@pytest.mark.usefixtures("ask")
def test_a_statement_can_tell_the_processes_apart(store):
    found = read(
        store,
        "SELECT count(DISTINCT stream), min(length(stream)), max(length(stream)) FROM events "
        "WHERE metric_name = 'gpu.kernel.launch.count'",
    )
    assert found == [(2, 16, 16)]
    assert read(store, "SELECT count(DISTINCT stream) FROM histograms") == [(2,)]
