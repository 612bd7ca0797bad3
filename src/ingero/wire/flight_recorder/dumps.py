"""What one dump says of its rank.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and FlightRecorderDetail.hpp (keys of version 2.x), as found in
dumps of NCCL jobs of version 2.9 and of Gloo jobs of version 2.10 (PyTorch 2.13.0).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ingero.errors import BadDataError
from ingero.model.hang import PendingOp, RankState, RecordedOp, StoppedGroup
from ingero.units import NS_PER_MS

_P2P: Final = re.compile(r"(?:send|recv) (\d+)(?:->|<-)(\d+)")
_GLOO: Final = "gloo:"
_BATCH_END: Final = "coalesced"
_EQUAL_SIZES: Final = frozenset({
    "all_reduce", "all_reduce_barrier", "barrier", "broadcast", "reduce", "_all_gather_base", "_reduce_scatter_base",
})  # fmt: skip
"""Collectives to which every member brings as much; ``all_gather`` of NCCL takes lists of uneven tensors."""
_WHOLE: Final = frozenset({"all_gather", "_all_gather_base"})
"""Collectives whose output is their input times the size of the group."""
_MAX_DIMENSIONS: Final = 64
"""Of a tensor. Source: kDimVectorStaticSize and TensorIterator of PyTorch allow no more in an operation."""


Channel: TypeAlias = tuple[str, int, int]
"""Name of a communicator, and the global ranks that send and receive."""


@dataclass(frozen=True, slots=True)
class ReadDump:
    """One dump.

    Attributes:
        state: The rank. ``groups`` holds those of which the dump names the members.
        used: What the job calls each communicator that the rank used, by the communicator's name.
        sizes: How many members a communicator has, by its name, where sizes of an operation say it.
        is_complete: Whether the recorder still holds all that it recorded.
        sends_unseen: Whether the rank entered point-to-point operations that were not recorded.
        messages: Point-to-point operations in their order, by communicator, sender and receiver: each where it is
            pending, None where the rank left it.
    """

    state: RankState
    used: Mapping[str, str]
    sizes: Mapping[str, int]
    is_complete: bool = False
    sends_unseen: bool = False
    messages: Mapping[Channel, tuple[PendingOp | None, ...]] = field(default_factory=dict)


def decode_dump(dump: Mapping[str, Any], rank: int, read_wall_ns: int | None) -> ReadDump:
    """Read the mapping that `documents.decode_document` returned.

    Args:
        dump: The mapping.
        rank: Whose it is; a dump does not say.
        read_wall_ns: When it was written, on the rank's wall clock; None when unknown.

    Raises:
        BadDataError: A field is missing or of another kind.
    """
    try:
        return _decode(dump, rank, read_wall_ns)
    except KeyError as error:
        name = str(error.args[0])[:60] if error.args else "?"
        found = dump.get("version")
        version = found[:12] if isinstance(found, str) else "?"
        raise BadDataError(
            f"not a Flight Recorder dump as known: nothing is named {name!r}"
            f" (its version is {version!r}; 2.3 to 2.10 are read)"
        ) from error
    except (
        TypeError,
        ValueError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise BadDataError(
            "not a Flight Recorder dump as known: a field is of another kind"
        ) from error


def _decode(dump: Mapping[str, Any], rank: int, read_wall_ns: int | None) -> ReadDump:
    found = sorted(dump.get("entries") or (), key=lambda entry: int(entry["record_id"]))
    is_complete = not found or int(found[0]["record_id"]) == 0
    entries = _settle_batches(found, is_complete=is_complete)
    groups = _groups(dump["pg_config"])
    used = {
        _text(e["process_group"][0]): _text(e["process_group"][1])
        for e in entries
        if _text(e["process_group"][0]) not in groups
    }
    status = _status_by_name(entries, groups, dump.get("pg_status") or {})
    recorded = _recorded(entries)
    p2p = {_text(entry["process_group"][0]) for entry in entries if entry["is_p2p"]}
    gloo = {
        _text(e["process_group"][0])
        for e in entries
        if _text(e["profiling_name"]).startswith(_GLOO)
    }
    entered = {n: int(s["last_enqueued_collective"]) for n, s in status.items() if n not in p2p}
    left = {n: int(s["last_completed_collective"]) for n, s in status.items() if n not in p2p}
    for name in gloo:  # its status counts point-to-point operations too, its entries do not
        entered[name] = max(recorded[name])
        left[name] = _last_left(recorded[name])
    for name in p2p & recorded.keys() - gloo:  # its status counts both kinds with one number
        entered[name] = max(recorded[name])
        left[name] = _last_left(recorded[name])
    open_ops = {int(e["record_id"]): _pending(e, groups) for e in entries if not _is_finished(e)}
    pending = tuple(open_ops.values())
    for op in pending:
        if op.peer is None and op.group not in status and op.group not in gloo:
            entered[op.group] = max(entered.get(op.group, -1), op.seq)
    state = RankState(
        rank=rank,
        groups=groups,
        entered=entered,
        left=left,
        pending=pending,
        recorded=recorded,
        sees_p2p=not gloo,
        read_wall_ns=read_wall_ns,
    )
    sends_unseen = any(_hides_p2p(entry) for entry in entries)
    messages = _messages(entries, groups, open_ops)
    return ReadDump(state, used, _sizes(entries), is_complete, sends_unseen, messages)


def _settle_batches(entries: Sequence[Any], *, is_complete: bool) -> list[Any]:
    """The entries, with operations of a batch in the state of the batch, and without ends of point-to-point batches.

    NCCL gives the operations of a batch entries that stay "scheduled", and then the batch one that has its state, under
    the sequence numbers of both kinds that they have. Whether that end is a point-to-point one differs among backends.

    Args:
        entries: In their order.
        is_complete: Whether the first of them is the first that was recorded. Where it is not, it may be the end of a
            batch whose operations are forgotten, and then says nothing.
    """
    settled: list[Any] = []
    batches: dict[tuple[str, int, int], list[int]] = {}
    for entry in entries:
        group = _text(entry["process_group"][0])
        key = group, int(entry["collective_seq_id"]), int(entry.get("p2p_seq_id", 0))
        if not _text(entry["profiling_name"]).endswith(_BATCH_END):
            batches.setdefault(key, []).append(len(settled))
            settled.append(entry)
            continue
        members = batches.pop(key, [])
        is_p2p = bool(entry["is_p2p"]) or any(settled[i]["is_p2p"] for i in members)
        for i in members:
            settled[i] = {**settled[i], "state": entry["state"]}
        is_forgotten = not is_complete and entry is entries[0]
        if not is_p2p and not is_forgotten:
            settled.append(entry)
    return settled


def _groups(config: Mapping[str, Any]) -> dict[str, StoppedGroup]:
    """Communicators whose members are named. Gloo writes one, without a name and without members."""
    groups = {}
    for name, entry in config.items():
        ranks = entry["ranks"]
        members = json.loads(ranks) if isinstance(ranks, str) else ranks
        if members:
            groups[str(name)] = StoppedGroup(
                str(name), tuple(int(member) for member in members), _text(entry.get("desc", ""))
            )
    return groups


def _status_by_name(
    entries: list[Any], groups: Mapping[str, StoppedGroup], status: Mapping[str, Any]
) -> dict[str, Any]:
    """``pg_status``, which knows groups by a number of the process, by their names.

    Entries name both. A rank without entries names none: groups are numbered in the order they were made and so are
    their names, so both sorted lists correspond when they are of one length and agree with every entry.
    """
    names = {_text(entry["pg_id"]): _text(entry["process_group"][0]) for entry in entries}
    if len(status) == len(groups) and all(key.isdigit() for key in (*status, *groups)):
        ordered = dict(zip(sorted(status, key=int), sorted(groups, key=int), strict=True))
        if all(ordered.get(key) == name for key, name in names.items()):
            names = ordered
    return {names[key]: value for key, value in status.items() if key in names}


def _text(value: object) -> str:
    """A value as text; a container could be far longer as text than the dump is."""
    if isinstance(value, list | tuple | dict):
        raise TypeError("a container where a text belongs")
    return str(value)


def _is_finished(entry: Mapping[str, Any]) -> bool:
    """Whether the rank left it. Gloo records no events: an operation stays "scheduled" and is retired when it ends."""
    if _text(entry["profiling_name"]).startswith(_GLOO):
        return bool(entry["retired"])
    return bool(entry["state"] == "completed")


def _last_left(ops: Mapping[int, RecordedOp]) -> int:
    """The last sequence number before which all that is recorded was left."""
    open_seqs = [seq for seq, op in ops.items() if not op.is_finished]
    return min(open_seqs) - 1 if open_seqs else max(ops)


def _pending(entry: Mapping[str, Any], groups: Mapping[str, StoppedGroup]) -> PendingOp:
    group = _text(entry["process_group"][0])
    name = _text(entry["profiling_name"])
    entered_wall_ns = int(entry["time_created_ns"]) if entry.get("time_created_ns") else None
    if not entry["is_p2p"]:
        return PendingOp(group, int(entry["collective_seq_id"]), name, None, entered_wall_ns)
    other = groups[group].ranks[_sides(name)[1]]
    return PendingOp(group, int(entry["p2p_seq_id"]), name, other, entered_wall_ns)


def _sides(name: str) -> tuple[int, int]:
    """Who recorded a point-to-point operation and who is on its other side, both as ranks of the communicator."""
    match = _P2P.search(name)
    if match is None:
        raise ValueError(f"point-to-point operation without its sides: {name!r}")
    return int(match[1]), int(match[2])


def _messages(
    entries: list[Any], groups: Mapping[str, StoppedGroup], open_ops: Mapping[int, PendingOp]
) -> dict[Channel, tuple[PendingOp | None, ...]]:
    found: dict[Channel, list[PendingOp | None]] = {}
    for entry in entries:
        group = _text(entry["process_group"][0])
        if entry["is_p2p"] and group in groups:
            name = _text(entry["profiling_name"])
            own, other = (groups[group].ranks[rank] for rank in _sides(name))
            channel = (group, own, other) if "->" in name else (group, other, own)
            found.setdefault(channel, []).append(open_ops.get(int(entry["record_id"])))
    return {channel: tuple(ops) for channel, ops in found.items()}


def _recorded(entries: list[Any]) -> dict[str, dict[int, RecordedOp]]:
    """Collectives by group and sequence number. Several entries of one number were launched as one."""
    found: dict[str, dict[int, RecordedOp]] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        seq = int(entry["collective_seq_id"])
        ops = found.setdefault(_text(entry["process_group"][0]), {})
        op = _recorded_op(entry)
        ops[seq] = op if seq not in ops else _merge(ops[seq], op)
    return found


def _recorded_op(entry: Mapping[str, Any]) -> RecordedOp:
    kind = _text(entry["profiling_name"]).rpartition(":")[2].replace("all_to_allv", "all_to_all")
    dtypes = entry.get("input_dtypes") or ()
    return RecordedOp(
        kind=kind,
        elements=_elements(entry["input_sizes"]) if kind in _EQUAL_SIZES else None,
        dtype=_text(dtypes[0]) if dtypes and kind in _EQUAL_SIZES else "",
        is_finished=_is_finished(entry),
        entered_wall_ns=int(entry["time_created_ns"]) if entry.get("time_created_ns") else None,
        timeout_ns=int(entry["timeout_ms"]) * NS_PER_MS if entry.get("timeout_ms") else None,
    )


def _merge(first: RecordedOp, second: RecordedOp) -> RecordedOp:
    """Operations launched as one; a group of them names them in an order of its own, so only that it is one counts."""
    return RecordedOp(
        "coalesced",
        None,
        "",
        first.is_finished and second.is_finished,
        first.entered_wall_ns,
        first.timeout_ns,
    )


def _elements(sizes: Iterable[Sequence[int]]) -> int:
    return sum(_product(shape) for shape in sizes)


def _product(shape: Sequence[int]) -> int:
    """Elements of one tensor; the product of very many numbers takes for ever."""
    if len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    return math.prod(int(extent) for extent in shape)


def _sizes(entries: list[Any]) -> dict[str, int]:
    """How many members a communicator has: the output of an all-gather is its input times that."""
    found: dict[str, int] = {}
    for entry in entries:
        if _text(entry["profiling_name"]).rpartition(":")[2] in _WHOLE:
            brought, got = _elements(entry["input_sizes"]), _elements(entry["output_sizes"])
            if brought and got % brought == 0:
                found[_text(entry["process_group"][0])] = got // brought
    return found


def _hides_p2p(entry: Mapping[str, Any]) -> bool:
    """Whether the group ran more than its collectives: Gloo numbers point-to-point operations and records none."""
    is_gloo = _text(entry["profiling_name"]).startswith(_GLOO)
    return is_gloo and int(entry.get("op_id", 0)) > int(entry["collective_seq_id"])
