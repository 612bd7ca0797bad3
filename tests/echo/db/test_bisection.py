"""Rows that the database does not take, of a kind that nobody thought of, cost themselves alone."""

from tests.echo.db.stores import T0, count, make_store, rows_of

from ingero.echo.db.bisection import GroupBisector
from ingero.echo.db.duckdb_backend import DuckDbBackend
from ingero.echo.db.errors import BadRowsError, BrokenInstanceError
from ingero.echo.schema.tables import EVENTS
from ingero.errors import BadDataError, StoreError


def put_together(store, group):
    """Errors of requests that share one commit, in order."""
    told = [None] * len(group)

    def note(at):
        def done(error):
            told[at] = error or "stored"

        return done

    def put_all(_):
        for at, rows in enumerate(group):
            store.put(rows, note(at))

    store.call(put_all).result()
    store.call(lambda _: None).result()
    return told


def spoil(rows, at, value="no number"):
    rows.table(EVENTS).columns[4][at] = value
    return rows


def test_a_row_of_the_wrong_type_is_left_out_of_its_request_and_the_others_are_stored(store):
    bad = spoil(rows_of(9, start=100), 4)
    good = [rows_of(3, start=start) for start in (0, 200, 300)]
    told = put_together(store, [good[0], bad, *good[1:]])
    assert told == ["stored"] * 4
    assert (bad.outcome.n_refused, good[0].outcome.n_refused) == (1, 0)
    assert bad.outcome.why
    assert count(store) == 17
    assert store.counters.refused_rows == 1
    assert store.counters.written == 17


def test_a_request_without_a_good_row_is_bad_data(store):
    bad = spoil(spoil(rows_of(2), 0), 1)
    told = put_together(store, [rows_of(2, start=10), bad, rows_of(2, start=20)])
    assert [type(one) for one in told] == [str, BadDataError, str]
    assert count(store) == 4


def test_a_time_that_no_key_can_hold_and_a_node_of_the_wrong_type_are_left_out(store):
    bad = rows_of(3)
    bad.tables["events"].time_ns[1] = 2**64 - 1
    bad.nodes = {
        ("c1", "n1"): [{"ts": T0, "world_size": 4}],
        ("c1", "n2"): [{"ts": T0, "world_size": "many"}],
        ("c1", "n3"): [{"world_size": 4}],  # the table wants a time
    }
    assert put_together(store, [bad]) == ["stored"]
    assert bad.outcome.n_refused == 3
    assert count(store) == 2
    with store.open_reader(10**9) as reader:
        assert reader.rows("SELECT node_id, world_size FROM nodes") == [("n1", 4)]


class Table:
    """Stores numbers; some are poison, and it may be away."""

    def __init__(self, poison=(), fault=BadRowsError, is_away=False):
        self.poison, self.fault, self.is_away = set(poison), fault, is_away
        self.kept, self.n_commits = [], 0

    def commit(self, group):
        self.n_commits += 1
        numbers = [time for rows in group for time in rows.tables["events"].time_ns]
        if self.is_away:
            raise BrokenInstanceError("away")
        if self.poison.intersection(numbers):
            raise self.fault("poison")
        self.kept += numbers


def test_one_bad_request_of_many_costs_a_logarithm_of_commits():
    table = Table({5 * 10**9})
    told = GroupBisector(table.commit).settle([rows_of(1, start=start) for start in range(64)])
    assert [i for i, one in enumerate(told) if one is not None] == [5]
    assert len(table.kept) == 63
    assert table.n_commits <= 14


def test_an_instance_that_dies_of_one_request_stores_the_others_and_says_try_again():
    table = Table({5 * 10**9}, fault=BrokenInstanceError)
    told = GroupBisector(table.commit).settle([rows_of(1, start=start) for start in range(16)])
    assert [i for i, one in enumerate(told) if one is not None] == [5]
    assert len(set(table.kept)) == 15


def test_a_database_that_is_away_is_not_asked_for_each_request():
    table = Table(is_away=True)
    told = GroupBisector(table.commit).settle([rows_of(1, start=start) for start in range(64)])
    assert all(isinstance(one, StoreError) for one in told)
    assert table.n_commits == 3


def test_a_request_full_of_poison_is_given_up_before_it_holds_up_everybody():
    poison = [number * 10**9 for number in range(1000)]
    table = Table(poison)
    rows = rows_of(1000)
    (error,) = GroupBisector(table.commit).settle([rows])
    assert isinstance(error, BadDataError)
    assert rows.outcome.n_refused == 1000
    assert table.n_commits < 130


def test_a_failed_commit_is_rolled_back_whatever_failed(tmp_path, monkeypatch):
    from ingero.echo.db import duckdb_backend

    store = make_store(tmp_path / "echo.db")
    store.open()
    real = duckdb_backend._insert
    failing = [True]

    def insert(connection, table, rows):
        real(connection, table, rows)
        if failing and table == "events":
            failing.pop()
            raise BadRowsError("after the rows are in")

    monkeypatch.setattr(duckdb_backend, "_insert", insert)
    assert isinstance(store.backend, DuckDbBackend)
    store.write(rows_of(4))
    assert count(store) == 4
    store.close()
