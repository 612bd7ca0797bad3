"""Fleet's series as a real Prometheus sees them, with the README's configuration."""

import json
from pathlib import Path

import pytest
import yaml
from tests.e2e.agents import event, fleet_and_agents, health
from tests.e2e.prometheus import needs_prometheus, run_prometheus

from ingero.testing.fleet import build_fleet_config
from ingero.testing.waiting import wait_until

pytestmark = pytest.mark.slow
README = Path(__file__).parents[1] / "data" / "config" / "seed-readme.yaml"
PORTS = {
    "own": "service.telemetry.metrics",
    "pipeline": "exporters.prometheus",
}


def readme_config(**ingero):
    """The README's configuration on ports that the kernel chooses."""
    config = yaml.safe_load(README.read_text())
    doors = build_fleet_config()
    config["receivers"] = doors["receivers"]
    config["extensions"] = doors["extensions"]
    config["exporters"] = {"prometheus": doors["exporters"]["prometheus"]}
    config["service"]["telemetry"] = doors["service"]["telemetry"]
    config["processors"]["ingero"] |= ingero
    return config


def targets(agents):
    return {name: agents.fleet.addresses[where] for name, where in PORTS.items()}


def push_round(agents, cluster, scores):
    for index, score in enumerate(scores):
        cohort = ("a" if index % 2 else "b") * 16
        agents.push(health(f"n{index}", score, cluster=cluster, cohort=cohort), cluster)


@needs_prometheus
@pytest.mark.parametrize("honor_labels", [False, True])
def test_sums_over_clusters_count_each_node_once_on_either_port(tmp_path, honor_labels):
    with (
        fleet_and_agents(
            readme_config(push_interval="1s", quorum={"statistical_min": 3})
        ) as agents,
        run_prometheus(tmp_path, targets(agents), honor_labels=honor_labels) as prometheus,
    ):

        def seen():
            push_round(agents, "c", [0.9] * 6)
            return prometheus.query("sum by (job) (ingero_fleet_active_nodes)")

        job = "ingero-fleet" if honor_labels else "pipeline"
        expected = {json.dumps({"job": name}): 6.0 for name in ("own", job)}
        assert wait_until(lambda: seen() == expected, 60)
        per_cohort = "sum by (job) (ingero_fleet_cohort_active_nodes)"
        assert wait_until(lambda: prometheus.query(per_cohort) == expected, 30)
        join = (
            "ingero_node_health_score_ratio"
            " - on (ingero_cluster_id) group_left () ingero_fleet_threshold"
        )
        assert wait_until(lambda: len(prometheus.query(join)) == 6, 30)


def test_right_after_six_pushes_the_sum_is_six_on_both_ports():
    with fleet_and_agents(readme_config()) as agents:
        push_round(agents, "c", [0.9] * 6)

        def total(where):
            lines = agents.metrics(where).splitlines()
            return sum(
                float(line.rsplit(" ", 1)[1])
                for line in lines
                if line.startswith("ingero_fleet_active_nodes{")
            )

        assert total("service.telemetry.metrics") == 6
        assert agents.own("ingero_fleet_known_nodes") == 6
        assert wait_until(lambda: total("exporters.prometheus") == 6, 30)


def test_the_series_that_names_a_straggler_goes_from_both_ports_with_its_episode():
    with fleet_and_agents(readme_config()) as agents:
        push_round(agents, "c", [0.9] * 6)
        push_round(agents, "c", [0.4] + [0.9] * 5)
        agents.push(event("n0", 1, cluster="c"), "c")
        push_round(agents, "c", [0.4] + [0.9] * 5)
        series = "ingero_fleet_straggler{"
        for where in PORTS.values():
            text = wait_until(lambda at=where: _line(agents.metrics(at), series), 30)
            assert 'node_id="n0"' in text
            assert float(text.rsplit(" ", 1)[1]) == 1
        agents.push(event("n0", 0, cluster="c"), "c")
        for where in PORTS.values():
            assert wait_until(lambda at=where: not _line(agents.metrics(at), series), 30)


def _line(text, start):
    return next((line for line in text.splitlines() if line.startswith(start)), "")


def test_a_state_and_a_mode_that_a_node_left_are_gone_with_its_next_push():
    with fleet_and_agents(readme_config()) as agents:
        agents.push(health("n1", 0.5, cluster="c", state="calibrating"), "c")
        assert 'ingero_node_state="calibrating"' in agents.metrics()
        agents.push(_in_mode("n1", "none"), "c")
        body = _in_mode("n1", "fleet")
        agents.push(body, "c")
        text = agents.metrics()
        scores = [x for x in text.splitlines() if x.startswith("ingero_node_health_score_ratio{")]
        assert len(scores) == 1
        assert 'ingero_node_state="active"' in scores[0]
        modes = [x for x in text.splitlines() if x.startswith("ingero_agent_detection_mode_ratio{")]
        assert len(modes) == 1
        assert 'ingero_detection_mode="fleet"' in modes[0]


def _in_mode(node, mode):
    body = health(node, 0.9, cluster="c")
    for metric in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]:
        if metric["name"] == "ingero.agent.detection_mode":
            metric["gauge"]["dataPoints"][0]["attributes"][0]["value"]["stringValue"] = mode
    return body
