"""``ingero migrate``: an older recording, made ready to be recorded into."""

from __future__ import annotations

from pathlib import Path

import click

from ingero.cli.render import plural


@click.command("migrate")
@click.option(
    "--db-path",
    "--db",
    "db",
    type=click.Path(path_type=Path),
    help="Recording to bring up to date.  [default: $INGERO_DB or ~/.ingero/ingero.db]",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
def command(*, db: Path | None, dry_run: bool) -> None:
    r"""Bring a recording of an older version up to date, so that `ingero trace` can go on in it.

    Reading needs no migration. It is done in place and in one transaction: all of it, or nothing. No row is lost;
    what the new tables have no place for stays beside them in a table called old_….

    \b
    Examples:
      ingero migrate --dry-run
      ingero migrate --db-path /var/lib/ingero/ingero.db
    """
    from ingero.config.environment import default_database
    from ingero.recording.store.migration import migrate, plan_migration

    path = db or default_database()
    done = plan_migration(path) if dry_run else migrate(path)
    for change in done.changes:
        more = f", with {', '.join(change.added)}" if change.added else ""
        kept = f"; the old one stays as {change.kept_as}" if change.kept_as else ""
        click.echo(f"{change.table}: {plural(change.n_rows, 'row')} made anew{more}{kept}")
    for table in done.missing:
        click.echo(f"{table}: added")
    n_applied = len(done.changes) + len(done.missing)
    if not n_applied:
        click.echo(f"{path}: up to date, nothing to do")
    elif dry_run:
        click.echo(
            f"{path} (version {done.version}): {plural(n_applied, 'change')} to apply; nothing was changed"
        )
    else:
        click.echo(f"{path} (version {done.version}): {plural(n_applied, 'change')} applied")
