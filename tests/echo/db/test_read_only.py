"""A database file that is only read: nothing changes it, several have it at once, and what cannot be read is said."""

import base64
import hashlib
from dataclasses import replace

import duckdb
import pytest
from tests.echo.db.stores import ENGINE, T0, count, make_store, rows_of

from ingero.echo.db import encryption as encryption_module
from ingero.echo.db.backup_names import name_backup
from ingero.echo.db.encryption import Encryption
from ingero.echo.db.engine import migrate
from ingero.echo.db.errors import ForeignDatabaseError, LockedError
from ingero.echo.db.lock import lock_path
from ingero.echo.db.retention import Retention
from ingero.echo.db.store import Store, StoreSettings
from ingero.echo.db.writer_settings import DatabaseWriterSettings
from ingero.echo.schema.migrations import MIGRATIONS
from ingero.errors import StoreError
from ingero.telemetry.clock import SystemClock
from ingero.units import NS_PER_S

KEY = base64.b64encode(bytes(range(100, 132)))


@pytest.fixture
def db(tmp_path):
    """A database with 10 rows, in a folder of its own and without a lock file, as on a disk that was mounted."""
    path = tmp_path / "disk" / "echo.db"
    store = make_store(path)
    store.open()
    store.write(rows_of(10))
    store.close()
    lock_path(str(path)).unlink()
    return path


@pytest.fixture
def open_read_only():
    opened = []

    def open_read_only(path, **settings):
        engine = replace(ENGINE, is_read_only=True, encryption=settings.pop("encryption", None))
        store = Store(str(path), StoreSettings(engine=engine, **settings), SystemClock())
        store.open()
        opened.append(store)
        return store

    yield open_read_only
    for store in opened:
        store.close()


def contents(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).digest() for file in folder.iterdir()}


def keep_up(store):
    """What the writer's thread does each minute."""
    for _ in range(2):
        store._writer.upkeep._next_ns = 0
        with pytest.raises(StoreError):
            store.call(lambda backend: None).result()


def test_upkeep_deletes_nothing_and_the_file_and_its_folder_stay_as_they_are(db, open_read_only):
    before = contents(db.parent)
    brief = Retention(NS_PER_S // 1000, 1, {"events": 1})
    store = open_read_only(db, writer=DatabaseWriterSettings(retention=brief))
    keep_up(store)
    assert count(store) == 10
    with pytest.raises(StoreError, match="only reads"):
        store.put(rows_of(1), lambda error: None)
    assert (store.counters.aged_out, store.counters.sized_out, store.trouble) == (0, 0, "")
    store.close()
    assert contents(db.parent) == before


def test_several_read_it_and_nobody_writes_it_meanwhile(db, open_read_only):
    first, second = open_read_only(db), open_read_only(db)
    assert (count(first), count(second)) == (10, 10)
    lock_path(str(db)).touch()
    third = open_read_only(db)
    with pytest.raises(LockedError, match="in use"):
        make_store(db).open()
    for store in (first, second, third):
        store.close()
    writing = make_store(db)
    writing.open()
    with pytest.raises(LockedError, match="in use") as refused:
        open_read_only(db)
    assert "Stop the ingero-echo" in refused.value.hint
    writing.close()


@pytest.mark.parametrize(
    ("statement", "says", "helps"),
    [
        (
            f"DELETE FROM schema_migrations WHERE number = {MIGRATIONS[-1].number}",
            f"has schema {MIGRATIONS[-2].number} and this release has {MIGRATIONS[-1].number}",
            "`ingero-echo migrate --db {db}`",
        ),
        (
            "INSERT INTO schema_migrations VALUES (999, 'later', now()::TIMESTAMP)",
            "has schema 999",
            "Install the release that wrote it",
        ),
    ],
    ids=["older", "newer"],
)
def test_a_file_of_another_release_is_refused_with_what_helps(
    db, open_read_only, statement, says, helps
):
    with duckdb.connect(str(db)) as connection:
        connection.execute(statement)
    before = contents(db.parent)
    with pytest.raises(StoreError, match=says) as refused:
        open_read_only(db)
    assert helps.format(db=db) in refused.value.hint
    assert contents(db.parent) == before


def test_a_file_with_other_tables_is_none_of_ours_and_gets_none(tmp_path, open_read_only):
    path = tmp_path / "other.db"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE t AS SELECT 1")
    before = contents(tmp_path)
    with pytest.raises(ForeignDatabaseError, match="no Echo database"):
        open_read_only(path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("is_replica", [False, True])
def test_an_encrypted_file_is_read(tmp_path, open_read_only, monkeypatch, is_replica):
    """DuckDB needs its extension to write such a file, not to read one."""
    path, key_file = name_backup(tmp_path, T0), tmp_path / "db.key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    with duckdb.connect() as connection:
        connection.execute("SET force_mbedtls_unsafe = 'true'")
        connection.execute(f"ATTACH '{path}' AS e (ENCRYPTION_KEY '{KEY.decode()}')")
        connection.execute("USE e")
        migrate(connection, T0)
    monkeypatch.setattr(encryption_module, "_load", lambda connection, file: None)
    before = path.read_bytes()
    given = {"replica_of": tmp_path} if is_replica else {}
    store = open_read_only(path, encryption=Encryption(key_file, tmp_path / "httpfs"), **given)
    assert count(store) == 0
    assert path.read_bytes() == before
