"""Reads PyTorch Flight Recorder dumps: one pickle (or JSON document) per rank, opened without running anything in it.

A pickle can name any callable; these dumps need none. The unpickler admits no class at all, so a dump that asks for one
is refused before anything is imported. What is read is bounded by the file's size, which is bounded too.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp (dump keys, version 2.x) as found in dumps of version 2.9;
``torch.distributed`` writes them to ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE`` + rank.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from typing_extensions import override

from ingero.errors import BadDataError
from ingero.model.hang import PendingOp, RankState, StoppedGroup

MAX_DUMP_BYTES: Final = 256 * 1024 * 1024
_RANK_IN_NAME: Final = re.compile(r"(\d+)(?:\.(?:pkl|pickle|json))?$")
_P2P: Final = re.compile(r"(?:send|recv) (\d+)(?:->|<-)(\d+)")


class _NoClasses(pickle.Unpickler):  # noqa: S301 - admits no class, so nothing of the file can run
    """An unpickler of plain values only."""

    @override
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise BadDataError(
            f"the dump asks for {module}.{name}; a Flight Recorder dump holds plain values only"
        )

    @override
    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise BadDataError(
            "the dump refers to data outside itself; a Flight Recorder dump does not"
        )


def find_dumps(directory: Path) -> dict[int, Path]:
    """Dump files of a directory by rank; the rank is the number that ends the file's name.

    Raises:
        BadDataError: Not a directory, no dump in it, or two files for one rank.
    """
    if not directory.is_dir():
        raise BadDataError(
            f"{directory} is not a directory",
            hint="give the directory that holds the dumps, one file per rank",
        )
    dumps: dict[int, Path] = {}
    for path in sorted(directory.iterdir()):
        match = _RANK_IN_NAME.search(path.name)
        if match is None or not path.is_file() or path.name.startswith("."):
            continue
        rank = int(match[1])
        if rank in dumps:
            raise BadDataError(f"{dumps[rank].name} and {path.name} are both of rank {rank}")
        dumps[rank] = path
    if not dumps:
        raise BadDataError(
            f"{directory} holds no Flight Recorder dump",
            hint="their names end in the rank, such as _dump_0; set TORCH_NCCL_DUMP_ON_TIMEOUT=1 and"
            " TORCH_NCCL_TRACE_BUFFER_SIZE to have PyTorch write them",
        )
    return dumps


def read_dump(path: Path, rank: int) -> RankState:
    """Read one rank's dump.

    Raises:
        BadDataError: Unreadable, truncated, hostile or not a Flight Recorder dump; the message names the file.
    """
    try:
        if path.stat().st_size > MAX_DUMP_BYTES:
            raise BadDataError(f"{path}: larger than {MAX_DUMP_BYTES} bytes")
        body = path.read_bytes()
    except OSError as error:
        raise BadDataError(f"{path}: {error.strerror}") from error
    try:
        return _state(_load(body), rank)
    except BadDataError as error:
        raise BadDataError(f"{path}: {error.message}") from error


def _load(body: bytes) -> Mapping[str, Any]:
    try:
        dump = json.loads(body) if body[:1] == b"{" else _NoClasses(io.BytesIO(body)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        raise BadDataError(
            "neither a whole pickle nor a whole JSON document: no dump, cut short, or still being written"
        ) from error
    if not isinstance(dump, dict) or "pg_config" not in dump or "entries" not in dump:
        raise BadDataError("not a Flight Recorder dump: it has no pg_config and entries")
    return dump


def _state(dump: Mapping[str, Any], rank: int) -> RankState:
    try:
        groups = _groups(dump["pg_config"])
        entries = sorted(dump["entries"], key=lambda entry: int(entry["record_id"]))
        names = _names_by_id(entries, groups, dump.get("pg_status") or {})
        is_p2p = {str(entry["process_group"][0]) for entry in entries if entry["is_p2p"]}
        status = {
            names[key]: value
            for key, value in (dump.get("pg_status") or {}).items()
            if key in names
        }
        entered = {
            n: int(s["last_enqueued_collective"]) for n, s in status.items() if n not in is_p2p
        }
        left = {
            n: int(s["last_completed_collective"]) for n, s in status.items() if n not in is_p2p
        }
        pending = tuple(
            _pending(entry, groups) for entry in entries if entry["state"] != "completed"
        )
    except KeyError as error:
        name = str(error.args[0])[:60] if error.args else "?"
        raise BadDataError(
            f"not a Flight Recorder dump as known: nothing is named {name!r}"
        ) from error
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise BadDataError(
            "not a Flight Recorder dump as known: a field is of another kind"
        ) from error
    for op in pending:
        if op.peer is None and op.group not in status:
            entered[op.group] = max(entered.get(op.group, -1), op.seq)
    return RankState(rank, groups, entered, left, pending)


def _groups(config: Mapping[str, Any]) -> dict[str, StoppedGroup]:
    groups = {}
    for name, entry in config.items():
        ranks = entry["ranks"]
        members = json.loads(ranks) if isinstance(ranks, str) else ranks
        groups[str(name)] = StoppedGroup(
            str(name), tuple(int(member) for member in members), str(entry.get("desc", ""))
        )
    return groups


def _names_by_id(
    entries: list[Any], groups: Mapping[str, StoppedGroup], status: Mapping[str, Any]
) -> dict[str, str]:
    """Names of the groups that ``pg_status`` knows by a number of the process.

    Entries name both. A rank without entries names none: groups are numbered in the order they were made and so are
    their names, so both sorted lists correspond when they are of one length and agree with every entry.
    """
    names = {str(entry["pg_id"]): str(entry["process_group"][0]) for entry in entries}
    if len(status) == len(groups) and all(key.isdigit() for key in (*status, *groups)):
        ordered = dict(zip(sorted(status, key=int), sorted(groups, key=int), strict=True))
        if all(ordered.get(key) == name for key, name in names.items()):
            return ordered
    return names


def _pending(entry: Mapping[str, Any], groups: Mapping[str, StoppedGroup]) -> PendingOp:
    group = groups[str(entry["process_group"][0])]
    name = str(entry["profiling_name"])
    created = entry.get("time_created_ns")
    entered_wall_ns = int(created) if created is not None else None
    if not entry["is_p2p"]:
        return PendingOp(group.name, int(entry["collective_seq_id"]), name, None, entered_wall_ns)
    match = _P2P.search(name)
    if match is None:
        raise ValueError(f"point-to-point operation without its sides: {name!r}")
    other = group.ranks[int(match[2])]
    return PendingOp(group.name, int(entry["p2p_seq_id"]), name, other, entered_wall_ns)
