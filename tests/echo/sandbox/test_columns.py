"""A statement is given the tables and columns that it names, and no others."""

import duckdb
import pytest
from tests.echo.sandbox.tables import export, export_whole

from ingero.echo.db.sandbox.guard import check_statement
from ingero.echo.schema.tables import TENANT_TABLES


def test_only_the_tables_that_a_statement_names_are_handed_over(sandbox):
    asked = []

    def spy(table, columns):
        asked.append(table)
        return export(table, columns)

    sandbox.run("SELECT 1 FROM events e, (SELECT * FROM verdicts) v", spy, 10)
    assert sorted(asked) == ["events", "verdicts"]


NARROW = [
    ("SELECT count(*) FROM events", set()),
    (
        "SELECT Metric_Name, COUNT(*), sum(value_double) FROM events GROUP BY ALL",
        {"metric_name", "value_double"},
    ),
    (
        "SELECT e.node_id FROM events e WHERE e.value_double > 1 ORDER BY e.ts",
        {"node_id", "value_double", "ts"},
    ),
    ("SELECT node_id AS kind FROM events ORDER BY kind", {"node_id", "kind"}),
    ("WITH x AS (SELECT ts, node_id FROM events) SELECT x.node_id FROM x", {"ts", "node_id", "x"}),
    (
        "SELECT a.node_id FROM events a JOIN events b USING (ts, unit) ORDER BY 1",
        {"node_id", "ts", "unit"},
    ),
    (
        "SELECT list_sort(list(value_double)) FROM events WHERE attributes ->> '$.k' = 'v'",
        {"value_double", "attributes"},
    ),
    (
        "SELECT (SELECT max(b.ts) FROM events b WHERE b.node_id = a.node_id) FROM events a",
        {"ts", "node_id", "b", "a"},
    ),
    (
        "SELECT sum(value_double) OVER (PARTITION BY kind ORDER BY node_id) FROM events",
        {"value_double", "kind", "node_id"},
    ),
]
WIDE = [
    "SELECT * FROM events",
    "FROM events",
    "SELECT events FROM events",
    "SELECT e FROM events e",
    "SELECT count(e) FROM events AS e",
    "SELECT e.* EXCLUDE (ts) FROM events e",
    "SELECT COLUMNS('node.*') FROM events",
    "SELECT count(COLUMNS(*)) FROM events",
    "SELECT #3 FROM events",
    "SELECT b FROM events e(a, b)",
    "SELECT a.node_id FROM events a NATURAL JOIN events b ORDER BY ALL",
    "SELECT node_id FROM events WHERE EXISTS (SELECT * FROM logs)",
]


def needs_of(statement):
    with duckdb.connect() as connection:
        return check_statement(connection, statement, frozenset(TENANT_TABLES)).columns


@pytest.mark.parametrize(("statement", "columns"), NARROW)
def test_a_statement_is_given_the_columns_it_names_and_answers_the_same(
    sandbox, statement, columns
):
    assert columns <= needs_of(statement) <= columns | {"e", "a", "b", "x"}
    narrow, whole = sandbox.run(statement, export, 100), sandbox.run(statement, export_whole, 100)
    assert (narrow.columns, narrow.rows) == (whole.columns, whole.rows)
    assert narrow.n_rows


@pytest.mark.parametrize("statement", WIDE)
def test_a_statement_that_rests_on_every_column_gets_every_column(sandbox, statement):
    assert needs_of(statement) is None
    assert sandbox.run(statement, export, 100).columns
