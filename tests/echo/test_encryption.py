"""A database file under a key: every part of the program on it, and every way in which key and file do not fit.

DuckDB writes such files with its ``httpfs`` extension only; the tests that need one look for the package
``duckdb-extension-httpfs`` of the installed release.
"""

import asyncio
import base64
import importlib.util
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pytest
from mcp import Client, StdioServerParameters, stdio_client
from tests.echo.one_token import ADDRESSES, ECHO, TOKEN, Echo, fill, numbered, run
from tests.support import local_http

from ingero.config import parse_model
from ingero.echo.db.encryption import Encryption, check_encryption, read_key
from ingero.echo.db.engine import DatabaseSettings, open_engine
from ingero.echo.db.files import back_up, repair, restore
from ingero.echo.service.config import EchoConfig
from ingero.errors import ConfigError, StoreError

KEY = base64.b64encode(bytes(range(100, 132)))
OTHER_KEY = base64.b64encode(bytes(range(1, 33)))
NOW = datetime(2026, 11, 21, tzinfo=UTC).replace(tzinfo=None)


def find_httpfs():
    package = importlib.util.find_spec("duckdb_extension_httpfs")
    if package is None:
        return None
    folder = Path(package.submodule_search_locations[0]) / "extensions" / f"v{duckdb.__version__}"
    file = folder / "httpfs.duckdb_extension"
    return file if file.is_file() else None


HTTPFS = find_httpfs()
needs_httpfs = pytest.mark.skipif(
    HTTPFS is None, reason=f"no package has httpfs for DuckDB {duckdb.__version__}"
)


def write_key(path, content=KEY + b"\n", mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def key_file(tmp_path):
    return write_key(tmp_path / "db.key")


@pytest.fixture
def locked_file(tmp_path):
    """An encrypted file, made without the extension in the way that the program never takes."""
    path = tmp_path / "locked.db"
    with duckdb.connect() as connection:
        connection.execute("SET force_mbedtls_unsafe = 'true'")
        connection.execute(f"ATTACH '{path}' AS e (ENCRYPTION_KEY '{KEY.decode()}')")
        connection.execute("CREATE TABLE e.t AS SELECT 1")
    return path


def serve_once(db, token_file, *more):
    """A serve that has to refuse."""
    args = ["serve", "--insecure-no-tls", "--db", db, *ADDRESSES, "--auth-token-file", token_file]
    command = [str(ECHO), *map(str, args), *map(str, more)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


# What needs no extension.


@pytest.mark.parametrize(
    "content", [KEY, KEY + b"\n", base64.b64decode(KEY)], ids=["base64", "with-newline", "raw"]
)
def test_a_key_is_32_bytes_raw_or_in_base64(tmp_path, content):
    assert read_key(write_key(tmp_path / "key", content)) == KEY.decode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hunter2hunter2",
        KEY[:-4],
        b"0123456789abcdef" * 2,
        b"0123456789abcdef" * 4,
        base64.b64decode(KEY) + b"\n",
        KEY + b"\n" + KEY,
        bytes(1 << 16),
    ],
    ids=["empty", "word", "short", "hex-16", "hex-32", "raw-newline", "two", "large"],
)
def test_anything_else_is_refused_without_being_told(tmp_path, content):
    with pytest.raises(ConfigError, match="no key of 32 bytes") as refused:
        read_key(write_key(tmp_path / "key", content))
    assert not content.strip(b"\0\n") or content.decode("latin-1") not in str(refused.value)


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620])
def test_a_key_that_others_may_touch_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match=f"mode {mode:o}"):
        read_key(write_key(tmp_path / "key", mode=mode))


