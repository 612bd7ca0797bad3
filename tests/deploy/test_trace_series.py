"""The series of a real trace: those that the shipped rules ask for are there, and promtool reads the page."""

import os
import re
import subprocess
import sys

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from scripts.shown_series import list_shown
from tests.deploy.promtool import check_page
from tests.deploy.series import OF_A_TRACE, SUFFIXES, find_names, is_known, iter_queries
from tests.deploy.site import ROOT, SERVING, read_rules
from tests.e2e.prometheus import needs_prometheus, run_prometheus
from tests.support import local_http

from ingero.sim.runner import get_program
from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.kernel, pytest.mark.slow, needs_prometheus]
OF_AN_EVENT = {"gpu_memcpy_bytes_total", "ingero_incidents_total"}
"""Absent until there is a copy or an incident."""


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Address of a trace that watches two simulated ranks beside the simulator's NVML, and its page."""
    folder = tmp_path_factory.mktemp("trace")
    environ = {**os.environ, "LD_LIBRARY_PATH": str(get_program().parent)}
    command = [
        sys.executable, "-m", "ingero", "trace", "--prometheus", "127.0.0.1:0", "--hw-metrics",
        "--db", str(folder / "trace.db"), "--inference", "--",
        sys.executable, "-m", "ingero", "sim", "run", "ranks", "--ranks", "2", "steps=20000",
    ]  # fmt: skip
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environ)
    try:
        address = wait_until(lambda: SERVING.search(log.read_text()), 60)[1]

        def scrape():
            text = local_http.get(f"http://{address}/metrics", timeout=30).text
            is_whole = all(
                name in text
                for name in (
                    "nccl_collective_duration_ms_bucket",
                    "ingero_infer_step_duration_ns_bucket",
                )
            )
            return text if is_whole else None

        yield address, wait_until(scrape, 60)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def page(traced):
    return traced[1]


def test_series_that_the_rules_ask_of_a_trace_are_on_its_page(page):
    names = set(re.findall(r"^# TYPE (\S+)", page, re.MULTILINE))
    asked = {
        name
        for rules in read_rules().values()
        for rule in rules
        for name in find_names(rule["expr"])
        if OF_A_TRACE.match(name)
    }
    assert len(asked) >= 3
    assert {name for name in asked if not is_known(name, names)} <= OF_AN_EVENT


def test_every_series_has_a_page_that_says_what_its_help_says(page):
    told = {one.name: one.meaning for one in list_shown("agent")}
    helps = dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))
    assert len(helps) > 60
    assert {name: told.get(name) for name in helps} == helps


def test_promtool_objects_only_to_names_of_the_existing_system(page):
    assert check_page(page) == []


def test_devices_are_shown_by_opentelemetrys_names_where_that_is_asked_for(page):
    assert {"hw_gpu_utilization_ratio", "hw_gpu_memory_limit_bytes"} <= set(
        re.findall(r"^# TYPE (\S+)", page, re.MULTILINE)
    )


def test_series_of_the_existing_agent_have_its_labels_or_are_listed_as_missing(page):
    surface = yaml.safe_load((ROOT / "tests/data/existing_surface.yaml").read_text())
    shown = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            name = sample.name if family.type != "histogram" else re.sub(SUFFIXES, "", sample.name)
            shown.setdefault(name, set()).update(sample.labels.keys() - {"le"})
    absent = {"gpu_memcpy_bytes_total", "gpu_memcpy_duration_ms"}  # until there is a copy
    had = {name: set(labels) for name, labels in surface["series"].items() if name not in absent}
    assert {name: shown.get(name) for name in had} == had
    assert not set(surface["missing_series"]) & set(shown)


def test_every_panel_of_the_agents_dashboard_about_a_trace_shows_something(traced, tmp_path):
    asked = [query for query in iter_queries("ingero-agent") if OF_A_TRACE.search(query)]
    assert len(asked) > 30
    with run_prometheus(tmp_path, {"ingero-trace": traced[0]}) as prometheus:
        wait_until(lambda: prometheus.query("rate(gpu_cuda_operation_count[5m]) > 0"), 60)
        empty = [query for query in asked if not prometheus.query(query)]
    assert [query for query in empty if not find_names(query) & OF_AN_EVENT] == []
