"""Every question over both transports, and what each answers on a known cluster."""

import asyncio
import datetime as dt
import math
import time

import httpx2
import jsonschema
import mcp
import pyarrow as pa
import pytest
from mcp.client.streamable_http import streamable_http_client
from tests.echo.service.conftest import ALL, ONE, TWO, ask, health, push, result, sql

from ingero.echo.queries.catalog import QUERIES
from ingero.errors import StoreError
from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.costs import CostDelta, CostParties, build_costs
from ingero.fleet.processors.collectives.rates import Rates, RatesConfig
from ingero.fleet.processors.peer_threshold.episode_events import build_episodes
from ingero.fleet.processors.peer_threshold.episodes import Episode, StragglerEvent
from ingero.otlp.names import Signal
from ingero.wire.remediation import RemediationEntry, build_remediation_records

NEEDED = {
    "fleet.cluster.node_detail": {"node_id": "c1-n3"},
    "fleet.cluster.run_analysis": {"sql": "SELECT count(*) AS n FROM events"},
}
FIXED = {"until": "2100-01-01T00:00:00Z", "time_window": "30000d"}


def test_the_straggler_is_named_with_its_peers_numbers(site):
    found = result(site, "fleet.cluster.find_stragglers", {"cluster_id": "c1", "time_window": "1h"})
    (row,) = found["rows"]
    assert (row["node_id"], row["severity"], row["score"]) == ("c1-n3", "critical", 0.3)
    scores = sorted([0.95, 0.949, 0.948, 0.30, 0.946, 0.945])
    median = (scores[2] + scores[3]) / 2
    mad = sorted(abs(s - median) for s in scores)
    expected_mad = (mad[2] + mad[3]) / 2
    margin = max(2 * 1.4826 * expected_mad, 0.05)
    assert math.isclose(row["peer_median"], median)
    assert math.isclose(row["bar"], median - margin)
    assert math.isclose(row["margins_below"], (median - 0.3) / margin)
    assert (row["n_events"], row["dominant_signal"]) == (3, "throughput")
    assert found["coverage"]["n_nodes"] == 6
    assert found["n_cut"] == 0


def test_a_healthy_cluster_has_no_straggler(open_echo):
    import time

    from tests.echo.service.conftest import health, push

    echo = open_echo()
    push(echo, health("quiet", time.time_ns(), slow="nobody"))
    found = result(echo, "fleet.cluster.find_stragglers")
    assert found["rows"] == []
    assert found["coverage"]["n_nodes"] == 6


def test_the_summary_counts_what_is_there(site):
    rows = result(site, "fleet.cluster.summary")["rows"]
    assert [row["cluster_id"] for row in rows] == ["c1", "c2"]
    first = rows[0]
    assert (first["n_nodes"], first["n_active"], first["n_straggler_nodes"]) == (6, 6, 1)
    assert (first["lowest_node"], first["lowest_score"]) == ("c1-n3", 0.3)


def test_outliers_are_far_on_either_side(site):
    args = {"cluster_id": "c2", "min_deviations": 5}
    (row,) = result(site, "fleet.cluster.find_outlier_nodes", args)["rows"]
    assert row["node_id"] == "c2-n3"
    assert row["deviations"] < -5


def test_anomalies_are_phases_and_not_ticks(site):
    rows = result(
        site, "fleet.cluster.anomaly_list", {"cluster_id": "c1", "severity_filter": "error"}
    )["rows"]
    assert [(row["kind"], row["node_id"], row["severity"]) for row in rows] == [
        ("straggler", "c1-n3", "error")
    ]
    assert result(site, "fleet.cluster.anomaly_list", {"severity_filter": "critical"})["rows"] == []


def test_skew_names_the_rank_whose_own_time_is_long_and_not_its_victims(site):
    rows = result(site, "fleet.cluster.collective_skew", {"cluster_id": "c1"})["rows"]
    first = rows[0]
    assert (first["node_id"], first["rank"], first["last_share"]) == ("c1-n3", 3, 1.0)
    assert math.isclose(first["own_over_peers"], 6.0)
    assert math.isclose(first["arrival_lag_p50_ms"], 50.0)
    assert first["waited_s"] == 0
    assert all(math.isclose(row["waited_s"], 40 * 0.05) for row in rows[1:])


