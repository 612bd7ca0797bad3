"""Tools over rows that were put in by hand: counters that begin again, states of incidents, values of any size."""

import datetime as dt
import itertools
import json
import math

import pytest

from ingero.echo.db.engine import MEMORY, DatabaseSettings
from ingero.echo.db.rows import Rows
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import QueryContext, SqlAnswer
from ingero.echo.schema.tables import COSTS, EVENTS, HISTOGRAMS, INCIDENTS, LOGS, SPANS, VERDICTS
from ingero.errors import BadDataError
from ingero.serving.query import get_query
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S
from ingero.wire.remediation import (
    REMEDIATION_ACTION_ID,
    REMEDIATION_EVENT,
    REMEDIATION_EVIDENCE,
    REMEDIATION_SEQ,
    REMEDIATION_STATE,
)

NOW = dt.datetime(2026, 6, 1, 12)  # noqa: DTZ001 - the store's TIMESTAMP is UTC without a zone
EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001
COPY = {"attributes": '{"ingero.memcpy.direction": "h2d"}', "node_id": "n1"}


class Site:
    """A store in memory."""

    def __init__(self):
        settings = StoreSettings(engine=DatabaseSettings(memory_limit_bytes=512 << 20, threads=1))
        self.store = Store(MEMORY, settings, SystemClock())
        self.store.open()
        self.numbers = itertools.count()
        self.rows = Rows()

    def add(self, table, minutes, **values):
        """One row, so many minutes ago."""
        number = next(self.numbers)
        given = {"ts": NOW - dt.timedelta(minutes=minutes), "node_id": "n1", "attributes": "{}"}
        given |= {"cluster_id": "c1"} | values
        row = tuple(given.get(name) for name in table.names)
        self.rows.table(table).add(number, number, row, number)
        self.rows.n_rows += 1

    def ask(self, name, clusters=None, run_sql=None, **args):
        """The answer's rows and the rest of it."""
        if self.rows.n_rows:
            rows, self.rows = self.rows, Rows()
            self.store.write(rows)
        with self.store.open_reader(60 * NS_PER_S) as reader:
            now_ns = (NOW - EPOCH) // dt.timedelta(microseconds=1) * 1000
            context = QueryContext(reader, clusters, now_ns, run_sql)
            return json.loads(get_query(QUERIES, name).ask(context, json.dumps(args).encode()))


@pytest.fixture
def site():
    opened = Site()
    yield opened
    opened.store.close()


def add_counter(site, name, values, **more):
    for at, value in enumerate(values):
        given = {"metric_name": name, "value_double": float(value), "kind": "cumulative"} | more
        site.add(EVENTS, 30 - at, **given)


def test_launches_after_a_restart_are_what_the_counter_grew_by_and_not_its_history(site):
    add_counter(site, "gpu.kernel.launch.count", [1_000_000, 1_000_100, 1_000_200, 50, 150, 250])
    add_counter(site, "gpu.kernel.launch.count", range(0, 600, 100), node_id="n2")
    rows = site.ask("fleet.cluster.kernel_launch_summary")["rows"]
    assert {row["node_id"]: row["n_launches"] for row in rows} == {"n1": 450.0, "n2": 500.0}


def test_bytes_copied_and_fragmenting_calls_are_growth_also_over_a_restart(site):
    add_counter(site, "gpu.memcpy.bytes_total", [5e12, 5e12 + 1e9, 0, 1e9], **COPY)
    add_counter(
        site, "gpu.memcpy.bytes_total", [7.0, 8.0], **COPY | {"kind": "delta", "node_id": "n2"}
    )
    add_counter(site, "gpu.memfrag.ioctl_event_total", [90, 100, 5, 6], attributes='{"cmd": "x"}')
    rows = site.ask("fleet.cluster.memcpy_bandwidth_summary")["rows"]
    assert {row["node_id"]: row["n_bytes"] for row in rows} == {"n1": 2e9, "n2": 15.0}
    (spot,) = site.ask("fleet.cluster.memfrag_hotspots")["rows"]
    assert spot["n_events"] == 16