def test_a_key_that_is_not_there_or_no_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "key")
    with pytest.raises(ConfigError):
        read_key(tmp_path)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"db_key_file": "k"}, "db_key_file and httpfs_extension belong together"),
        ({"httpfs_extension": "h"}, "db_key_file and httpfs_extension belong together"),
        (
            {"db_key_file": "k", "httpfs_extension": "h", "store": "clickhouse://e@127.0.0.1/d"},
            "db_key_file is of a file",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        parse_model(EchoConfig, {"insecure_no_tls": True, **given})


def test_a_database_in_memory_is_not_encrypted(key_file):
    settings = DatabaseSettings(encryption=Encryption(key_file, Path("h")))
    with pytest.raises(ConfigError, match="in memory"):
        open_engine(":memory:", settings)


@pytest.mark.parametrize("name", ["httpfs.duckdb_extension", "httpfs.so", "missing"])
def test_a_file_that_is_no_extension_is_refused_and_creates_nothing(tmp_path, key_file, name):
    file = tmp_path / name
    if name != "missing":
        file.write_bytes(b"x" * 4096)
    db = tmp_path / "echo.db"
    with pytest.raises(ConfigError) as refused:
        open_engine(str(db), DatabaseSettings(encryption=Encryption(key_file, file)))
    assert f"DuckDB {duckdb.__version__}" in refused.value.hint
    assert not db.exists()


def test_an_encrypted_file_without_a_key_is_refused_by_every_command_and_stays(
    tmp_path, token_file, locked_file
):
    before = locked_file.read_bytes()
    refusals = [
        serve_once(locked_file, token_file),
        run("mcp", "--db", locked_file),
        run("migrate", "--db", locked_file),
        run("backup", "--db", locked_file, "-o", tmp_path / "copy.db"),
        run("restore", "--db", tmp_path / "new.db", locked_file),
    ]
    for refused in refusals:
        assert (refused.returncode, "no key was given" in refused.stderr) == (2, True)
        assert "--db-key-file" in refused.stderr
    with pytest.raises(StoreError, match="its log cannot be repaired"):
        repair(locked_file)
    assert locked_file.read_bytes() == before
    assert not list(tmp_path.glob("copy*")) + list(tmp_path.glob("new*"))


def test_a_command_with_half_of_the_pair_names_both(tmp_path, key_file):
    refused = run("migrate", "--db", tmp_path / "echo.db", "--db-key-file", key_file)
    assert (refused.returncode, "belong together" in refused.stderr) == (2, True)


# What needs it.


@pytest.fixture
def keyed(key_file):
    return ["--db-key-file", str(key_file), "--httpfs-extension", str(HTTPFS)]


@pytest.fixture
def encryption(key_file):
    return Encryption(key_file, HTTPFS)


def files_with(folder, text):
    return {path.name for path in folder.iterdir() if path.is_file() and text in path.read_bytes()}


async def ask_over_stdio(*args):
    server = StdioServerParameters(command=str(ECHO), args=["mcp", *map(str, args)])
    async with Client(stdio_client(server)) as client:
        given = {"sql": "SELECT count(*) AS n FROM events", "time_window": "99d"}
        answer = await client.call_tool("fleet.cluster.run_analysis", given)
    return answer.structured_content


@needs_httpfs
@pytest.mark.slow
def test_all_of_the_program_works_on_an_encrypted_file_and_no_row_is_readable_in_it(
    tmp_path, token_file, key_file, keyed
):
    folder = tmp_path / "data"
    db, copy, plain = folder / "echo.db", folder / "copy.db", tmp_path / "plain.db"
    fill(plain, token_file, numbered(0, 10)).end()
    assert b"numbered" in plain.read_bytes()  # what would be seen
    checked = run("validate", "--insecure-no-tls", "--auth-token-file", token_file, *keyed)
    assert checked.returncode == 0, checked.stderr
    echo = Echo(db, token_file, *keyed)
    assert echo.push(numbered(0, 100)).status_code == 200
    assert Path(f"{db}.wal").stat().st_size > 1000
    assert files_with(folder, b"numbered") == set()
    echo.end(signal.SIGKILL)
    assert Path(f"{db}.wal").exists()
    echo = Echo(db, token_file, *keyed)
    assert echo.sql("SELECT count(*) FROM events") == [[100]]
    done = run("backup", "--db", db, "-o", copy, *keyed)  # beside the server
    assert done.returncode == 0, done.stderr
    assert echo.push(numbered(100, 10)).status_code == 200
    assert echo.end() == 0
    assert run("backup", "--db", db, "-o", folder / "later.db", *keyed).returncode == 0
    assert files_with(folder, b"numbered") == set()
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert run("migrate", "--db", db, *keyed).returncode == 0
    restored = run("restore", "--db", db, copy, *keyed)
    assert restored.returncode == 0, restored.stderr
    answer = asyncio.run(ask_over_stdio("--db", db, *keyed))
    assert "100" in str(answer)
    assert "110" not in str(answer)
    said = echo.log.read_text() + done.stdout + done.stderr + restored.stdout + checked.stdout
    assert KEY.decode() not in said


@needs_httpfs
@pytest.mark.slow
def test_a_tenant_reaches_neither_the_key_nor_the_file(tmp_path, token_file, key_file, keyed):
    echo = Echo(tmp_path / "keyed.db", token_file, *keyed)
    assert echo.push(numbered(0, 10)).status_code == 200
    headers = {"authorization": f"Bearer {TOKEN}"}
    for sql in (
        f"SELECT * FROM read_text('{key_file}')",
        f"SELECT * FROM read_blob('{tmp_path / 'keyed.db'}')",
        "SELECT * FROM duckdb_databases()",
        "SELECT * FROM duckdb_secrets()",
        "SELECT * FROM duckdb_settings()",
        "SELECT * FROM echo.events",
        "SET force_mbedtls_unsafe = 'true'",
    ):
        url = f"http://127.0.0.1:{echo.api}/api/v2/sql"
        answer = local_http.post(url, json={"sql": sql}, headers=headers, timeout=120)
        assert answer.status_code == 400, (sql, answer.text)
        assert KEY.decode() not in answer.text
    metrics = local_http.get(f"http://127.0.0.1:{echo.api}/metrics", headers=headers).text
    assert KEY.decode() not in metrics + echo.log.read_text()
    assert echo.sql("SELECT count(*) FROM events") == [[10]]
    assert echo.end() == 0


def make(path, encryption):
    from ingero.echo.db.engine import migrate

    connection = open_engine(str(path), DatabaseSettings(encryption=encryption))
    migrate(connection, NOW)
    connection.close()
    return path.read_bytes()


@needs_httpfs
def test_another_key_or_one_too_many_is_refused_and_changes_nothing(
    tmp_path, token_file, key_file, keyed, encryption
):
    db, plain = tmp_path / "echo.db", tmp_path / "plain.db"
    before, plain_before = make(db, encryption), make(plain, None)
    other = write_key(tmp_path / "other.key", OTHER_KEY)
    wrong = ["--db-key-file", other, "--httpfs-extension", HTTPFS]
    for refused in (serve_once(db, token_file, *wrong), run("migrate", "--db", db, *wrong)):
        assert (refused.returncode, "is not the one" in refused.stderr) == (2, True)
        assert str(other) in refused.stderr
        assert OTHER_KEY.decode() not in refused.stderr
    for refused in (serve_once(plain, token_file, *keyed), run("migrate", "--db", plain, *keyed)):
        assert (refused.returncode, "is not encrypted" in refused.stderr) == (2, True)
    for source in (db, plain):
        for call in (back_up, restore):
            with pytest.raises(ConfigError):
                call(source, tmp_path / "copy.db", Encryption(other, HTTPFS))
    assert (db.read_bytes(), plain.read_bytes()) == (before, plain_before)
    assert not list(tmp_path.glob("copy*"))


@needs_httpfs
def test_a_restore_over_a_file_of_another_key_keeps_it_in_its_place(tmp_path, encryption):
    db, copy = tmp_path / "echo.db", tmp_path / "copy.db"
    other = Encryption(write_key(tmp_path / "other.key", OTHER_KEY), HTTPFS)
    before = make(db, other)
    make(copy, encryption)
    with pytest.raises(ConfigError, match="is not the one"):
        restore(copy, db, encryption)
    assert db.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("*.db*")) == ["copy.db", "echo.db"]