def test_the_blame_goes_from_the_late_rank_to_each_that_waited(site):
    rows = result(site, "fleet.cluster.blame_chain", {"cluster_id": "c2"})["rows"]
    assert {row["culprit_node"] for row in rows} == {"c2-n1"}
    assert sorted(row["victim"] for row in rows) == ["c2-n0", "c2-n2", "c2-n3"]
    assert all(math.isclose(row["waited_gpu_s"], 2.0) for row in rows)
    assert math.isclose(rows[0]["culprit_lost_gpu_s"], 6.0)
    assert {row["source"] for row in rows} == {"collectives"}


def test_bandwidth_is_transfer_without_waiting(site):
    (row,) = result(site, "fleet.cluster.nccl_bandwidth_summary", {"cluster_id": "c1"})["rows"]
    assert (row["op"], row["n_ops"], row["n_ranks"], row["clock"]) == (
        "all_reduce",
        40,
        4,
        "device",
    )
    assert math.isclose(row["transfer_p50_ms"], 2.0)
    assert math.isclose(row["algbw_p50_gbps"], 8 * 1e8 / 2e6)
    assert math.isclose(row["wait_share"], 3 * 50 / (3 * 52 + 2))


def test_a_hang_names_who_never_arrived(open_echo):
    import time

    from tests.echo.service.conftest import collectives, push

    from ingero.otlp.names import Signal

    echo = open_echo()
    push(echo, collectives("c1", time.time_ns() - 300 * 10**9, stuck=2), signal=Signal.LOGS)
    (row,) = result(echo, "fleet.cluster.hangs")["rows"]
    assert (row["seq"], row["n_waiting"], row["n_ranks"], row["never_seen"]) == (39, 3, 4, 0)
    assert row["behind"] == ["c1-n2/2 at 34"]
    assert 299 < row["silent_s"] < 400


def test_nobody_hangs_while_reports_come(site):
    assert result(site, "fleet.cluster.hangs")["rows"] == []


def test_the_timeline_steps_through_the_fall(site):
    args = {"node_id": "c1-n3", "time_window": "10m", "n_buckets": 60}
    rows = result(site, "fleet.cluster.timeline", args)["rows"]
    assert sum(row["n_points"] for row in rows) == 6
    assert [row["mean"] for row in rows] == sorted((row["mean"] for row in rows), reverse=True)
    assert rows[-1]["min"] == 0.3


def test_a_node_is_told_in_full(site):
    found = result(site, "fleet.cluster.node_detail", {"node_id": "c1-n3"})
    (facts,) = found["facts"]
    assert (facts["gpu_model"], facts["gpu_count"], facts["provider"], facts["state"]) == (
        "H100",
        8,
        "aws",
        "active",
    )
    assert {row["metric_name"]: row["n_points"] for row in found["rows"]} == {
        "ingero.node.health_score": 6,
        "ingero.node.info": 1,
        "ingero.node.straggler_event": 3,
    }


@pytest.mark.parametrize(
    ("tool", "n_rows"), [("node_detail", 10), ("timeline", 6), ("anomaly_list", 10)]
)
def test_what_is_asked_about_one_node_counts_the_rows_of_that_node(site, tool, n_rows):
    found = result(site, f"fleet.cluster.{tool}", {"node_id": "c1-n3"})
    assert (found["coverage"]["n_rows"], found["coverage"]["n_nodes"]) == (n_rows, 1)
    nobody = result(site, f"fleet.cluster.{tool}", {"node_id": "nobody"})
    assert (nobody["rows"], nobody["coverage"]["n_rows"]) == ([], 0)


def test_limits_cut_and_say_so(site):
    found = result(site, "fleet.cluster.summary", {"limit": 1})
    assert (len(found["rows"]), found["n_cut"]) == (1, 1)


def test_an_empty_window_is_unknown_and_latest_finds_the_data(site):
    old = result(site, "fleet.cluster.find_stragglers", {"until": "2020-01-01T00:00:00Z"})
    assert old["coverage"] == {
        "source": "events",
        "n_rows": 0,
        "n_nodes": 0,
        "first": None,
        "last": None,
    }
    latest = result(
        site,
        "fleet.cluster.find_stragglers",
        {"until": "latest", "time_window": "20s", "cluster_id": "c1"},
    )
    assert [row["node_id"] for row in latest["rows"]] == ["c1-n3"]
    end = dt.datetime.fromisoformat(latest["window"]["end"])
    start = dt.datetime.fromisoformat(latest["window"]["start"])
    assert end - start == dt.timedelta(seconds=20)


