"""A database file that DuckDB encrypts (AES-256-GCM): the key from a file, the cryptography from DuckDB's ``httpfs``.

Without that extension DuckDB reads encrypted files and refuses to write them. Its way around, the setting
``force_mbedtls_unsafe``, makes weak random numbers and is never set here.

Source: DuckDB 1.5.5 and 2.0.0, observed: a key goes into ``ATTACH`` only, an extension's build is for one release and
one platform, and ``LOAD`` of a path checks its signature.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import duckdb

from ingero.errors import ConfigError, IngeroError

CATALOG: Final = "echo"
"""Name of an encrypted file inside its instance; each cursor has to ``USE`` it."""

_KEY_BYTES: Final = 32
_MAX_KEY_FILE_BYTES: Final = 128
_KEY_HINT: Final = "umask 077; openssl rand -base64 32 > db.key"


@dataclass(frozen=True, slots=True)
class Encryption:
    """Where key and cryptography are; the key itself is read at each opening and kept nowhere.

    Attributes:
        key_file: 32 bytes, raw or in base64, readable by its owner alone.
        httpfs: DuckDB's ``httpfs`` extension, built for the installed release.
    """

    key_file: Path
    httpfs: Path


def build_encryption(key_file: str | None, httpfs: str | None) -> Encryption | None:
    """What two settings say; None when neither is given.

    Raises:
        ConfigError: Only one of the two is given.
    """
    if key_file is None and httpfs is None:
        return None
    if key_file is None or httpfs is None:
        raise ConfigError("db_key_file and httpfs_extension belong together")
    return Encryption(Path(key_file).expanduser(), Path(httpfs).expanduser())


def check_encryption(encryption: Encryption) -> None:
    """Hold key and extension to be usable, without a database.

    Raises:
        ConfigError: One of them is not.
    """
    read_key(encryption.key_file)
    with duckdb.connect(config={"allow_unsigned_extensions": False}) as connection:
        _load(connection, encryption.httpfs)


def attach(
    connection: duckdb.DuckDBPyConnection,
    path: str,
    encryption: Encryption,
    *,
    is_read_only: bool = False,
) -> None:
    """Open or create an encrypted file in an instance that has none, and make it the place of all statements.

    Args:
        connection: An instance without a file.
        path: The database file.
        encryption: How it is encrypted.
        is_read_only: It is not changed.

    Raises:
        ConfigError: Key, extension and file do not fit each other; the file is as it was.
        duckdb.Error: The file cannot be opened for another reason; the text has no key in it.
    """
    key = read_key(encryption.key_file)
    _load(connection, encryption.httpfs)
    connection.execute("SET temp_file_encryption = true")
    try:
        options = f"ENCRYPTION_KEY '{key}'" + (", READ_ONLY" if is_read_only else "")
        connection.execute(f"ATTACH {_quote(path)} AS {CATALOG} ({options})")
    except duckdb.Error as error:
        text = str(error).replace(key, "…")
        raise _explain(path, text, encryption) or type(error)(text) from None
    connection.execute(f"USE {CATALOG}")


def read_key(file: Path) -> str:
    """The key as DuckDB takes it: base64 of 32 bytes.

    Raises:
        ConfigError: The file cannot be read, others may read it, or it has no such key. Its content is not shown.
    """
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            raw = opened.read(_MAX_KEY_FILE_BYTES + 1) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}", hint=_KEY_HINT) from error
    if mode & 0o077:
        raise ConfigError(
            f"{file} may be read by others (mode {mode & 0o777:o})", hint=f"chmod 600 {file}"
        )
    is_text = raw.isascii() and raw.decode("ascii").strip().isprintable()
    if len(raw) == _KEY_BYTES and not is_text:
        return base64.b64encode(raw).decode("ascii")
    try:
        key = base64.b64decode(raw.strip(), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{file} is no key of 32 bytes, raw or in base64", hint=_KEY_HINT)
    return base64.b64encode(key).decode("ascii")


def _load(connection: duckdb.DuckDBPyConnection, file: Path) -> None:
    wanted = f"Give the httpfs build of DuckDB {duckdb.__version__} for this platform."
    if not file.is_file():
        raise ConfigError(f"{file} does not exist", hint=wanted)
    try:
        connection.execute(f"LOAD {_quote(str(file.absolute()))}")
        found = connection.execute(
            "SELECT count(*) FROM duckdb_extensions() WHERE extension_name = 'httpfs' AND loaded"
        ).fetchall()
    except duckdb.Error as error:
        raise ConfigError(str(error).strip().partition("\n")[0], hint=wanted) from error
    if found[0][0] != 1:
        raise ConfigError(f"{file} is another extension than httpfs", hint=wanted)


def _explain(path: str, text: str, encryption: Encryption) -> IngeroError | None:
    if "Wrong encryption key" in text:
        return ConfigError(
            f"{path}: the key in {encryption.key_file} is not the one it was encrypted with",
            hint="Give its own key; the file is as it was.",
        )
    if "is not encrypted" in text:
        return ConfigError(
            f"{path} is not encrypted and a key was given",
            hint="Leave the key out, or name a new file; this one is as it was.",
        )
    if "read-only crypto module" in text:
        return ConfigError(f"{encryption.httpfs} brings no cryptography to write with")
    return None


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