@needs_httpfs
def test_an_extension_that_was_changed_is_refused(tmp_path, key_file, encryption):
    check_encryption(encryption)
    changed = tmp_path / "httpfs.duckdb_extension"
    content = bytearray(HTTPFS.read_bytes())
    content[1 << 20] ^= 1
    changed.write_bytes(content)
    with pytest.raises(ConfigError, match="signature"):
        check_encryption(Encryption(key_file, changed))


@needs_httpfs
def test_a_damaged_log_is_named_and_neither_file_is_touched(tmp_path, encryption):
    db = tmp_path / "echo.db"
    make(db, encryption)
    script = (
        "import os, sys\nfrom pathlib import Path\n"
        "from ingero.echo.db.encryption import Encryption\n"
        "from ingero.echo.db.engine import DatabaseSettings, open_engine\n"
        "e = Encryption(Path(sys.argv[2]), Path(sys.argv[3]))\n"
        "c = open_engine(sys.argv[1], DatabaseSettings(encryption=e))\n"
        "for i in range(9): c.execute('INSERT INTO ingest_keys SELECT i, now()::TIMESTAMP FROM range(99) t(i)')\n"
        "os._exit(0)\n"
    )
    args = [str(db), str(encryption.key_file), str(HTTPFS)]
    subprocess.run([sys.executable, "-c", script, *args], check=True)
    wal = Path(f"{db}.wal")
    log = bytearray(wal.read_bytes())
    log[-2000:-1000] = bytes(1000)
    wal.write_bytes(log)
    with pytest.raises(StoreError, match="damaged write-ahead log") as refused:
        open_engine(str(db), DatabaseSettings(encryption=encryption))
    assert "restore a backup" in refused.value.hint
    assert wal.read_bytes() == bytes(log)