@pytest.mark.parametrize(
    ("tool", "args", "description"),
    [
        ("fleet.cluster.summary", {"limit": 0}, "limit"),
        ("fleet.cluster.summary", {"time_window": "yesterday"}, "time_window"),
        ("fleet.cluster.summary", {"cluster_id": "a b"}, "cluster_id"),
        ("fleet.cluster.summary", {"cluster_id": "c1' OR 1=1 --"}, "cluster_id"),
        ("fleet.cluster.summary", {"clusters": ["c1"]}, "clusters"),
        ("fleet.cluster.summary", {"until": "2026-13-45T00:00:00Z"}, "until"),
        ("fleet.cluster.node_detail", {}, "node_id"),
        ("fleet.cluster.timeline", {"metric_name": ""}, "metric_name"),
        ("fleet.cluster.timeline", {"metric_name": "m" * 257}, "metric_name"),
        ("fleet.cluster.run_analysis", {"sql": ""}, "sql"),
    ],
)
def test_wrong_arguments_are_named_and_refused(site, tool, args, description):
    answer = ask(site, tool, args)
    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_arguments"
    assert description in answer.json()["error"]


def test_a_metrics_name_is_never_read_as_a_statement(site):
    answer = ask(site, "fleet.cluster.timeline", {"metric_name": "m'; DROP TABLE events; --"})
    assert answer.status_code == 200
    assert answer.json()["result"]["rows"] == []
    assert ask(site, "fleet.cluster.summary", {}).json()["result"]["coverage"]["n_rows"] > 0


def test_rows_come_as_lines_or_as_arrow_when_asked(site):
    lines = ask(site, "fleet.cluster.summary", accept="application/x-ndjson")
    assert [line[:17] for line in lines.text.splitlines()] == [
        '{"cluster_id":"c1',
        '{"cluster_id":"c2',
    ]
    arrow = ask(site, "fleet.cluster.summary", accept="application/vnd.apache.arrow.stream")
    table = pa.ipc.open_stream(arrow.content).read_all()
    assert table.column("cluster_id").to_pylist() == ["c1", "c2"]
    assert table.column("lowest_score").to_pylist() == [0.3, 0.3]


def test_sql_answers_in_columns_and_rows(site):
    answer = sql(
        site, "SELECT cluster_id, count(*) AS n FROM events GROUP BY ALL ORDER BY 1"
    ).json()
    assert answer["columns"] == ["cluster_id", "n"]
    assert answer["rows"] == [["c1", 45], ["c2", 45]]


async def over_mcp(site, token, work, mode="auto"):
    async with httpx2.AsyncClient(headers={"authorization": f"Bearer {token}"}) as http:
        transport = streamable_http_client(f"{site.url}/mcp", http_client=http)
        async with mcp.Client(transport, mode=mode) as client:
            return await work(client)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_the_official_client_lists_and_calls_every_tool_with_the_answer_of_http(site, mode):
    async def work(client):
        listed = (await client.list_tools()).tools
        assert [tool.name for tool in listed] == [query.name for query in QUERIES]
        answers = {}
        for tool in listed:
            assert tool.input_schema["type"] == tool.output_schema["type"] == "object"
            answered = await client.call_tool(tool.name, {**FIXED, **NEEDED.get(tool.name, {})})
            assert not answered.is_error, answered.content
            jsonschema.validate(answered.structured_content, tool.output_schema)
            answers[tool.name] = answered.structured_content
        return answers

    answers = asyncio.run(over_mcp(site, ALL, work, mode))
    for name, answer in answers.items():
        over_http = result(site, name, {**FIXED, **NEEDED.get(name, {})})
        assert answer == over_http, name


