"""Several recordings in one file, each row with its node.

Every table is copied and every count added. A recording is known by the identity that its writer gave it
(`ingero.recording.store.identity`), so a file that is given twice, or that is in another one already, adds nothing,
while equal row numbers of different recordings are different rows. What cannot be distinguished is refused.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ingero.errors import BadDataError, StoreError
from ingero.recording.export.merge_plan import MergeGroup, MergeSource, plan_merge
from ingero.recording.export.merge_rows import Copier
from ingero.recording.store.creation import open_new
from ingero.recording.store.files import check_header, open_recording, store_errors, table_columns
from ingero.recording.store.identity import measure, read_parts
from ingero.recording.store.lock import WriterLock


@dataclass(frozen=True, slots=True)
class MergedFile:
    """What came from one source.

    Attributes:
        path: The source.
        nodes: Nodes its rows carry.
        n_events: Events added.
        n_repeated: Events that were there already.
        n_damaged: Rows, of all tables, that could not be read.
    """

    path: Path
    nodes: tuple[str, ...]
    n_events: int
    n_repeated: int
    n_damaged: int = 0


@dataclass(frozen=True, slots=True)
class Merged:
    """What a merge made.

    Attributes:
        files: By source, in the order given.
        n_events: Events in the new file.
        n_calls: Calls that its exact counts tell.
        notes: What could not be kept as it was, a line each.
    """

    files: list[MergedFile]
    n_events: int
    n_calls: int
    notes: list[str] = field(default_factory=list)


def merge_recordings(
    sources: Sequence[Path], output: Path, *, force_node: str = "", is_replaced: bool = False
) -> Merged:
    """Merge recordings into a new file, whole or not at all.

    Args:
        sources: Recordings, read only.
        output: The new file.
        force_node: Node for rows that carry none.
        is_replaced: Whether `output` may exist; it is replaced when all is merged.

    Raises:
        StoreError: A source cannot be read, or the output exists, is being recorded into or cannot be written.
        BadDataError: A source's rows carry no node and `force_node` is empty, or sources hold the same recording in
            part.
    """
    _check_output(sources, output, is_replaced=is_replaced)
    by_path = {path: _read_source(path, force_node) for path in dict.fromkeys(sources)}
    plan = plan_merge(list(by_path.values()))
    done = {one.path: MergedFile(one.path, one.nodes, 0, one.n_events) for one in plan.repeated}
    with _part_beside(output) as part:
        with store_errors(output), open_new(part) as target:
            copier = Copier(target)
            for group in plan.groups:
                done |= _add(copier, group)
            copier.finish()
            state = measure(target)
            target.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            target.execute("PRAGMA journal_mode = DELETE")
        try:
            for end in (
                "-wal",
                "-shm",
            ):  # of the file that was there: SQLite would take them for this one's
                output.with_name(output.name + end).unlink(missing_ok=True)
            part.replace(output)
        except OSError as error:
            raise StoreError(f"{output}: {error.strerror}") from error
    files = []
    for path in sources:
        files.append(done[path])
        done[path] = MergedFile(path, by_path[path].nodes, 0, by_path[path].n_events)
    return Merged(files, state.events, state.calls, copier.notes())


def _check_output(sources: Sequence[Path], output: Path, *, is_replaced: bool) -> None:
    if output.exists() and not output.is_file():
        raise StoreError(f"{output}: not a regular file", hint="choose a new file with -o")
    if output.exists() and not is_replaced:
        raise StoreError(f"{output}: exists already", hint="choose a new file with -o")
    for source in sources:
        check_header(source)
        if output.exists() and output.samefile(source):
            raise BadDataError(f"{output} is one of the sources", hint="choose a new file with -o")
    if output.exists():
        WriterLock(output.resolve()).release()  # refuses when somebody records into it


@contextlib.contextmanager
def _part_beside(output: Path) -> Iterator[Path]:
    """A name for the file while it is not whole; nothing of it stays."""
    part = output.with_name(f"{output.name}.{os.getpid()}.part")
    try:
        yield part
    finally:
        for end in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):  # such as a folder that nobody may write to
                part.with_name(part.name + end).unlink(missing_ok=True)


def _read_source(path: Path, force_node: str) -> MergeSource:
    with open_recording(path) as connection:
        nodes, is_given = _find_nodes(connection, path, force_node)
        given = force_node if is_given else ""
        parts = read_parts(connection, given)
        state = measure(connection)
        (first,) = connection.execute(
            "SELECT min(timestamp) FROM events WHERE typeof(timestamp) = 'integer'"
        ).fetchone()
    return MergeSource(
        path,
        {part: one or state for part, one in parts.items()},
        is_merged=any(one is not None for one in parts.values()),
        nodes=nodes,
        given_node=given,
        first_ns=first or 0,
    )


def _find_nodes(
    source: sqlite3.Connection, path: Path, force_node: str
) -> tuple[tuple[str, ...], bool]:
    """Nodes of a source's rows, and whether the forced one stands for rows without."""
    names: set[str] = set()
    for table in ("events", "sessions"):
        if not names and "node" in table_columns(source, table):
            found = source.execute(f"SELECT DISTINCT node FROM {table}")  # noqa: S608 - own table names
            names = {str(node) for (node,) in found if isinstance(node, str)}
    is_given = "" in (names or {""})
    named = {name or force_node for name in names or {""}}
    if "" in named:
        raise BadDataError(
            f"{path}: its rows carry no node",
            hint="name it with --force-node; files of several such nodes are merged one by one, each with its own name",
        )
    return tuple(sorted(named)), is_given


def _add(copier: Copier, group: MergeGroup) -> dict[Path, MergedFile]:
    """Add one group, or nothing when all of its events are there under another identity."""
    done = {}
    if _is_there(copier, group):
        return {one.path: MergedFile(one.path, one.nodes, 0, one.n_events) for one in group.sources}
    for source in group.sources:
        with open_recording(source.path) as connection, store_errors(source.path):
            connection.execute("BEGIN")  # one state of it, also while an agent writes to it
            copied = copier.copy(connection, source)
        done[source.path] = MergedFile(source.path, source.nodes, *copied)
    copier.end_group(group)
    return done


def _is_there(copier: Copier, group: MergeGroup) -> bool:
    """Whether all events of a group are there; only recordings without an identity can be there unknown.

    Raises:
        BadDataError: Some of them are.
    """
    is_derived = any(part.is_derived for source in group.sources for part in source.parts)
    if not (is_derived or copier.has_derived):
        return False
    n_same = n_rows = 0
    for source in group.sources:
        with open_recording(source.path) as connection, store_errors(source.path):
            same, rows = copier.count_same(connection, source)
            n_same, n_rows = n_same + same, n_rows + rows
    if n_same and n_same < n_rows:
        raise BadDataError(
            f"{group.sources[0].path}: {n_same} of its {n_rows} events are in another of these files, the "
            f"others are not",
            hint="merge the larger one alone, or the files that these were made of",
        )
    return bool(n_same)
