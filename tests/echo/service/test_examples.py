"""The shipped examples run against a real Echo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import yaml
from tests.echo.service.conftest import ALL

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "echo"


def run(site, *command):
    environ = {**os.environ, "ECHO_URL": site.url, "ECHO_TOKEN": ALL}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout


def test_the_python_example_names_the_slow_nodes_and_whom_they_block(site):
    printed = run(site, sys.executable, str(EXAMPLES / "ask.py"))
    assert "c1 c1-n3: critical, score 0.3" in printed
    assert "c2-n1 made c2-n0 wait" in printed


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