def test_the_prompt_walks_from_where_to_why(site):
    async def work(client):
        (prompt,) = (await client.list_prompts()).prompts
        rendered = await client.get_prompt(prompt.name, {"cluster_id": "c1", "time_window": "2h"})
        return prompt.name, rendered.messages[0].content.text

    name, text = asyncio.run(over_mcp(site, ALL, work))
    assert name == "investigate"
    steps = ["summary", "find_stragglers", "blame_chain", "cost_by_culprit", "ingero mcp"]
    assert [text.find(step) for step in steps] == sorted(text.find(step) for step in steps)
    assert 'cluster_id="c1", time_window="2h"' in text


def test_mcp_says_what_is_wrong_with_a_call_inside_the_result(site):
    async def work(client):
        bad = await client.call_tool("fleet.cluster.summary", {"limit": 9999})
        foreign = await client.call_tool("fleet.cluster.summary", {"cluster_id": "c2"})
        return bad, foreign

    bad, foreign = asyncio.run(over_mcp(site, ONE, work))
    assert bad.is_error
    assert "limit" in bad.content[0].text
    assert foreign.is_error
    assert "may not read" in foreign.content[0].text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_what_the_database_says_reaches_the_log_and_not_a_client_of_mcp(
    open_echo, monkeypatch, caplog, mode
):
    echo = open_echo()

    async def fail(*_):
        raise StoreError("cannot read: IO Error: /srv/echo.db: bad block", hint="Restore /srv.")

    monkeypatch.setattr(echo.service.executor, "ask", fail)

    async def work(client):
        return await client.call_tool("fleet.cluster.summary", {})

    answer = asyncio.run(over_mcp(echo, ALL, work, mode))
    assert answer.is_error
    assert answer.content[0].text == "the store cannot answer now"
    assert "bad block" in caplog.text


def test_the_root_path_is_mcp_too(site):
    async def work():
        async with (
            httpx2.AsyncClient(headers={"authorization": f"Bearer {ALL}"}) as http,
            mcp.Client(streamable_http_client(f"{site.url}/", http_client=http)) as client,
        ):
            return len((await client.list_tools()).tools)

    assert asyncio.run(work()) == len(QUERIES)


@pytest.fixture
def billed(open_echo):
    """Two reports of what node n3 cost, one with money, and what nobody is charged with."""
    echo = open_echo()
    paid, unknown = Hardware("aws", "NVIDIA L4"), Hardware("", "")
    rates = Rates(RatesConfig(providers={"aws": {"NVIDIA L4": 36.0}}))
    reports = [
        [CostDelta(CostParties("c1-n3", 3, "c1-n1", paid), 30 * 10**9)],
        [
            CostDelta(CostParties("c1-n3", 3, "c1-n1", paid), 20 * 10**9),
            CostDelta(CostParties("c1-n3", 3, "", unknown), 7 * 10**9),
            CostDelta(CostParties("c1-n0", 0, "c1-n1", paid), 4 * 10**9),
            CostDelta(CostParties("", -1, "", paid), 5 * 10**9),
        ],
        [CostDelta(CostParties("c1-n0", 0, "c1-n1", paid), -4 * 10**9)],
    ]
    now_ns = time.time_ns()
    for at, charges in enumerate(reports):
        export = build_costs("c1", charges, rates, now_ns - (3 - at) * 10**9)
        assert push(echo, export, signal=Signal.LOGS).status_code == 200
    return echo


def test_cost_is_a_sum_of_reports_in_gpu_seconds_and_in_money_where_a_price_is_known(billed):
    rows = result(billed, "fleet.cluster.cost", {"cluster_id": "c1"})["rows"]
    paid, unknown = rows
    assert (paid["provider"], paid["gpu_model"], paid["currency"]) == ("aws", "NVIDIA L4", "USD")
    assert (paid["gpu_seconds"], paid["charged_gpu_seconds"]) == (55.0, 50.0)
    assert paid["amount"] == pytest.approx(0.55)
    assert (unknown["gpu_seconds"], unknown["amount"], unknown["currency"]) == (7.0, None, None)