@pytest.mark.parametrize(
    ("tool", "metric", "total", "rate"),
    [
        ("kernel_launch_summary", "gpu.kernel.launch.count", "n_launches", "launches_per_s"),
        ("memcpy_bandwidth_summary", "gpu.memcpy.bytes_total", "n_bytes", "bytes_per_s"),
    ],
)
def test_the_rate_of_a_counter_is_that_of_the_time_between_its_points_in_either_form(
    site, tool, metric, total, rate
):
    for n in (2, 3, 7):  # 6000 a minute
        add_counter(site, metric, [6000.0] * n, **COPY | {"kind": "delta", "node_id": f"d{n}"})
        add_counter(site, metric, range(0, 6000 * n, 6000), **COPY | {"node_id": f"c{n}"})
    add_counter(site, metric, [6000.0], **COPY | {"kind": "delta", "node_id": "d1"})
    rows = {
        row["node_id"]: (row[total], row[rate]) for row in site.ask(f"fleet.cluster.{tool}")["rows"]
    }
    assert rows.pop("d1") == (6000.0, None)
    assert rows == {
        f"{kind}{n}": (6000.0 * (n - (kind == "c")), 100.0) for kind in "cd" for n in (2, 3, 7)
    }


def add_histogram(site, minutes, counts, **more):
    given = {
        "metric_name": "gpu.memcpy.duration_ms",
        "kind": "cumulative",
        "bounds": [1.0, 2.0, 4.0],
    }
    site.add(HISTOGRAMS, minutes, count=sum(counts), bucket_counts=counts, **given | COPY | more)


def test_durations_of_copies_are_of_those_in_the_window_also_over_a_restart(site):
    for at, counts in enumerate((
        [10**6, 0, 0, 0],
        [10**6 + 10, 10, 0, 0],
        [0, 5, 0, 0],
        [0, 5, 20, 0],
        [1, 0, 0, 0],
    )):
        add_histogram(site, 30 - at, counts)
    add_histogram(
        site, 20, [10**6, 10**6, 0, 0], node_id="n2"
    )  # alone it says nothing of the window
    for at in range(2):
        add_histogram(site, 10 - at, [0, 0, 0, 3], node_id="n3", kind="delta")
    rows = site.ask("fleet.cluster.memcpy_bandwidth_summary")["rows"]
    assert {row["node_id"]: (row["n_copies"], row["p50_ms"]) for row in rows} == {
        "n1": (10 + 10 + 5 + 20 + 1, 2.0),
        "n3": (6.0, None),
    }


def test_an_incident_that_opened_before_the_window_is_open_until_it_ends(site):
    for at in range(5):
        site.add(EVENTS, at, metric_name="ingero.node.health_score", value_double=0.5, kind="gauge")
    states = (("a", 125, "open"), ("b", 130, "open"), ("b", 100, "resolved"), ("c", 30, "open"))
    still = (("a", 100, "updated"), ("old", 9 * 1440, "open"))
    for incident_id, minutes, state in (*states, *still):
        site.add(INCIDENTS, minutes, incident_id=incident_id, state=state, kind="straggler")
    site.add(INCIDENTS, 300, incident_id="x", state="open", cluster_id="c2")
    rows = site.ask("fleet.cluster.summary", frozenset({"c1"}))["rows"]
    assert [(row["cluster_id"], row["n_open_incidents"]) for row in rows] == [("c1", 2)]
    until = (NOW - dt.timedelta(minutes=110)).isoformat() + "Z"
    (past,) = site.ask("fleet.cluster.summary", frozenset({"c1"}), until=until)["rows"]
    assert past["n_open_incidents"] == 2  # a and b


def test_an_incident_whose_severity_is_written_in_another_way_is_no_less_one(site):
    for minutes, severity in ((4, "CRITICAL"), (3, "Warn"), (2, "info"), (1, None)):
        site.add(INCIDENTS, minutes, incident_id="i", kind="x", severity=severity)

    def severities(least):
        rows = site.ask("fleet.cluster.anomaly_list", severity_filter=least)["rows"]
        return [row["severity"] for row in rows]

    assert severities("any") == ["warn", "info", "Warn", "CRITICAL"]
    assert severities("warn") == ["warn", "Warn", "CRITICAL"]
    assert severities("error") == severities("critical") == ["CRITICAL"]


TOP = 2**64 - 1
EVIDENCE = (
    {"onset_entry_ns": 10**60, "rank": 1},
    {"onset_entry_ns": 2**63, "rank": 1},
    {"onset_entry_ns": -(2**63), "rank": 2**31},
    {"onset_entry_ns": 5, "rank": 10**40},
    {"onset_entry_ns": 5, "rank": -1, "labels": {"a": 10**40}},
    {"onset_entry_ns": 5, "rank": -1, "labels": {"a": "\ud800"}},
    {"onset_entry_ns": 5, "rank": -1, "labels": "x"},
    {"onset_entry_ns": math.nan, "rank": True},
    {"onset_entry_ns": -(2**63), "rank": 1},
    [[]],
)
METRICS = (
    "ingero.node.health_score",
    "ingero.node.straggler_event",
    "ingero.node.degradation_warning",
    "ingero_fleet_threshold",
    "ingero_fleet_lost_gpu_seconds",
    "ingero_fleet_verdict",
    "gpu.memory.fragmentation_estimate",
    "gpu.memfrag.ioctl_event_total",
    "gpu.kernel.launch.count",
    "gpu.cuda.operation.duration",
    "gpu.memcpy.bytes_total",
)


