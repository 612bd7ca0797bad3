"""The shipped examples run against a real Echo."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml
from msgspec.structs import fields
from tests.echo.service.conftest import ALL
from tests.support import local_http

from ingero.echo.queries.catalog import QUERIES
from ingero.serving.query import get_query

KINDS = {"string": "str", "number": "float", "timestamp": "datetime"}
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "echo"


def run(site, *command):
    environ = {**os.environ, "ECHO_URL": site.url, "ECHO_TOKEN": ALL}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_the_python_example_names_the_slow_nodes_and_whom_they_block(site):
    printed = run(site, sys.executable, str(EXAMPLES / "ask.py"))
    assert "c1 c1-n3: critical, score 0.3" in printed
    assert "c2-n1 made c2-n0 wait" in printed


@pytest.mark.skipif(shutil.which("curl") is None, reason="the example calls curl: not installed")
def test_the_shell_example_walks_the_documented_paths(site):
    lines = run(site, "bash", str(EXAMPLES / "ask.sh")).splitlines()
    assert json.loads(lines[0])["preferred"] == "v2"
    assert json.loads(lines[1])["cluster_ids"] == ["*"]
    assert {row["node_id"] for row in json.loads(lines[2])["result"]["rows"]} == {"c1-n3", "c2-n3"}
    assert json.loads(lines[3])["columns"] == ["metric_name", "n"]
    assert json.loads(lines[4])["kind"] == "straggler"


def test_the_configurations_are_what_they_say(site):
    http = json.loads((EXAMPLES / "mcp.json").read_text())["mcpServers"]["ingero-echo"]
    assert http["url"].endswith("/mcp")
    stdio = json.loads((EXAMPLES / "mcp-stdio.json").read_text())["mcpServers"]["ingero-echo"]
    assert stdio["args"][0] == "mcp"
    sources = yaml.safe_load((EXAMPLES / "grafana-datasources.yaml").read_text())["datasources"]
    assert [source["name"] for source in sources] == ["Echo", "Prometheus"]


def targets():
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], panel["datasource"], target


INFINITY = [(title, one) for title, source, one in targets() if source["uid"] == "ingero-echo"]
PROMETHEUS = [one["expr"] for _, source, one in targets() if source["uid"] == "ingero-prometheus"]


@pytest.mark.parametrize(("title", "target"), INFINITY, ids=[title for title, _ in INFINITY])
def test_a_panel_asks_what_is_served_and_shows_columns_that_there_are(site, title, target):
    options = target["url_options"]
    answer = local_http.request(
        options["method"],
        f"{site.url}{target['url']}",
        content=options["data"],
        headers={
            "authorization": f"Bearer {ALL}",
            "content-type": options["body_content_type"],
        },
        timeout=120,
    )
    assert answer.status_code == 200, answer.text
    rows = answer.json()
    for name in target["root_selector"].split("."):
        rows = rows[name]
    shown = {column["selector"]: column["type"] for column in target["columns"]}
    query = get_query(QUERIES, target["url"].rpartition("/")[2])
    (row,) = (one for one in fields(query.result) if one.name == "rows")
    known = {one.encode_name: one.type for one in fields(get_args(row.type)[0])}
    assert set(shown) <= set(known)
    for name, kind in shown.items():
        assert KINDS[kind] in str(known[name]), (title, name)
    if title != "Cost by culprit":  # nobody billed anything here
        assert set(shown) <= set(rows[0])


def test_the_panels_of_prometheus_name_series_that_are_scraped(site):
    scraped = local_http.get(f"{site.url}/metrics", headers={"authorization": f"Bearer {ALL}"}).text
    for expression in PROMETHEUS:
        names = re.findall(r"ingero_\w+", expression)
        assert names
        for name in names:
            assert re.search(rf"^{name}[ {{]", scraped, re.MULTILINE), name
    assert 'ingero_echo_rows_total{outcome="written"}' in scraped


def test_the_dashboards_data_sources_are_those_that_are_provisioned():
    sources = yaml.safe_load((EXAMPLES / "grafana-datasources.yaml").read_text())["datasources"]
    provisioned = {(source["type"], source["uid"]) for source in sources}
    assert {(source["type"], source["uid"]) for _, source, _ in targets()} == provisioned
