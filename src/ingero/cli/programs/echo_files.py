"""``ingero-echo backup``, ``restore``, ``migrate`` and ``repair``: what is done to a database file."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ingero.errors import UnsupportedError

if TYPE_CHECKING:
    from ingero.echo.db.encryption import Encryption

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_TIME = "%Y-%m-%dT%H:%M:%SZ"

_DB = click.option(
    "--db",
    "--db-path",
    "db",
    default="~/.ingero/echo.db",
    show_default=True,
    help="The database file.",
)


def with_key(command: CommandT) -> CommandT:
    """The two options of a command that opens an encrypted file."""
    command = click.option(
        "--httpfs-extension", metavar="FILE", help="DuckDB's httpfs, which the key needs."
    )(command)
    return click.option("--db-key-file", metavar="FILE", help="Key of an encrypted database.")(
        command
    )


def _encryption(db_key_file: str | None, httpfs_extension: str | None) -> Encryption | None:
    from ingero.echo.db.encryption import build_encryption

    return build_encryption(db_key_file, httpfs_extension)


def _files() -> ModuleType:
    try:
        from ingero.echo.db import files
    except ModuleNotFoundError as missing:
        raise UnsupportedError(
            f"this installation has no {missing.name}", hint="pip install 'ingero[echo]'"
        ) from missing
    return files


def _backups() -> ModuleType:
    _files()
    from ingero.echo.db import backups

    return backups


@click.command("backup")
@_DB
@click.option("--output", "-o", required=True, help="Name of the copy; must not exist.")
@with_key
def backup(db: str, output: str, db_key_file: str | None, httpfs_extension: str | None) -> None:
    r"""Copy the database, also while it is served; the copy is opened and counted before it gets its name.

    Beside a running `serve`, as the user who runs it: ingest waits while the file is copied, reads go on.

    \b
    Examples:
      ingero-echo backup --db echo.db -o echo-2026-01-31.db
    """
    files = _files()
    encryption = _encryption(db_key_file, httpfs_extension)
    n_bytes, n_rows = files.back_up(Path(db).expanduser(), Path(output), encryption)
    click.echo(f"{output}: {n_bytes} bytes, {n_rows} rows; opened and counted")


@click.command("restore")
@_DB
@with_key
@click.option(
    "--until", metavar="TIME", help="Leave out what arrived later, such as 2026-01-31T12:00:00Z."
)
@click.argument("backup_file")
def restore(
    db: str,
    backup_file: str,
    until: str | None,
    db_key_file: str | None,
    httpfs_extension: str | None,
) -> None:
    r"""Put BACKUP_FILE in the database's place; the database that was there is kept beside it.

    Of a folder of scheduled backups the newest is taken, with --until the first that was made after that time: it has
    all that had arrived by then, less what retention deleted before it was made.

    \b
    Examples:
      ingero-echo restore --db echo.db echo-2026-01-31.db
      ingero-echo restore --db echo.db --until 2026-01-31T12:00:00Z backups/
    """
    files = _files()
    from ingero.echo.db.backup_names import choose_backup, stamp_of

    encryption = _encryption(db_key_file, httpfs_extension)
    moment = _parse_time(until)
    backup = Path(backup_file)
    if backup.is_dir():
        backup = choose_backup(backup, moment)
        if moment is not None and stamp_of(backup) <= moment:
            note = f"no backup was made after that time: what arrived after {stamp_of(backup):{_TIME}} is lost"
            click.echo(f"warning: {note}", err=True)
    naive = None if moment is None else moment.replace(tzinfo=None)
    done = files.restore(backup, Path(db).expanduser(), encryption, naive)
    left_out = f", {done.n_left_out} that arrived later left out" if until else ""
    newest = f"; the newest arrived {done.newest:{_TIME}}" if done.newest else ""
    click.echo(f"{db}: restored {done.n_rows} rows from {backup}{left_out}{newest}")
    if done.aside:
        click.echo(f"the database that was there is {done.aside}")
    if done.damage:
        click.echo(f"it could not be opened: {done.damage}")


def _parse_time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no time such as 2026-01-31T12:00:00Z", param_hint="--until"
        ) from None
    if moment.tzinfo is None:
        raise click.BadParameter(
            "it has no time zone; write Z behind it for UTC", param_hint="--until"
        )
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise click.BadParameter(f"{text!r} is in no year of UTC", param_hint="--until") from None


@click.command("verify")
@with_key
@click.argument("file")
def verify(file: str, db_key_file: str | None, httpfs_extension: str | None) -> None:
    r"""Read every value of FILE, a backup or a database that nobody serves, without changing it.

    A damaged block ends it with status 4.

    \b
    Examples:
      ingero-echo verify backups/echo-20260131T020000Z-000001.db
    """
    n_rows = _backups().verify(Path(file), _encryption(db_key_file, httpfs_extension))
    click.echo(f"{file}: {n_rows} rows, all of them readable")


@click.command("migrate")
@_DB
@with_key
def migrate(db: str, db_key_file: str | None, httpfs_extension: str | None) -> None:
    r"""Bring the schema up to date; `serve` does the same when it starts.

    \b
    Examples:
      ingero-echo migrate --db echo.db
    """
    now = datetime.now(UTC).replace(tzinfo=None)
    files = _files()
    encryption = _encryption(db_key_file, httpfs_extension)
    before, after = files.migrate_file(Path(db).expanduser(), now, encryption)
    click.echo(f"{db}: schema {before} → {after}" if before != after else f"{db}: schema {after}")


@click.command("repair")
@_DB
def repair(db: str) -> None:
    r"""Repair a damaged write-ahead log: keep a copy, cut where it stops making sense, keep all before.

    \b
    Examples:
      ingero-echo repair --db echo.db
    """
    done = _files().repair(Path(db).expanduser())
    if done.kept_copy is None:
        click.echo(f"{db}: nothing to repair")
        return
    click.echo(f"{db}: repaired; {done.n_cut_bytes} bytes of the log could not be read")
    click.echo(f"the damaged log is kept at {done.kept_copy}")