def add_evil(site):
    """What a tenant may send, as large as it may be."""
    evil = {"cluster_id": "evil"}
    said = json.dumps({
        "rank": str(10**30),
        "verdict": "culprit",
        "operation": "LaunchKernel",
        "percentile": "p50",
    })
    for metric in METRICS:
        for at, value in enumerate((math.inf, -math.inf, math.nan, 1.7e308, -1.7e308, 1.0)):
            for node_id in ("n1", "n2", "n3"):
                more = {"node_id": node_id, "kind": "cumulative", "attributes": said}
                site.add(EVENTS, 20 - at, metric_name=metric, value_double=value, **evil | more)
    for at, counts in enumerate(([TOP, 0], [0, TOP], [2**63, 5], [5, 2**63])):
        for kind in ("cumulative", "delta"):
            more = {"bounds": [1.0], "kind": kind, "attributes": "{}"} | evil
            add_histogram(site, 10 - at, counts, **more | {"node_id": kind})
    for value in (1e15, 1e15, -1e15, None):
        more = {"gpu_seconds": value, "amount": value, "attributed": "charged", "rank": 2**31 - 1}
        site.add(COSTS, 5, **evil | more)
        site.add(COSTS, 5, **evil | more | {"attributed": "unattributed", "currency": "EUR"})
        more = {
            "verdict": "culprit",
            "slowdown": value,
            "lost_gpu_seconds": value,
            "rank": -(2**31),
        }
        site.add(VERDICTS, 5, victims=["x"], **evil | more)
    for number, evidence in enumerate(EVIDENCE):
        for seq, state in ((1, "begun"), (10**30, "done")):
            said = {
                REMEDIATION_STATE: state,
                REMEDIATION_ACTION_ID: f"evil-{number}",
                REMEDIATION_SEQ: seq,
                REMEDIATION_EVIDENCE: json.dumps(evidence),
            }
            site.add(LOGS, 5, event_name=REMEDIATION_EVENT, attributes=json.dumps(said), **evil)


@pytest.mark.parametrize(
    "name", [query.name for query in QUERIES if query.name != RUN_ANALYSIS.name]
)
def test_no_value_of_a_tenant_makes_a_tool_fail_for_who_asks_about_every_cluster(site, name):
    more = {"node_id": "n1"} if name == "fleet.cluster.node_detail" else {}
    add_evil(site)
    site.ask(name, **more)


def test_charges_stored_too_large_to_be_added_up_are_not_known(site):
    for value in (1.7e308, 1.7e308, -1.7e308, -1.7e308, -1.7e308, 60.0):
        more = {"gpu_seconds": value, "amount": value, "currency": "EUR", "cluster_id": "evil"}
        site.add(COSTS, 5, attributed="charged", node_id="n1", rank=1, **more)
    names = ("cost", "cost_by_culprit", "cost_by_week")
    found = {name: site.ask(f"fleet.cluster.{name}", cluster_id="evil") for name in names}
    for answer in found.values():
        (row,) = answer["rows"]
        assert (row["gpu_seconds"], row["amount"]) == (60.0, 60.0)
    (total,) = found["cost_by_week"]["totals"]
    assert (total["charged_gpu_seconds"], total["charged_amount"]) == (60.0, 60.0)
    (cluster,) = site.ask("fleet.cluster.summary", cluster_id="evil")["rows"]
    assert cluster["lost_gpu_seconds"] == 60.0


@pytest.mark.parametrize("name", ["cost", "cost_by_culprit"])
def test_what_a_culprit_has_cost_since_its_onset_is_no_cost_of_a_window_without_a_charge(
    site, name
):
    """Fleet sends the gauge for as long as the verdict stands, also while the job does not go on."""
    gauge = {"metric_name": "ingero_fleet_lost_gpu_seconds", "value_double": 360.0, "kind": "gauge"}
    site.add(EVENTS, 5, attributes=json.dumps({"rank": "3"}), **gauge)
    (row,) = site.ask(f"fleet.cluster.{name}")["rows"]
    assert row["gpu_seconds"] == 360.0, "there never was a charge"
    site.add(COSTS, 90, attributed="charged", gpu_seconds=360.0, rank=3)
    assert site.ask(f"fleet.cluster.{name}")["rows"] == []
    (row,) = site.ask(f"fleet.cluster.{name}", time_window="2h")["rows"]
    assert row["gpu_seconds"] == 360.0


