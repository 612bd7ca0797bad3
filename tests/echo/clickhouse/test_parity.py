"""Every question has the same answer from either database, row by row."""

import datetime as dt
import json
import math

import msgspec
import pyarrow as pa
import pytest
from tests.echo.clickhouse.conftest import N_NODES

from ingero.echo.db.clickhouse.dialect import translate
from ingero.echo.db.errors import DeadlineError
from ingero.echo.db.reader import conform
from ingero.echo.db.sandbox.runner import Sandbox, SandboxSettings
from ingero.echo.queries.analysis import RUN_ANALYSIS
from ingero.echo.queries.catalog import QUERIES
from ingero.echo.queries.context import QueryContext, TimeWindowArgs
from ingero.echo.schema.tables import TABLES, TENANT_TABLES
from ingero.echo.service.formats import build_schema
from ingero.echo.service.tenant_sql import RowsExport
from ingero.serving.query import get_query
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

TIMEOUT_NS = 60 * NS_PER_S
NODE = "fleet.cluster.node_detail"
STREAMED = [query for query in QUERIES if query.name != RUN_ANALYSIS.name]
SCOPES = {"all": None, "two": frozenset({"c1", "c3"}), "none": frozenset({"nothing"})}
WINDOWS = {"hour": {}, "part": {"time_window": "10m"}, "one": {"cluster_id": "c1", "limit": 2}}
MORE = {
    "fleet.cluster.anomaly_list": {"severity_filter": "error", "node_id": "c1-n3"},
    "fleet.cluster.find_outlier_nodes": {"min_deviations": 0.5},
    "fleet.cluster.timeline": {"node_id": "c2-n1", "n_buckets": 7},
    NODE: {"node_id": "c1-n3", "limit": 5},
    "fleet.cluster.remediation": {"node_id": "c1-n3", "action_id": "a1"},
    "fleet.cluster.usage": {"step": "hour"},
}


def ask(store, clock, query, args, clusters=None):
    args = {"until": "latest"} | args
    if query.name == "fleet.cluster.hangs":
        args["min_silent_s"] = 0
    if query.name == "fleet.cluster.timeline":  # it has no limit
        args.pop("limit", None)
    if query.name == NODE:
        args.setdefault("node_id", "c1-n3")
    with store.open_reader(TIMEOUT_NS) as reader:
        answer = query.ask(QueryContext(reader, clusters, clock.wall_ns(), None), args)
    return json.loads(answer)


def same(left, right, where=""):
    """The two are equal, numbers to 12 digits."""
    if isinstance(left, dict) and isinstance(right, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list) and isinstance(right, list):
        assert len(left) == len(right), (where, left, right)
        for at, (one, other) in enumerate(zip(left, right, strict=True)):
            same(one, other, f"{where}[{at}]")
    elif isinstance(left, float) or isinstance(right, float):
        assert None not in {left, right}, (where, left, right)
        assert math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12), (where, left, right)
    else:
        assert left == right, where


@pytest.mark.parametrize("query", STREAMED, ids=lambda query: query.name)
def test_both_databases_give_the_same_rows(filled, clock, query):
    duck, server = filled
    cases = [(args, None) for args in (*WINDOWS.values(), MORE.get(query.name, {}))]
    cases += [({}, clusters) for clusters in SCOPES.values()]
    n_rows = 0
    for args, clusters in cases:
        expected = ask(duck, clock, query, args, clusters)
        same(expected, ask(server, clock, query, args, clusters), f"{query.name} {args} {clusters}")
        n_rows += len(expected["rows"])
    assert n_rows > 0


@pytest.mark.parametrize(
    ("args", "n_rows"),
    [
        ({"time_window": "999999d999999d"}, 4),
        ({"until": "9999-12-31T23:59:59Z"}, 0),
        ({"until": "0001-01-01T00:00:00Z"}, 0),
    ],
)
def test_a_window_beyond_what_a_timestamp_holds_has_the_same_rows(filled, clock, args, n_rows):
    query = get_query(QUERIES, "fleet.cluster.summary")
    expected, given = (ask(store, clock, query, args) for store in filled)
    same(expected, given)
    assert len(given["rows"]) == n_rows


