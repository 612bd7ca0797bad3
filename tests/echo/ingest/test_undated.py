"""Points whose time is unknown (0), and the same request again."""

import pytest
from tests.echo.ingest.test_rows import NOW_NS, gauge, metrics, read

from ingero.echo.ingest.intake import Intake
from ingero.otlp.codec import Export, structs
from ingero.otlp.names import Signal
from ingero.serving.bearer import Principal
from ingero.testing.clock import ManualClock
from ingero.units import NS_PER_S

ANY = Principal("d", "k", None)
LATER_NS = NOW_NS + 30 * NS_PER_S


@pytest.fixture
def send(store):
    clock = ManualClock()
    intake = Intake(store, clock)

    def send(export):
        """Each arrives at a time of its own, as a retry does."""
        clock.advance(5 * NS_PER_S)
        store.write(intake.build(export, ANY, "").rows)

    return send


def count(store):
    return read(store, "SELECT metric_name, count(*) FROM events GROUP BY ALL ORDER BY 1")


def test_a_retry_of_points_without_a_time_is_known_by_the_dated_ones_beside_them(store, send):
    for _ in range(3):
        send(metrics(gauge("dated", 1.0), gauge("undated", 2.0, at_ns=0)))
    assert count(store) == [("dated", 1), ("undated", 1)]
    assert store.counters.duplicates == 4


def test_the_same_value_without_a_time_is_another_point_in_another_report(store, send):
    send(metrics(gauge("dated", 1.0), gauge("undated", 2.0, at_ns=0)))
    send(metrics(gauge("dated", 1.0, at_ns=LATER_NS), gauge("undated", 2.0, at_ns=0)))
    assert count(store) == [("dated", 2), ("undated", 2)]
    assert store.counters.duplicates == 0


def test_a_report_that_shares_a_dated_point_with_another_is_not_the_same(store, send):
    """As when a sender cuts what waits into batches."""
    send(metrics(gauge("dated", 1.0), gauge("undated", 2.0, at_ns=0)))
    send(metrics(gauge("dated", 1.0), gauge("other", 3.0), gauge("undated", 2.0, at_ns=0)))
    send(metrics(gauge("dated", 1.5), gauge("undated", 2.0, at_ns=0)))
    assert count(store) == [("dated", 2), ("other", 1), ("undated", 3)]


def test_reports_without_any_time_are_each_kept(store, send):
    """Nothing tells a retry from the next report of a value that has not changed."""
    for _ in range(2):
        send(metrics(gauge("undated", 2.0, at_ns=0)))
    assert count(store) == [("undated", 2)]


def test_histograms_and_summaries_without_a_time_are_known_again(store, send):
    point = structs.HistogramDataPoint([], 0, 0, 6, 12.0, [1, 2, 3], [1.0, 5.0], max=9.0)
    for _ in range(2):
        send(
            metrics(
                gauge("dated", 1.0), structs.Metric("h", histogram=structs.Histogram([point], 2))
            )
        )
    assert read(store, "SELECT count(*) FROM histograms") == [(1,)]


def test_log_records_without_a_time_are_known_again(store, send):
    records = [
        structs.LogRecord(time_unix_nano=at_ns, body=structs.AnyValue(string_value=body))
        for at_ns, body in ((NOW_NS, "dated"), (0, "undated"))
    ]
    export = Export.from_tree(
        Signal.LOGS,
        structs.LogsRequest([
            structs.ResourceLogs(structs.Resource([]), [structs.ScopeLogs(None, records)])
        ]),
    )
    for _ in range(2):
        send(export)
    assert read(store, "SELECT body, count(*) FROM logs GROUP BY ALL ORDER BY 1") == [
        ("dated", 1),
        ("undated", 1),
    ]
