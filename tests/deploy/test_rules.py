"""The shipped rules: checked by promtool, and evaluated by a real Prometheus on series of our running programs."""

import re
import subprocess
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.promtool import check_page, promtool
from tests.deploy.series import OF_A_TRACE, declared_names, find_names, is_known
from tests.deploy.site import DEPLOY, ROOT, read_rules
from tests.e2e.prometheus import needs_prometheus
from tests.e2e.test_live_page import CULPRIT
from tests.support import local_http

from ingero.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, needs_prometheus, pytest.mark.xdist_group("deploy")]
FOLDER = DEPLOY / "prometheus"
RULES = sorted(FOLDER.glob("*.rules.yml"))
TESTS = sorted(FOLDER.glob("*.test.yml"))
ALERTS = {
    rule["alert"]: rule for rules in read_rules().values() for rule in rules if "alert" in rule
}
FIRST_EVENTS = {
    "ingero_echo_bad_bearers_total": {"outcome": {"refused", "slowed"}},
    "ingero_echo_commits_total": {"outcome": {"failed"}},
    "ingero_echo_ingest_requests_total": {
        "outcome": {
            *("refused_auth", "refused_acl", "refused_pace", "refused_quota", "refused_load"),
            *("refused_body", "failed"),
        }
    },
    "ingero_echo_rows_total": {"outcome": {"refused_rows", "refused_full", "refused_disk"}},
    "ingero_fleet_config_reloads_total": {"result": {"refused", "reverted"}},
}
"""Values of labels of which an alert takes some only: each of these is there from the start."""


def find_grown():
    """By name, the labels by which alerts choose among the series of our programs whose growth they take.

    Left out are those of a trace, which needs root (`test_trace_series`), and histograms: a quantile is of many events.
    """
    grown = {}
    for rule in ALERTS.values():
        for name, chosen in re.findall(r"\b(?:increase|rate)\((\w+)(\{.*?\})?\[", rule["expr"]):
            if not (OF_A_TRACE.match(name) or name.endswith("_bucket")):
                grown[name] = grown.get(name, "") + chosen
    return grown


def test_promtool_takes_rules_their_tests_and_the_configuration_by_the_commands_of_the_guide():
    guide = (ROOT / "docs/guides/monitoring.md").read_text()
    (block,) = re.findall(r"```bash\n(.*?)```", guide, re.DOTALL)
    assert re.findall(r"^promtool (\w+ \w+)", block, re.MULTILINE) == [
        "check rules", "test rules", "check config",
    ]  # fmt: skip
    done = subprocess.run(
        ["bash", "-eux", "-c", block], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") >= len(RULES) + len(TESTS)


def test_the_shipped_configuration_names_every_file_of_rules():
    named = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["rule_files"]
    assert sorted(named) == [file.name for file in RULES]


def test_each_alert_is_seen_to_fire_and_to_be_quiet():
    fires, quiet = set(), set()
    for file in TESTS:
        for one in yaml.safe_load(file.read_text())["tests"]:
            for case in one.get("alert_rule_test", ()):
                (fires if case["exp_alerts"] else quiet).add(case["alertname"])
    assert fires == set(ALERTS)
    assert quiet == set(ALERTS)


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_has_a_severity_and_a_page_that_says_what_to_do(name):
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    page = Path("docs/alerts") / f"{name}.md"
    assert rule["annotations"]["runbook"] == page.as_posix()
    text = (ROOT / page).read_text()
    assert text.startswith(f"# {name}\n")
    assert "## What it means" in text
    assert "## What to do" in text
    index = (ROOT / "docs/alerts/README.md").read_text()
    assert f"[{name}]({name}.md) | {rule['labels']['severity']} |" in index


def test_no_page_is_about_an_alert_that_is_gone():
    pages = {page.stem for page in (ROOT / "docs/alerts").glob("*.md")} - {"README"}
    assert pages == set(ALERTS)


@pytest.mark.parametrize(
    "job",
    [
        "ingero-fleet", "ingero-fleet-data", "ingero-echo", "ingero-agent", "ingero-sink",
        "ingero-alerter",
    ],
)  # fmt: skip
def test_promtool_objects_to_nothing_on_a_page_but_names_that_are_not_ours_to_change(site, job):
    page = site.pages[job].read()
    assert check_page(page) == []
    if job != "ingero-fleet-data":
        assert promtool("check", "metrics", input=page) == (0, "")


@pytest.mark.parametrize("name", sorted(find_grown()))
def test_series_whose_growth_an_alert_takes_is_there_before_its_first_event(site, name):
    """A series that begins at 1 has grown by nothing for Prometheus, so that the first event raises no alert."""
    found = [
        sample.labels
        for page in site.pages.values()
        for family in text_string_to_metric_families(page.read())
        for sample in family.samples
        if sample.name == name
    ]
    assert found
    for label, values in FIRST_EVENTS.get(name, {}).items():
        assert {labels[label] for labels in found} >= values


def test_series_that_an_alert_takes_by_a_label_have_their_values_named_here():
    chosen = {name for name, labels in find_grown().items() if labels}
    assert chosen <= FIRST_EVENTS.keys()


def parse_link(link):
    """What the live page takes from an address, as its script reads it."""
    place, _, fragment = link.partition("#")
    assert place == "http://127.0.0.1:8081/"
    return dict(parse_qsl(fragment, strict_parsing=True))


def test_prometheus_evaluates_every_rule_and_finds_the_culprit_of_a_running_site(site, prometheus):
    def ask(path, **params):
        return local_http.get(f"{prometheus.url}/api/v1/{path}", params=params, timeout=30).json()[
            "data"
        ]

    def find_culprit():
        site.push()
        active = {
            (one["labels"]["alertname"], one["labels"].get("node_id"))
            for one in ask("alerts")["alerts"]
        }
        return active >= {("IngeroCulpritRank", "node5"), ("IngeroStragglerNode", "node5")}

    wait_until(find_culprit, 60)
    links = {
        one["labels"]["alertname"]: parse_link(one["annotations"]["live_page"])
        for one in ask("alerts")["alerts"]
        if one["labels"].get("node_id") == "node5"
    }
    assert links["IngeroCulpritRank"] == {"cluster": "job", "measure": "slowdown", "row": CULPRIT}
    assert links["IngeroStragglerNode"] == {"cluster": "job", "measure": "score", "row": "node5"}
    wait_until(lambda: prometheus.query("ingero:event_cost_rate_1m > 0"), 60)
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"]: rule["lastError"] for rule in rules if rule.get("lastError")} == {}
    assert {rule["health"] for rule in rules} == {"ok"}
    names = set(ask("label/__name__/values")) | declared_names()
    asked = {name for rule in rules for name in find_names(rule["query"])}
    unknown = {name for name in asked if not is_known(name, names)}
    assert {name for name in unknown if not OF_A_TRACE.match(name)} == set()
    firing = {rule["name"] for rule in rules if rule["type"] == "alerting" and rule["alerts"]}
    assert firing & {"IngeroFleetDown", "IngeroEchoDown", "IngeroFleetLosesData"} == set()


def test_names_of_series_are_told_from_labels_functions_and_strings():
    asked = 'max by (cluster_id) (a_total{x="b_total"}) - on (c) group_left (d) rate(e_bucket[5m]) > 0.1'
    assert find_names(asked) == {"a_total", "e_bucket"}
