"""The shipped dashboards: of Grafana's own schema, and every query answered by a Prometheus that scraped our programs."""

import json
import re
from itertools import combinations

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from tests.deploy.promtool import promtool
from tests.deploy.series import (
    OF_A_TRACE,
    declared_names,
    find_names,
    is_known,
    iter_queries,
    read_dashboard,
)
from tests.e2e.prometheus import needs_prometheus

NAMES = ("ingero-agent", "ingero-echo", "ingero-fleet")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("deploy")]
every_dashboard = pytest.mark.parametrize("name", NAMES)


@every_dashboard
def test_a_dashboard_has_no_key_that_grafanas_own_schema_does_not_know(name):
    shipped = read_dashboard(name)
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(shipped)))
    assert list(find_lost(shipped, kept)) == []


def find_lost(shipped, kept, path=""):
    """Places whose value did not come back."""
    if isinstance(shipped, dict):
        for key, value in shipped.items():
            yield from find_lost(value, kept.get(key) if kept else None, f"{path}/{key}")
    elif isinstance(shipped, list) and len(shipped) == len(kept or ()):
        for index, (one, other) in enumerate(zip(shipped, kept, strict=True)):
            yield from find_lost(one, other, f"{path}[{index}]")
    elif shipped != kept and (shipped or kept):
        yield path


@every_dashboard
def test_panels_have_ids_and_places_of_their_own_and_a_data_source_that_can_be_chosen(name):
    dashboard = read_dashboard(name)
    assert dashboard["uid"] == name
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    sources = {
        target["datasource"]["uid"] for panel in panels for target in panel.get("targets", ())
    }
    assert sources == {"${datasource}"}


def overlap(one, other):
    return all(
        one[start] < other[start] + other[size] and other[start] < one[start] + one[size]
        for start, size in (("x", "w"), ("y", "h"))
    )


@needs_prometheus
@every_dashboard
def test_every_query_is_answered_and_asks_for_series_that_there_are(name, site, prometheus):
    names = {
        name for name in prometheus.names() if not name.startswith("ALERTS")
    } | declared_names()
    empty = []
    for query in iter_queries(name):
        found = prometheus.query(query)
        asked = {one for one in find_names(query) if not OF_A_TRACE.match(one)}
        assert {one for one in asked if not is_known(one, names)} == set(), query
        if asked and not found:
            empty.append(query)
    assert [query for query in empty if "bad_bearers" not in query] == []


@needs_prometheus
@every_dashboard
def test_a_variable_lists_values_of_a_series_that_there_is(name, site, prometheus):
    for variable in read_dashboard(name)["templating"]["list"]:
        if variable["type"] == "query":
            form = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            found = prometheus.query(f"count by ({form[2]}) ({form[1]})")
            assert found, variable["name"]
            assert all(f'"{form[2]}"' in labels for labels in found)


WAITING = [
    {
        "series": f'ingero_fleet_waiting_{name}_total{{{labels}, currency="USD"}}',
        "values": f"0+{step}x20",
    }
    for labels, n_charged, n_back in (
        ('cluster_id="c", node_id="n5", attributed="charged"', 5, 1),
        ('cluster_id="c", node_id="", attributed="unattributed"', 0, 3),
    )
    for name, step in (
        ("gpu_seconds", 60 * n_charged),
        ("gpu_seconds_taken_back", 60 * n_back),
        ("cost", n_charged),
        ("cost_taken_back", n_back),
    )
]


@needs_prometheus
@pytest.mark.parametrize(
    ("title", "expected"),
    [
        ("GPUs that wait", {"{}": 1}),
        ("GPUs that wait, charged or not", {
            '{attributed="charged"}': 4, '{attributed="unattributed"}': 0,
        }),
        ("Money a minute, by culprit", {
            '{node_id="n5", currency="USD"}': 4, '{currency="USD"}': 0,
        }),
    ],
)  # fmt: skip
def test_what_waiting_costs_is_shown_less_what_is_taken_back(tmp_path, title, expected):
    check_query(tmp_path, title, WAITING, expected)


VERDICTS = [
    {
        "series": f'ingero_fleet_verdict{{cluster_id="c", node_id="n{rank}", rank="{rank}", verdict="{kind}"}}',
        "values": f"{value}x20",
    }
    for rank, kind, value in (
        (1, "culprit", 1),
        (2, "culprit", 0),
        (3, "victim", 1),
        (4, "drag", 0),
    )
]
"""Fleet sends 0 once for a verdict that ended, and its exporter shows that for five minutes."""


@needs_prometheus
@pytest.mark.parametrize(
    ("title", "series", "expected"),
    [
        ("Culprits", VERDICTS, {"{}": 1}),
        ("Culprits", VERDICTS[1:], {"{}": 0}),
        ("Verdicts", VERDICTS, {
            '{cluster_id="c", node_id="n1", rank="1", verdict="culprit"}': 1,
            '{cluster_id="c", node_id="n3", rank="3", verdict="victim"}': 1,
        }),
    ],
)  # fmt: skip
def test_a_verdict_that_ended_is_not_shown(tmp_path, title, series, expected):
    check_query(tmp_path, title, series, expected)


def check_query(folder, title, series, expected):
    """Whether Fleet's panel of this title shows this after ten minutes: labels and values."""
    (expression,) = [
        target["expr"].replace("$cluster", ".*")
        for panel in read_dashboard("ingero-fleet")["panels"]
        for target in panel.get("targets", ())
        if panel["title"] == title
    ]
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    asked = {"eval_time": "10m", "expr": f"round({expression}, 0.001)", "exp_samples": samples}
    tests = [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]
    file = folder / "dashboard.test.yml"
    file.write_text(json.dumps({"tests": tests}))
    status, said = promtool("test", "rules", str(file))
    assert status == 0, said