def test_an_action_counts_in_the_week_in_which_it_took_effect_and_in_no_other(site):
    """It is written as done again where the scheduler did not show it for a while."""
    for days, action in ((9, "a"), (3, "b"), (0, "b"), (0, "c")):
        said = json.dumps({REMEDIATION_ACTION_ID: action, REMEDIATION_STATE: "done"})
        site.add(LOGS, days * 1440 + 60, event_name=REMEDIATION_EVENT, attributes=said)
        site.add(COSTS, days * 1440 + 60, attributed="charged", gpu_seconds=60.0, rank=1)
    rows = site.ask("fleet.cluster.cost_by_week", time_window="28d")["rows"]
    assert [(row["week"][:10], row["n_actions"]) for row in rows] == [
        ("2026-06-01", 1),
        ("2026-05-25", 1),
        ("2026-05-18", 1),
    ]
    (row,) = site.ask("fleet.cluster.cost_by_week", time_window="2h")["rows"]
    assert row["n_actions"] == 1


def test_an_action_whose_record_is_out_of_bounds_is_unknown_and_the_others_are_not(site):
    add_evil(site)
    found = site.ask("fleet.cluster.savings", limit=25)
    unknown = {one["action_id"]: one["unknown"] for one in found["savings"]}
    assert len(unknown) == len(EVIDENCE)
    refused = {action for action, why in unknown.items() if "does not say which rank" in why}
    assert refused == {f"evil-{number}" for number in (0, 1, 2, 3, 4, 5, 6, 7, 9)}


def test_an_answer_in_which_each_row_has_a_long_text_ends_at_its_bound(site):
    text = "x" * (1 << 20)
    for number in range(12):
        said = json.dumps({REMEDIATION_ACTION_ID: f"a{number}"})
        site.add(LOGS, number, event_name=REMEDIATION_EVENT, body=text, attributes=said)
    found = site.ask("fleet.cluster.remediation", limit=1000)
    assert [row["action_id"] for row in found["rows"]] == [f"a{number}" for number in range(7)]
    assert found["n_cut"] == 12 - 7


@pytest.mark.parametrize(
    ("name", "table", "values"),
    [
        ("summary", COSTS, {"gpu_seconds": 5.0}),
        ("summary", INCIDENTS, {"incident_id": "i", "state": "open"}),
        ("find_stragglers", VERDICTS, {"verdict": "culprit"}),
        ("anomaly_list", VERDICTS, {"verdict": "culprit"}),
        ("anomaly_list", INCIDENTS, {"incident_id": "i", "state": "open"}),
        ("anomaly_list", LOGS, {"severity": "error", "body": "boom"}),
        ("blame_chain", VERDICTS, {"verdict": "culprit"}),
        ("blame_chain", COSTS, {"gpu_seconds": 5.0}),
        ("cost", COSTS, {"gpu_seconds": 5.0}),
        ("cost_by_culprit", COSTS, {"gpu_seconds": 5.0}),
        ("cost_by_week", COSTS, {"gpu_seconds": 5.0}),
        ("remediation", LOGS, {"event_name": REMEDIATION_EVENT}),
    ],
)
def test_the_latest_data_of_a_question_is_that_of_every_table_that_it_answers_from(
    site, name, table, values
):
    site.add(EVENTS, 100, metric_name="ingero.node.health_score", value_double=0.9, kind="gauge")
    site.add(table, 10, **values)
    answer = site.ask(f"fleet.cluster.{name}", until="latest", time_window="5m")
    assert answer["window"]["end"] == "2026-06-01T11:50:00.000001Z"
    assert len(answer["rows"]) == 1


VICTIMS = {"verdict": "culprit", "rank": 3, "slowdown": 1.5, "victims": ["rank 1"]}


