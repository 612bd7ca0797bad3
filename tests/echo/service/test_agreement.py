"""All tools asked about the same hour do not contradict each other."""

import time

import pytest
from tests.echo.service.conftest import (
    ALL,
    gauge,
    metrics,
    push,
    resource,
    result,
)
from tests.support import local_http

from ingero.otlp.codec import build_attributes, structs

C, EXTRA = (
    "fleet.cluster.",
    {
        "fleet.cluster.node_detail": {"node_id": "c1-n3"},
        "fleet.cluster.run_analysis": {"sql": "SELECT count(*) FROM events"},
    },
)


def fleets_own(cluster, now_ns):
    """What Fleet tells of a cluster, under the name of the host that it runs on."""
    who = structs.Resource(build_attributes({"host.name": "fleet-host"}))
    points = [
        gauge("ingero_fleet_threshold", 0.9, now_ns, cluster_id=cluster),
        gauge("ingero_fleet_median", 0.95, now_ns, cluster_id=cluster),
    ]
    return metrics([(who, points)])


def quiet_straggler(cluster, now_ns):
    """Scores alone: one node far below its peers whose agent never said so."""
    entries = []
    for node in range(6):
        score = 0.311 if node == 3 else 0.95 - node * 0.001
        point = gauge("ingero.node.health_score", score, now_ns, **{"ingero.node.state": "active"})
        entries.append((resource(cluster, f"{cluster}-n{node}"), [point]))
    return metrics(entries)


@pytest.fixture(scope="module")
def answers(site):
    now_ns = time.time_ns()
    assert push(site, quiet_straggler("c3", now_ns)).status_code == 200
    for cluster in ("c1", "c3"):
        assert push(site, fleets_own(cluster, now_ns)).status_code == 200
    names = local_http.get(
        f"{site.url}/api/v2/tools/list", headers={"authorization": f"Bearer {ALL}"}
    ).json()["tools"]
    assert len(names) == 20
    return {tool["name"]: result(site, tool["name"], EXTRA.get(tool["name"])) for tool in names}


def by_cluster(rows, name="cluster_id"):
    found = {}
    for row in rows:
        found.setdefault(row[name], []).append(row)
    return found


def test_summary_counts_the_stragglers_that_find_stragglers_lists(answers):
    listed = by_cluster(answers[C + "find_stragglers"]["rows"])
    for row in answers[C + "summary"]["rows"]:
        assert row["n_straggler_nodes"] == len(listed.get(row["cluster_id"], [])), row["cluster_id"]
    assert {name: len(rows) for name, rows in listed.items()} == {"c1": 1, "c2": 1, "c3": 1}
    (quiet,) = listed["c3"]
    assert (quiet["node_id"], quiet["severity"], quiet["n_events"]) == ("c3-n3", "critical", 0)


def test_fleet_is_not_a_node_to_anybody(answers):
    summary = {row["cluster_id"]: row for row in answers[C + "summary"]["rows"]}
    assert {name: row["n_nodes"] for name, row in summary.items()} == {"c1": 6, "c2": 6, "c3": 6}
    assert summary["c1"]["threshold"] == summary["c3"]["threshold"] == 0.9
    assert answers[C + "summary"]["coverage"]["n_nodes"] == 18
    for name, answer in answers.items():
        assert "fleet-host" not in str(answer), name


def test_the_lowest_node_of_the_summary_is_the_worst_straggler_and_an_outlier(answers):
    stragglers = by_cluster(answers[C + "find_stragglers"]["rows"])
    outliers = by_cluster(answers[C + "find_outlier_nodes"]["rows"])
    for row in answers[C + "summary"]["rows"]:
        worst = stragglers[row["cluster_id"]][0]
        assert (worst["node_id"], worst["score"]) == (row["lowest_node"], row["lowest_score"])
        assert worst["node_id"] in {one["node_id"] for one in outliers[row["cluster_id"]]}
        assert worst["bar"] > worst["score"]


def test_who_is_asked_about_alone_is_told_the_same(site, answers):
    worst = next(r for r in answers[C + "find_stragglers"]["rows"] if r["cluster_id"] == "c1")
    detail = answers[C + "node_detail"]
    assert worst["node_id"] == "c1-n3"
    assert str(worst["score"]) in str(detail)
    alone = result(site, C + "summary", {"cluster_id": "c3"})["rows"]
    assert alone == [r for r in answers[C + "summary"]["rows"] if r["cluster_id"] == "c3"]


def test_the_tools_on_collectives_name_the_same_late_rank(answers):
    skew = {
        name: max(rows, key=lambda row: row.get("late_seconds", 0))
        for name, rows in by_cluster(answers[C + "collective_skew"]["rows"]).items()
    }
    chain = by_cluster(answers[C + "blame_chain"]["rows"])
    assert set(skew) == {"c1", "c2"} >= set(chain)
    coverages = {
        name: answers[C + name]["coverage"]["n_rows"]
        for name in ("collective_skew", "nccl_bandwidth_summary")
    }
    assert len(set(coverages.values())) == 1, coverages
