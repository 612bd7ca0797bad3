"""Instruments that threads share: nothing is lost, and Prometheus can read them."""

import json
import logging
import sys
import threading

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ingero.telemetry.declare import counter, gauge, histogram
from ingero.telemetry.exposition import MeterCollector, encode_metrics, encode_text
from ingero.telemetry.log import ConsoleFormatter, JsonFormatter
from ingero.telemetry.metrics import MeterRegistry

PUSHES = counter("test_pushes_total", "Pushes.", "kind")
LEVEL = gauge("test_level", "Level.", "kind")
SECONDS = histogram("test_seconds", "Seconds.", (0.1, 1.0), "kind")


def _read(meter):
    text = encode_metrics(meter)[0].decode()
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_no_addition_of_many_threads_is_lost():
    meter = MeterRegistry()
    add = meter.counter(PUSHES).bound(kind="a")
    n_threads, n_adds = 8, 20_000
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(target=lambda: [add(1) for _ in range(n_adds)])
            for _ in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert _read(meter)["test_pushes_total", "a"] == n_threads * n_adds


@pytest.mark.parametrize(
    ("value", "written"),
    [(2000, "2000"), (1.048576e8, "104857600"), (2**53 * 4, str(2**55)), (-3.0, "-3"), (0.25, "0.25"),
     (1e-9, "1e-09"), (float("inf"), "+Inf"), (float("nan"), "NaN")],
)  # fmt: skip
def test_whole_number_is_written_as_one(value, written):
    meter = MeterRegistry()
    meter.gauge(LEVEL).set(value, kind='a"\\\n')
    text = encode_metrics(meter)[0].decode()
    assert text == (
        "# HELP test_level Level.\n# TYPE test_level gauge\n"
        f'test_level{{kind="a\\"\\\\\\n"}} {written}\n'
    )


def test_text_is_what_the_library_writes_but_for_whole_numbers():
    meter = MeterRegistry()
    meter.counter(PUSHES).bound(kind="a")(0.5)
    meter.gauge(LEVEL).set(0.5, kind="b")
    assert encode_text(MeterCollector(meter).collect()) == generate_latest(MeterCollector(meter))


def test_histogram_counts_a_value_on_its_bound_within_it():
    meter = MeterRegistry()
    record = meter.histogram(SECONDS).bound(kind="a")
    for value in (0.05, 0.1, 0.5, 2.0):
        record(value)
    found = _read(meter)
    assert found["test_seconds_bucket", "0.1", "a"] == 2
    assert found["test_seconds_bucket", "1.0", "a"] == 3
    assert found["test_seconds_bucket", "+Inf", "a"] == 4
    assert found["test_seconds_sum", "a"] == pytest.approx(2.65)


def test_gauge_is_absent_until_set_and_after_removal():
    meter = MeterRegistry()
    level = meter.gauge(LEVEL)
    assert _read(meter) == {}
    level.set(0, kind="a")
    level.watch(lambda: 7, kind="b")
    assert _read(meter) == {("test_level", "a"): 0, ("test_level", "b"): 7}
    level.remove(kind="a")
    level.remove(kind="b")
    assert _read(meter) == {}


def test_bound_counter_is_shown_at_zero():
    meter = MeterRegistry()
    meter.counter(PUSHES).bound(kind="a")
    assert _read(meter) == {("test_pushes_total", "a"): 0}


def test_a_count_that_other_code_keeps_is_asked_for_at_each_scrape():
    meter, kept = MeterRegistry(), {"n": 3}
    meter.counter(PUSHES).watch(lambda: kept["n"], kind="a")
    assert _read(meter) == {("test_pushes_total", "a"): 3}
    kept["n"] = 5
    assert _read(meter) == {("test_pushes_total", "a"): 5}


@pytest.mark.parametrize("name", ["test_nodes_count", "test_nodes_total"])
def test_a_gauge_with_a_suffix_of_another_type_is_shown_without_a_type(name):
    meter = MeterRegistry()
    meter.gauge(gauge(name, "Nodes.")).set(2)
    text = encode_metrics(meter)[0].decode()
    assert f"# TYPE {name} untyped\n{name} 2\n" in text


def test_wrong_labels_and_second_declarations_are_programming_errors():
    meter = MeterRegistry()
    pushes = meter.counter(PUSHES)
    assert meter.counter(PUSHES) is pushes
    with pytest.raises(TypeError, match="needs the label"):
        pushes.add(1)
    with pytest.raises(TypeError, match="has labels"):
        pushes.add(1, kind="a", other="b")
    with pytest.raises(TypeError, match="declared twice"):
        meter.counter(counter("test_pushes_total", "Something else."))
    with pytest.raises(TypeError, match="declared as a gauge"):
        meter.counter(LEVEL)


def test_openmetrics_is_answered_to_who_asks_for_it():
    meter = MeterRegistry()
    meter.counter(PUSHES).add(1, kind="a")
    body, content_type = encode_metrics(meter, "application/openmetrics-text;version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_log_line_cannot_be_forged_by_its_message():
    record = logging.LogRecord("x", logging.WARNING, "", 0, "a\nINFO b %s", ("c",), None)
    assert "\n" not in ConsoleFormatter().format(record)
    line = json.loads(JsonFormatter().format(record))
    assert (line["msg"], line["level"], line["logger"]) == ("a\nINFO b c", "warning", "x")