def test_the_blame_chain_has_also_whom_a_culprit_kept_waiting_after_it_was_named(site):
    site.add(VERDICTS, 20, **VICTIMS)
    (row,) = site.ask("fleet.cluster.blame_chain")["rows"]
    assert (row["victim"], row["waited_gpu_s"], row["source"]) == ("rank 1", None, "verdict")
    charge = {"rank": 3, "attributed": "charged"}
    for minutes, victim, gpu_s in ((10, "n2", 2.0), (9, "n3", 5.0), (8, "n2", 1.0)):
        site.add(COSTS, minutes, victim_node_id=victim, gpu_seconds=gpu_s, **charge)
    site.add(COSTS, 8, victim_node_id="n4", gpu_seconds=4.0, **charge)
    site.add(COSTS, 7, victim_node_id="n4", gpu_seconds=-4.0, **charge)  # taken back
    site.add(COSTS, 7, victim_node_id=None, gpu_seconds=0.5, **charge)  # several
    site.add(COSTS, 7, node_id="", gpu_seconds=9.0, attributed="unattributed")
    answer = site.ask("fleet.cluster.blame_chain")
    rows = [(one["victim"], one["waited_gpu_s"], one["source"]) for one in answer["rows"]]
    assert rows == [("n3", 5.0, "costs"), ("n2", 3.0, "costs"), (None, 0.5, "costs")]
    for row in answer["rows"]:
        assert (row["culprit_node"], row["culprit_rank"]) == ("n1", 3)
        assert (row["verdict"], row["slowdown"], row["culprit_lost_gpu_s"]) == ("culprit", 1.5, 8.5)


def test_the_blame_chain_keeps_a_culprits_verdict_until_it_is_charged_itself(site):
    site.add(VERDICTS, 20, **VICTIMS)
    site.add(VERDICTS, 20, **VICTIMS | {"node_id": "n7", "rank": 9})
    site.add(COSTS, 9, node_id="n7", rank=9, victim_node_id="n2", gpu_seconds=2.0)
    rows = site.ask("fleet.cluster.blame_chain")["rows"]
    assert [(row["culprit_node"], row["victim"], row["source"]) for row in rows] == [
        ("n7", "n2", "costs"),
        ("n1", "rank 1", "verdict"),
    ]


def test_the_latest_data_of_a_statement_is_that_of_every_table(site):
    seen = []

    def run(sql, span, limit):
        seen.append(span.end)
        return SqlAnswer([], [], is_cut=False)

    site.add(EVENTS, 100, metric_name="ingero.node.health_score", value_double=0.9, kind="gauge")
    site.add(SPANS, 10, name="detection")
    site.ask(RUN_ANALYSIS.name, run_sql=run, sql="SELECT * FROM spans", until="latest")
    assert seen == [NOW - dt.timedelta(minutes=10) + dt.timedelta(microseconds=1)]


@pytest.mark.parametrize(
    "metric",
    ["http.server/request-duration", "job:cpu:rate5m", "_up", "it's", "a\\", "ünï", "x" * 256],
)
def test_every_metric_that_is_kept_can_be_asked_for(site, metric):
    for node, value in enumerate([1.0, 1.0, 1.0, 9.0]):
        given = {"metric_name": metric, "value_double": value, "kind": "gauge"}
        site.add(EVENTS, 10, node_id=f"n{node}", **given)
        site.add(EVENTS, 10, node_id=f"n{node}", **given | {"metric_name": "another"})
    steps = site.ask("fleet.cluster.timeline", metric_name=metric, n_buckets=1)
    assert (steps["coverage"]["n_rows"], [row["n_points"] for row in steps["rows"]]) == (4, [4])
    outliers = site.ask("fleet.cluster.find_outlier_nodes", metric_name=metric)
    assert outliers["coverage"]["n_rows"] == 4
    assert [row["node_id"] for row in outliers["rows"]] == ["n3"]


def test_steps_of_a_window_begin_and_end_with_it_to_the_microsecond(site):
    """The moments are ones that a float of seconds does not hold."""
    first, last = NOW - dt.timedelta(hours=1) + dt.timedelta(microseconds=85), dt.timedelta(hours=1)
    for ts in (first, first + last / 2, first + last - dt.timedelta(microseconds=1)):
        site.add(EVENTS, 0, ts=ts, metric_name="m", value_double=1.0, kind="gauge")
    end = f"{first + last:%FT%T.%f}Z"
    found = site.ask("fleet.cluster.timeline", metric_name="m", until=end, n_buckets=2)
    assert [(row["start"], row["n_points"]) for row in found["rows"]] == [
        ("2026-06-01T11:00:00.000085Z", 1),
        ("2026-06-01T11:30:00.000085Z", 2),
    ]


@pytest.mark.parametrize("text", ["2026-06-01T12:60:00Z", "2026-06-01T12:00:00+00:60"])
def test_a_minute_60_is_no_time(site, text):
    with pytest.raises(BadDataError, match="is no time"):
        site.ask("fleet.cluster.summary", until=text)


def test_a_leap_second_is_the_one_before_it(site):
    answer = site.ask("fleet.cluster.summary", until="2016-12-31T23:59:60.25Z")
    assert answer["window"]["end"] == "2016-12-31T23:59:59.250000Z"