def test_culprits_are_billed_and_a_charge_taken_back_names_nobody(billed):
    found = result(billed, "fleet.cluster.cost_by_culprit", {"cluster_id": "c1"})
    paid, unknown = found["rows"]
    assert (paid["node_id"], paid["rank"], paid["gpu_seconds"]) == ("c1-n3", 3, 50.0)
    assert (paid["amount"], paid["currency"]) == (pytest.approx(0.5), "USD")
    assert (unknown["node_id"], unknown["gpu_seconds"], unknown["amount"]) == ("c1-n3", 7.0, None)
    assert found["unattributed_gpu_seconds"] == 5.0
    assert result(billed, "fleet.cluster.cost_by_culprit", {}, ONE)["rows"] == found["rows"]
    assert result(billed, "fleet.cluster.cost_by_culprit", {}, TWO)["rows"] == []


TODAY = dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
MONDAY = TODAY - dt.timedelta(days=TODAY.weekday() + 7)


@pytest.fixture
def weeks(open_echo):
    """Two weeks: node c1-n3 is charged in both, and drained in the later one, once, though its journal has more entries."""
    echo = open_echo()
    paid = Hardware("aws", "NVIDIA L4")
    rates = Rates(RatesConfig(providers={"aws": {"NVIDIA L4": 36.0}}))
    for day, node, rank, seconds in (
        (-1, "c1-n3", 3, 10), (0, "c1-n3", 3, 20), (6, "c1-n3", 3, 30), (6, "", -1, 5), (3, "c1-n0", 0, 4), (4, "c1-n0", 0, -4),
    ):  # fmt: skip
        charge = CostDelta(CostParties(node, rank, "", paid), seconds * 10**9)
        at = MONDAY + dt.timedelta(days=day, hours=23, minutes=59)
        export = build_costs("c1", [charge], rates, int(at.timestamp()) * 10**9)
        assert push(echo, export, signal=Signal.LOGS).status_code == 200
    entries = [
        RemediationEntry(
            seq=seq, wall_ns=int(MONDAY.timestamp() + 3600) * 10**9, cluster_id="c1", node_id="c1-n3", entry="action", episode="e",
            action_id=action, target="n3", actuator="slurm", state=state, note="", evidence="{}", clauses="[]",
        )
        for seq, action, state in ((1, "a", "begun"), (2, "a", "done"), (3, "a", "undone"), (4, "b", "begun"))
    ]  # fmt: skip
    assert push(echo, build_remediation_records(entries), signal=Signal.LOGS).status_code == 200
    return echo


def test_weeks_begin_on_monday_and_say_what_was_done(weeks):
    asked = {"time_window": "14d", "until": f"{MONDAY + dt.timedelta(weeks=1):%Y-%m-%dT%H:%M:%SZ}"}
    rows = result(weeks, "fleet.cluster.cost_by_week", asked)["rows"]
    assert [
        (
            dt.datetime.fromisoformat(row["week"]),
            row["node_id"],
            row["gpu_seconds"],
            row["n_actions"],
        )
        for row in rows
    ] == [
        (MONDAY, "c1-n3", 50.0, 1),
        (MONDAY, None, 5.0, 0),
        (MONDAY - dt.timedelta(weeks=1), "c1-n3", 10.0, 0),
    ], "what was taken back within a week is not told"
    assert rows[0]["amount"] == pytest.approx(0.5)
    assert {(row["currency"], row["provider"], row["gpu_model"]) for row in rows} == {
        ("USD", "aws", "NVIDIA L4")
    }
    assert result(weeks, "fleet.cluster.cost_by_week", asked, TWO)["rows"] == []


def test_an_episode_that_fleet_told_is_one_anomaly_and_not_the_agents_event_too(open_echo):
    echo = open_echo()
    now_ns = time.time_ns()
    assert push(echo, health("c1", now_ns)).status_code == 200
    event = StragglerEvent("e1", 0.3, 0.87, "fleet", "throughput")
    episode = Episode("c1", "c1-n3", event, event, now_ns, now_ns)
    assert push(echo, build_episodes([episode]), signal=Signal.LOGS).status_code == 200
    (row,) = result(echo, "fleet.cluster.anomaly_list", {"cluster_id": "c1"})["rows"]
    assert (row["kind"], row["severity"], row["node_id"]) == (
        "incident:straggler",
        "error",
        "c1-n3",
    )
    assert "score 0.300 under 0.870" in row["summary"]
    (cluster,) = result(echo, "fleet.cluster.summary", {"cluster_id": "c1"})["rows"]
    assert cluster["n_open_incidents"] == 1
