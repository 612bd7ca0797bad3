"""OTLP names → Prometheus names. Expected values: the OpenTelemetry compatibility specification and the Collector's
translator documentation (``pkg/translator/prometheus/README.md``)."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingero.fleet.helpers.prometheus_names import (
    build_label_name,
    build_labels,
    build_metric_name,
    format_labels,
)


@pytest.mark.parametrize(
    ("name", "unit", "kind", "expected"),
    [
        ("(lambda).function.executions(#)", "", "gauge", "lambda_function_executions"),
        ("system.filesystem.usage", "By", "gauge", "system_filesystem_usage_bytes"),
        ("system.network.dropped", "{packets}", "gauge", "system_network_dropped"),
        ("system.network.dropped", "packets", "gauge", "system_network_dropped_packets"),
        ("system.memory.utilization", "1", "gauge", "system_memory_utilization_ratio"),
        ("storage.filesystem.utilization", "%", "gauge", "storage_filesystem_utilization_percent"),
        ("astro.light.speed", "m/s", "gauge", "astro_light_speed_meters_per_second"),
        ("system.io", "By", "counter", "system_io_bytes_total"),
        ("requests.total.count", "1", "counter", "requests_count_total"),
        ("ingero_fleet_threshold", "", "gauge", "ingero_fleet_threshold"),
        ("ingero.node.health_score", "1", "gauge", "ingero_node_health_score_ratio"),
        (
            "ingero.node.cuda_memcpy_bytes_total",
            "By",
            "counter",
            "ingero_node_cuda_memcpy_bytes_total",
        ),
        ("nccl.collective.duration_ms", "ms", "gauge", "nccl_collective_duration_ms_milliseconds"),
        ("2xx.rate", "", "gauge", "_2xx_rate"),
        ("!!!", "", "gauge", ""),
    ],
)
def test_name_and_unit_become_what_the_specification_says(name, unit, kind, expected):
    built = build_metric_name(name, unit, is_gauge=kind == "gauge", is_counter=kind == "counter")
    assert built == expected


def test_without_suffixes_only_characters_change():
    name = build_metric_name(
        "system.io", "By", is_gauge=False, is_counter=True, with_suffixes=False
    )
    assert name == "system_io"


def test_namespace_comes_first_and_hides_a_leading_digit():
    name = build_metric_name("2xx", "", is_gauge=True, is_counter=False, namespace="my-site")
    assert name == "my_site_2xx"


def test_labels_that_become_the_same_share_a_value():
    assert build_labels([("a.b", "2"), ("a_b", "1")]) == {"a_b": "2;1"}


def test_hostile_value_stays_inside_its_quotes():
    text = format_labels({"cluster": 'evil"} 1\nfake_metric{x="\\'})
    assert text == r'cluster="evil\"} 1\nfake_metric{x=\"\\"'


@given(st.text(max_size=40))
def test_every_attribute_key_becomes_a_legal_label(key):
    name = build_label_name(key)
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
    assert not name.startswith("__")


@given(st.text(max_size=40), st.text(max_size=8), st.booleans(), st.booleans())
def test_every_metric_name_becomes_legal_or_nothing(name, unit, is_gauge, with_suffixes):
    built = build_metric_name(
        name, unit, is_gauge=is_gauge, is_counter=not is_gauge, with_suffixes=with_suffixes
    )
    assert built == "" or re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", built)