@pytest.mark.parametrize("query", STREAMED, ids=lambda query: query.name)
def test_rows_as_arrow_are_the_same_under_the_rows_own_schema(filled, clock, query):
    args = {"until": "latest"} | ({"node_id": "c1-n3"} if query.name == NODE else {})
    tables = []
    for store in filled:
        pages = []
        with store.open_reader(TIMEOUT_NS) as reader:
            query.run(
                QueryContext(reader, None, clock.wall_ns(), None, pages), query.parse_args(args)
            )
            (page,) = pages
            schema = build_schema(page.row)
            batches, n_all = reader.page_batches(page.sql, page.params, 1000, 16)
            table = pa.Table.from_batches((conform(one, schema) for one in batches), schema)
        assert max((len(one) for one in table.to_batches()), default=0) <= 16
        assert n_all == len(table)
        tables.append(json.loads(msgspec.json.encode(table.to_pylist())))
    same(*tables, query.name)


def test_a_tenants_own_rows_are_exported_alike_and_nobody_elses(filled, clock):
    """The sandbox is fed with them, so SQL on ClickHouse sees what it sees on DuckDB."""
    exported = []
    for store in filled:
        with store.open_reader(TIMEOUT_NS) as reader:
            ask_ = QueryContext(reader, frozenset({"c2"}), clock.wall_ns(), None)
            export = RowsExport(reader, ask_.span(TimeWindowArgs(until="latest")), 100_000)
            tables = {}
            for name, table in TABLES.items():
                schema, batches = export(name, None)
                tables[name] = pa.Table.from_batches(batches, schema).sort_by([
                    ("ts", "ascending"),
                    ("node_id", "ascending"),
                ])
                assert schema == table.arrow_schema()
        exported.append(tables)
    for name in TABLES:
        one, other = (tables[name].drop_columns("ingested_at").to_pylist() for tables in exported)
        assert {row["cluster_id"] for row in other} == {"c2"} or (name == "costs" and not other)
        for row in one:  # a list is never NULL in ClickHouse
            row.update({key: [] for key in row if row[key] is None and "victims" in key})
        same(*(json.loads(msgspec.json.encode(rows)) for rows in (one, other)), name)


def test_sql_of_a_tenant_runs_on_its_rows_from_clickhouse(filled, clock):
    sandbox = Sandbox(SandboxSettings(), TENANT_TABLES, SystemClock())
    sql = "SELECT cluster_id, count(*) AS n, max(len(bounds)) AS b FROM histograms GROUP BY ALL"
    try:
        with filled[1].open_reader(TIMEOUT_NS) as reader:
            ask_ = QueryContext(reader, frozenset({"c1"}), clock.wall_ns(), None)
            export = RowsExport(reader, ask_.span(TimeWindowArgs(until="latest")), 100_000)
            answer = sandbox.run(sql, export, 10)
    finally:
        sandbox.close()
    assert json.loads(answer.rows) == [["c1", N_NODES * 10 * 2, 4]]


def test_a_deadline_is_kept_by_the_server(filled):
    slow = "SELECT count(*) FROM events a, events b, events c WHERE a.value_double + b.value_double > c.value_double"
    with filled[1].open_reader(NS_PER_S // 10) as reader, pytest.raises(DeadlineError):
        reader.rows(slow)


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("x = ? AND y = ?", "x = {p0:String} AND y = {p0:String}"),
        ("a // b, '//' , \"::x\"", "a DIV b, '//' , \"::x\""),
        ("median(f(x, 1)) / 2", "quantileExactInclusive(0.5)(f(x, 1)) / 2"),
        ("quantile_cont(x, 0.05)", "quantileExactInclusive(0.05)(x)"),
        ("len(coalesce(a, [1, 2]))", "length(coalesce(a, [1, 2]))"),
        (
            "epoch(?::TIMESTAMP)",
            "(toUnixTimestamp64Micro({p0:String}::DateTime64(6, 'UTC')) / 1e6)",
        ),
        ("try_cast(a AS INTEGER)", "accurateCastOrNull(a, 'Int32')"),
        (
            "json_extract_string(a, '$.\"b.c\"')",
            "JSONExtract(a, 'b.c', 'Nullable(String)')",
        ),
    ],
)
def test_the_dialect_says_it_in_other_words(sql, said):
    assert translate(sql, ["v"] * sql.count("?"))[0] == said


def test_values_are_bound_by_type_and_one_name_serves_equal_ones():
    moment = dt.datetime(2026, 1, 1)  # noqa: DTZ001
    text, values = translate("? ? ? ? ?", [moment, 1, 1.0, None, 1])
    assert text == (
        "{p0:DateTime64(6, 'UTC')} {p1:Int64} {p2:Float64} {p3:Nullable(String)} {p1:Int64}"
    )
    assert values == {"p0": moment, "p1": 1, "p2": 1.0, "p3": None}
