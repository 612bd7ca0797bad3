"""All that a folder holds of a job: dumps of ranks, saved pages of the debug server, stacks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from ingero.errors import BadDataError
from ingero.model.hang import PendingOp, RankState, StoppedGroup, Whereabouts
from ingero.wire.flight_recorder.documents import decode_document, read_file
from ingero.wire.flight_recorder.dumps import ReadDump, decode_dump
from ingero.wire.flight_recorder.pages import split_answers
from ingero.wire.flight_recorder.stacks import find_whereabouts, split_ranks

_RANK_IN_NAME: Final = re.compile(r"(\d+)(?:\.(?:pkl|pickle|json))?$")
_STACK_NAME: Final = re.compile(r"(\d+)\.(?:txt|stack)$")
_PAGES: Final = frozenset({".html", ".htm"})
_DEFAULT_GROUP: Final = "default_pg"
MAX_RANKS: Final = 1_000_000
_MAX_MEMBERS: Final = 4 * MAX_RANKS
"""Of all default communicators: one is as large as a size in a dump says, and a job that begins again has some."""


@dataclass(slots=True)
class _Folder:
    """What was read so far."""

    dumps: dict[int, ReadDump] = field(default_factory=dict)
    whereabouts: dict[int, Whereabouts] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)
    """Ranks that a debug server asked, whether they answered or not."""


def find_dumps(directory: Path) -> dict[int, Path]:
    """Dump files of a directory by rank; the rank is the number that ends the file's name.

    Raises:
        BadDataError: Not a directory, no dump in it, or two files for one rank.
    """
    dumps = _find_dumps(directory)
    if not dumps:
        raise BadDataError(
            f"{directory} holds no Flight Recorder dump",
            hint="names of dumps end in the rank, such as _dump_0; an NCCL job writes them on a timeout with"
            " TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE above 0 (older:"
            " TORCH_NCCL_TRACE_BUFFER_SIZE); for other jobs see docs/guides/hang.md",
        )
    return dumps


def _find_dumps(directory: Path) -> dict[int, Path]:
    if not directory.is_dir():
        raise BadDataError(
            f"{directory} is not a directory",
            hint="give the directory that holds the dumps, one file per rank",
        )
    dumps: dict[int, Path] = {}
    for path in _files(directory):
        match = _RANK_IN_NAME.search(path.name)
        if match is None:
            continue
        rank = int(match[1])
        if rank >= MAX_RANKS:
            continue
        if rank in dumps:
            raise BadDataError(f"{dumps[rank].name} and {path.name} are both of rank {rank}")
        dumps[rank] = path
    return dumps


def _files(directory: Path) -> list[Path]:
    return [p for p in sorted(directory.iterdir()) if p.is_file() and not p.name.startswith(".")]


def read_job(directory: Path, n_ranks: int | None = None) -> list[RankState]:
    """Read every dump, page and stack of a directory.

    Args:
        directory: The directory.
        n_ranks: How many ranks the job has; None when only the directory says it.

    Returns:
        One state per rank with a dump, ascending. Dumps of Gloo do not name the members of a communicator: there the
        default one has every rank, and any other those ranks that used it.

    Raises:
        BadDataError: No dump, two of one rank, one that cannot be read, or more members of communicators than any job
            has; the message names the file or the directory.
    """
    _refuse_partial(directory)
    folder = _Folder()
    pages = (
        [path for path in _files(directory) if path.suffix in _PAGES] if directory.is_dir() else []
    )
    paths = _find_dumps(directory) if pages else find_dumps(directory)
    for rank, path in sorted(paths.items()):
        folder.dumps[rank] = read_dump(path, rank)
    for path in pages:
        _add_page(folder, path)
    if not folder.dumps:
        find_dumps(directory)  # says what is missing
        raise BadDataError(f"{pages[0]}: no rank's recorder is in this page")
    for path in _files(directory):
        if path.suffix in {".txt", ".stack"}:
            _add_stacks(folder, path)
    try:
        return _join(folder, n_ranks)
    except BadDataError as error:
        raise BadDataError(f"{directory}: {error.message}") from error


def _refuse_partial(directory: Path) -> None:
    """A rank whose dump is being written is not silent."""
    partial = next(directory.glob("*.partial"), None) if directory.is_dir() else None
    if partial is not None:
        raise BadDataError(
            f"{partial} is still being written",
            hint="wait a little; remove it if its process has ended",
        )


def read_dump(path: Path, rank: int) -> ReadDump:
    """Read one rank's dump. The file's time of change is taken for the time at which it was written.

    Raises:
        BadDataError: Unreadable, truncated, hostile or not a Flight Recorder dump; the message names the file.
    """
    body = read_file(path)
    return _decode(body, rank, path)


def _decode(body: bytes, rank: int, path: Path) -> ReadDump:
    try:
        return decode_dump(decode_document(body), rank, path.stat().st_mtime_ns)
    except BadDataError as error:
        raise BadDataError(f"{path}: {error.message}") from error


def _add_page(folder: _Folder, path: Path) -> None:
    """A page of the debug server: recorders of all ranks, or their stacks."""
    answers = split_answers(read_file(path).decode(errors="replace"))
    folder.asked.update(rank for rank in answers if rank < MAX_RANKS)
    for rank, body in answers.items():
        if body is None:
            continue
        if not body.lstrip().startswith("{"):
            _note_stack(folder, rank, body)
        elif rank in folder.dumps:
            raise BadDataError(f"{path}: another file of this directory is of rank {rank} too")
        else:
            folder.dumps[rank] = _decode(body.strip().encode(), rank, path)


def _add_stacks(folder: _Folder, path: Path) -> None:
    """A text of stacks: of all ranks under their headings, or of the rank that ends the file's name.

    The debug server writes one text after the other with its time in the name, so the last one by name counts.
    """
    text = read_file(path).decode(errors="replace")
    ranks = split_ranks(text)
    match = _STACK_NAME.search(path.name)
    if not ranks and match is not None:
        ranks = {int(match[1]): text}
    for rank, stack in ranks.items():
        _note_stack(folder, rank, stack)


def _note_stack(folder: _Folder, rank: int, text: str) -> None:
    where = find_whereabouts(text)
    if where is not None:
        folder.whereabouts[rank] = where


def _join(folder: _Folder, n_ranks: int | None) -> list[RankState]:
    """One state per rank, each with the members of the communicators that it used."""
    states = {rank: dump.state for rank, dump in folder.dumps.items()}
    clashing = _find_clashing(states.values())
    gathered = _gather_groups(folder, n_ranks)
    sends_unseen = any(dump.sends_unseen for dump in folder.dumps.values())
    joined = []
    for rank, dump in sorted(folder.dumps.items()):
        groups = {name: gathered[name] for name in dump.used}
        where = folder.whereabouts.get(rank)
        if sends_unseen and where is Whereabouts.OUTSIDE:
            where = None  # a wait for a message that its own code called looks the same
        state = replace(
            dump.state,
            groups={**dump.state.groups, **groups},
            whereabouts=where,
            pending=_drop_answered(dump, folder.dumps),
        )
        joined.append(_rename(state, clashing))
    hides_p2p = any(not state.sees_p2p for state in joined)
    world = gathered.get("")
    return [
        replace(
            state if world is None else _enter_world(state, world, folder.dumps[state.rank]),
            sees_p2p=not hides_p2p,
        )
        for state in joined
    ]


def _drop_answered(dump: ReadDump, dumps: Mapping[int, ReadDump]) -> tuple[PendingOp, ...]:
    """What a rank is in, without operations of a batch that the other side left: another one of the batch holds it.

    Messages between two ranks arrive in their order, so two recorders that forgot nothing say which belong together.
    """
    pending = dump.state.pending
    answered = set[int]()
    for channel, ops in dump.messages.items():
        other = dumps.get(channel[2] if channel[1] == dump.state.rank else channel[1])
        if other is not None and dump.is_complete and other.is_complete:
            theirs = other.messages.get(channel, ())
            answered.update(id(op) for op, their in zip(ops, theirs, strict=False) if their is None)
    kept = tuple(op for op in pending if id(op) not in answered)
    open_batches = {(op.group, op.seq) for op in kept if op.peer is not None}
    return tuple(
        op for op in pending if id(op) not in answered or (op.group, op.seq) not in open_batches
    )


def _enter_world(state: RankState, world: StoppedGroup, dump: ReadDump) -> RankState:
    """The state with the default communicator, of which a rank is a member before it uses it."""
    entered = state.entered
    if dump.is_complete and world.name not in entered:
        entered = {**entered, world.name: 0}  # the first sequence number is 1
    return replace(state, groups={**state.groups, world.name: world}, entered=entered)


def _gather_groups(folder: _Folder, n_ranks: int | None) -> dict[str, StoppedGroup]:
    """Communicators of which no dump names the members, by name; the default one also under the empty name."""
    users: dict[str, set[int]] = {}
    descriptions: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for rank, dump in folder.dumps.items():
        descriptions.update(dump.used)
        for name in dump.used:
            users.setdefault(name, set()).add(rank)
        for name, size in dump.sizes.items():
            sizes[name] = max(size, sizes.get(name, 0))
    gathered = {}
    n_named = 0
    for name, members in users.items():
        n_members = sizes.get(name)
        if descriptions[name] == _DEFAULT_GROUP:
            known = max(n_members or 0, n_ranks or 0, len(folder.asked))
            n_all = min(MAX_RANKS, max(known, *(rank + 1 for rank in folder.dumps)))
            n_named += n_all
            if n_named > _MAX_MEMBERS:
                raise BadDataError(f"default communicators with {n_named} members and more")
            world = StoppedGroup(
                name, tuple(range(n_all)), descriptions[name], is_whole=known == n_all
            )
            gathered[name] = gathered[""] = world
        else:
            ranks = tuple(sorted(members))
            gathered[name] = StoppedGroup(
                name,
                ranks,
                descriptions[name],
                is_whole=n_members is not None and n_members == len(ranks),
            )
    return gathered


def _find_clashing(states: Iterable[RankState]) -> set[str]:
    """Names that stand for different communicators on different ranks, as after ``split_group``."""
    members: dict[str, tuple[int, ...]] = {}
    clashing = set()
    for state in states:
        for name, group in state.groups.items():
            if members.setdefault(name, group.ranks) != group.ranks:
                clashing.add(name)
    return clashing


def _rename(state: RankState, clashing: set[str]) -> RankState:
    """The state with each clashing name made one of its communicator alone."""
    mine = clashing & state.groups.keys()
    if not mine:
        return state
    names = {name: f"{name} {list(state.groups[name].ranks)}" for name in mine}

    def rename(by_name: Mapping[str, int]) -> dict[str, int]:
        return {names.get(name, name): value for name, value in by_name.items()}

    return replace(
        state,
        groups={
            names.get(name, name): replace(group, name=names.get(name, name))
            for name, group in state.groups.items()
        },
        entered=rename(state.entered),
        left=rename(state.left),
        pending=tuple(replace(op, group=names.get(op.group, op.group)) for op in state.pending),
        recorded={names.get(name, name): ops for name, ops in state.recorded.items()},
    )
