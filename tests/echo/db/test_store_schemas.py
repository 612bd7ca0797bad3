"""Databases of earlier schemas, and the keys by which repeated rows are recognised."""

import duckdb
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from tests.echo.db.stores import ENGINE, OLD, T0, count, make_store, rows_of

from ingero.echo.db.deduplication import KeyWindow, build_keys
from ingero.echo.db.engine import MEMORY, migrate, open_engine
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.echo.schema.tables import TABLES
from ingero.errors import StoreError
from ingero.units import NS_PER_S


def test_tables_in_arrow_and_in_sql_are_the_same():
    connection = open_engine(MEMORY, ENGINE)
    migrate(connection, T0)
    for table in TABLES.values():
        made = connection.sql(f"SELECT * FROM {table.name}").to_arrow_table().schema
        assert made == table.arrow_schema(), table.name


def test_migrating_twice_changes_nothing_and_a_newer_schema_is_refused():
    connection = open_engine(MEMORY, ENGINE)
    assert migrate(connection, T0) == (0, MIGRATIONS[-1].number)
    assert migrate(connection, T0) == (MIGRATIONS[-1].number,) * 2
    connection.execute("INSERT INTO schema_migrations VALUES (999, 'later', now())")
    with pytest.raises(StoreError, match="schema 999") as raised:
        migrate(connection, T0)
    assert "release" in raised.value.hint


@given(
    batches=st.lists(st.lists(st.integers(0, 60), max_size=40), max_size=12),
)
def test_key_window_agrees_with_a_set(batches):
    window, seen = KeyWindow(10**18, 10**6), set()
    for batch in batches:
        keys = np.array(batch, dtype=np.uint64)
        is_new = window.find_new(keys)
        expected, inside = [], set()
        for key in batch:
            expected.append(key not in seen and key not in inside)
            inside.add(key)
        assert is_new.tolist() == expected
        window.add(keys[is_new], 0)
        seen |= inside
    assert len(window) == len(seen)


def test_key_window_forgets_after_the_window_and_stays_under_its_bound():
    window = KeyWindow(100, 1000)
    keys = np.arange(10, dtype=np.uint64)
    window.add(keys, 1)
    window.add(np.array([99], dtype=np.uint64), 102)
    assert not window.find_new(keys).any()
    window.add(np.array([98], dtype=np.uint64), 250)
    assert window.find_new(keys).all()
    for i in range(40):
        window.add(np.arange(1000 + i * 100, 1100 + i * 100, dtype=np.uint64), 250)
    assert len(window) <= 1000


def test_a_database_of_the_first_schema_is_brought_up_to_date_with_a_secret_of_its_own(tmp_path):
    import ingero.echo.schema.migrations as schema

    secrets = []
    for name in ("a.db", "b.db"):
        with duckdb.connect(str(tmp_path / name)) as old:
            old.execute(
                "CREATE TABLE schema_migrations (number INTEGER PRIMARY KEY, title VARCHAR, applied_at TIMESTAMP)"
            )
            for statement in schema.MIGRATIONS[0].statements:
                old.execute(statement)
            old.execute("INSERT INTO schema_migrations VALUES (1, 'old', now()::TIMESTAMP)")
            old.execute(
                f"INSERT INTO events ({OLD}) SELECT now()::TIMESTAMP, 'prod east/1', 'n', 'm', 1, '{{}}', "
                "now()::TIMESTAMP"
            )
        store = make_store(tmp_path / name)
        store.open()
        store.write(rows_of(3))
        store.write(rows_of(3))
        assert count(store) == 4
        secrets.append(store.backend.secret)
        store.close()
        again = make_store(tmp_path / name)
        again.open()
        again.write(rows_of(4))
        assert (count(again), again.backend.secret) == (5, secrets[-1])
        again.close()
    assert len(set(secrets)) == 2


def test_a_database_of_the_second_schema_keeps_its_rows_and_secret_and_can_hold_hangs(tmp_path):
    import ingero.echo.schema.migrations as schema

    path = tmp_path / "a.db"
    with duckdb.connect(str(path)) as old:
        old.execute(
            "CREATE TABLE schema_migrations (number INTEGER PRIMARY KEY, title VARCHAR, applied_at TIMESTAMP)"
        )
        for step in schema.MIGRATIONS[:2]:
            for statement in step.statements:
                old.execute(statement)
            old.execute(
                "INSERT INTO schema_migrations VALUES (?, 'old', now()::TIMESTAMP)", [step.number]
            )
        old.execute(
            f"INSERT INTO events ({OLD}) SELECT now()::TIMESTAMP, 'c', 'n', 'm', 1, '{{}}', now()::TIMESTAMP"
        )
        (secret,) = old.execute("SELECT secret FROM ingest_secret").fetchone()
    store = make_store(path)
    store.open()
    assert store.backend.secret == secret
    assert count(store) == 1
    with store.open_reader(5 * NS_PER_S) as reader:
        assert reader.rows("SELECT count(*) FROM hangs") == [(0,)]
    store.close()


def test_nobody_who_lacks_the_secret_can_choose_a_time_that_gives_anothers_key():
    """Without one, the sum of series and time times a constant is all there is, and that can be solved."""
    golden = 0x9E3779B97F4A7C15
    mine, other, at_ns = 1234567, 7654321, 1_700_000_000_000_000_000

    def key(series, time_ns, secret):
        times = np.array([time_ns % 2**64], dtype=np.uint64).view(np.int64)
        return int(build_keys(np.array([series], dtype=np.uint64), times, secret)[0])

    def unmix(value):
        from ingero.echo.db.deduplication import mix

        return int(mix(np.array([value], dtype=np.uint64))[0])

    chosen = at_ns + (unmix(other) - unmix(mine)) * pow(golden, -1, 2**64)
    assert key(mine, chosen, 0) == key(other, at_ns, 0)
    assert key(mine, chosen, 0x1234_5678_9ABC) != key(other, at_ns, 0x1234_5678_9ABC)


def test_keys_depend_on_series_and_time():
    series = np.array([1, 1, 2], dtype=np.uint64)
    keys = build_keys(series, np.array([5, 6, 5]))
    assert len(set(keys.tolist())) == 3
