"""Kernel records of collectives and synchronisations to rows that Fleet can compare.

A host probe sees when a collective was *enqueued*. When it was over is known once the host has waited for its stream:
the return of the first synchronisation of that stream, event or device that began after the enqueue. Of a process with
several devices a wait for one of them, or for its default stream, ends nothing of another, where the threads that
enqueued and waited are known to have had different ones. Such rows have
the clock ``sync``; rows whose end nobody waited for have ``enqueue`` and no end, and convict nobody.

Gloo's calls return when they are over, so that their end needs no synchronisation. Their communicators are named by
their place in the job's store, which two jobs may have in common: `CollectiveTracker.note_job` tells jobs apart.

Own time is what the host spent since it left its previous operation with others, or the synchronisation that ended one.
An operation on a stream of its own, whose end is known because the stream that the host waits for waits for that one,
has none: it begins on the device when the work before it is over, not when the host enqueues it.

Lossy: operations on communicators whose identity is not known, made before the probes or never asked for
(`CollectiveTracker.n_unknown`), and point-to-point operations, which have no sequence number, are not reported; what
was spent in them is nobody's own time all the same. Rows beyond `MAX_PENDING` whose end is not waited for go out as
``enqueue``, and so do those whose process ended before it waited. How far a process is, is known on
`ingero.agent.collectives.newest.MAX_COMMUNICATORS` communicators, those that it used last.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np

from ingero.agent.capture.kernel.abi import Flag
from ingero.agent.collectives.newest import put_newest
from ingero.agent.collectives.pace import Pace
from ingero.agent.collectives.stream_order import StreamOrder
from ingero.agent.collectives.waits import EVERY_STREAM, WAIT, end_rows
from ingero.model.arrays import IntArray, Records
from ingero.model.collectives import COLLECTIVE_OP, UNKNOWN_NS, ClockKind, CollectiveOp
from ingero.model.events import CudaOp, DriverOp, NcclOp, Source
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.collectives import MAX_DURATION_NS

SETTLE_NS: Final = 100 * NS_PER_MS
"""How long a record waits for older ones of other rings, which are read one after the other."""
ENQUEUE_AFTER_NS: Final = 2 * NS_PER_S
"""A collective whose end is not known this long after later ones ended goes out without it."""
MAX_PENDING: Final = 4096
_N_OPS: Final = 64


class _Act(IntEnum):
    RECORD = 1
    ORDER = 2
    WAIT_STREAM = 3
    WAIT_EVENT = 4
    WAIT_DEVICE = 5


_FOLLOWED: Final = np.zeros((256, _N_OPS), np.uint8)
"""By source and operation of a call: what it means for streams; 0 nothing."""
for _source, _call, _act in (
    (Source.CUDA, CudaOp.EVENT_RECORD, _Act.RECORD),
    (Source.CUDA, CudaOp.STREAM_WAIT_EVENT, _Act.ORDER),
    (Source.CUDA, CudaOp.STREAM_SYNC, _Act.WAIT_STREAM),
    (Source.DRIVER, DriverOp.STREAM_SYNC, _Act.WAIT_STREAM),
    (Source.CUDA, CudaOp.EVENT_SYNC, _Act.WAIT_EVENT),
    (Source.DRIVER, DriverOp.EVENT_SYNC, _Act.WAIT_EVENT),
    (Source.CUDA, CudaOp.DEVICE_SYNC, _Act.WAIT_DEVICE),
    (Source.DRIVER, DriverOp.CTX_SYNC, _Act.WAIT_DEVICE),
):
    _FOLLOWED[_source, _call] = _act

_OPS: Final = np.zeros(_N_OPS, np.uint8)
for _nccl, _op in (
    (NcclOp.ALL_REDUCE, CollectiveOp.ALL_REDUCE),
    (NcclOp.ALL_GATHER, CollectiveOp.ALL_GATHER),
    (NcclOp.REDUCE_SCATTER, CollectiveOp.REDUCE_SCATTER),
    (NcclOp.BROADCAST, CollectiveOp.BROADCAST),
    (NcclOp.REDUCE, CollectiveOp.REDUCE),
    (NcclOp.ALL_TO_ALL, CollectiveOp.ALL_TO_ALL),
    (NcclOp.BARRIER, CollectiveOp.BARRIER),
):
    _OPS[_nccl] = _op

_COLLECTIVES: Final = (*np.flatnonzero(_OPS).tolist(), NcclOp.GATHER, NcclOp.SCATTER)
_UNNUMBERED: Final = (NcclOp.SEND, NcclOp.RECV)
_SOURCES: Final = (Source.NCCL, Source.GLOO)  # the numbers of their operations are the same

ROW: Final = np.dtype([
    ("pid", "<u4"),
    ("comm_hash", "<u8"),
    ("comm_rank", "<i4"),
    ("n_ranks", "<i4"),
    ("stream", "<i8"),
    ("device", "<i4"),
    ("entry_ns", "<i8"),
    ("exit_ns", "<i8"),
    ("leave_ns", "<i8"),
    ("seq", "<u8"),
    ("n_bytes", "<i8"),
    ("op", "u1"),
    ("is_told", "?"),
    ("is_ordered", "?"),
])
"""One operation of one process with others; ``leave_ns`` is UNKNOWN_NS until its end is known. Monotonic clock.

One that is not reported has no sequence or no known communicator; it ends what its process did by itself. The end of
one that is ordered is known from a wait for another stream."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Consecutive rows of one process on one communicator.

    Attributes:
        pid: The process.
        comm: Communicator id hash, 16 digits.
        comm_rank: Its rank there.
        n_ranks: Members.
        clock: What the ends were read from.
        ops: Rows of COLLECTIVE_OP with entries on the monotonic clock, shape (n,).
    """

    pid: int
    comm: str
    comm_rank: int
    n_ranks: int
    clock: ClockKind
    ops: Records


@dataclass(slots=True)
class CommPosition:
    """How far one process is on one communicator.

    Attributes:
        comm_rank: Its rank there.
        n_ranks: Members.
        entered: Last sequence number it entered.
        left: Last one that it is known to have left; None when none.
        entry_ns: When it entered the last one.
        op: What that was.
        pace: What usually lies between two entries.
    """

    comm_rank: int
    n_ranks: int
    entered: int
    left: int | None
    entry_ns: int
    op: CollectiveOp
    pace: Pace = field(default_factory=Pace)


@dataclass(slots=True)
class _Process:
    pending: Records = field(default_factory=lambda: np.zeros(0, ROW))
    host_free_ns: int = UNKNOWN_NS
    order: StreamOrder = field(default_factory=StreamOrder)
    positions: dict[str, CommPosition] = field(default_factory=dict)
    several: set[int] = field(default_factory=set)


class CollectiveTracker:
    """Takes kernel records in the order of the rings, gives finished rows. One thread at a time.

    Attributes:
        n_unknown: Collectives on communicators whose identity is not known.
        n_unsynced: Rows that went out without an end.
    """

    def __init__(self) -> None:
        self.n_unknown = 0
        self.n_unsynced = 0
        self._rows: list[Records] = []
        self._waits: list[Records] = []
        self._processes: dict[int, _Process] = {}
        self._jobs: dict[int, int] = {}
        self._unknown: dict[int, bool] = {}
        self._destroyed: list[tuple[int, str, int]] = []
        self._replaced: dict[int, int] = {}

    def add_collectives(self, records: Records) -> None:
        """Take ``struct ig_collective`` records, shape (n,); what a collective calls inside is the same one again."""
        # By the flag, not the code: on a communicator that does not block most return ncclInProgress.
        records = records[(records["flags"] & (Flag.NESTED | Flag.ERROR)) == 0]
        self._note_destroyed(records)
        records = records[np.isin(records["op"], (*_COLLECTIVES, *_UNNUMBERED))]
        if not len(records):
            return
        is_numbered = records["seq"] > 0
        is_known = (records["comm_hash"] != 0) & (records["rank"] >= 0) & (records["nranks"] > 0)
        self._note_unknown(records[~(is_numbered & is_known)])
        rows = np.zeros(len(records), ROW)
        rows["is_told"] = is_numbered & is_known
        for name in ("pid", "comm_hash", "seq", "device"):
            rows[name] = records[name]
        rows["comm_rank"], rows["n_ranks"] = records["rank"], records["nranks"]
        rows["stream"] = records["stream"].astype(np.int64)
        rows["entry_ns"] = records["header"]["mono_ns"]
        rows["exit_ns"] = rows["entry_ns"] + records["duration_ns"].astype(np.int64)
        is_gloo = records["source"] == Source.GLOO
        rows["comm_hash"][is_gloo] ^= self._find_jobs(records["pid"][is_gloo])
        rows["leave_ns"] = np.where(is_gloo, rows["exit_ns"], UNKNOWN_NS)
        rows["n_bytes"] = records["bytes"]
        # Most options of Gloo hold buffers, not sizes: what is not known is not nothing.
        is_sized = (records["bytes"] > 0) | (records["op"] == NcclOp.BARRIER) | ~is_gloo
        rows["n_bytes"][~is_sized] = UNKNOWN_NS
        rows["op"] = _OPS[np.minimum(records["op"], len(_OPS) - 1)]
        self._rows.append(rows)

    def _note_destroyed(self, records: Records) -> None:
        is_it = (records["source"] == Source.NCCL) & (records["op"] == NcclOp.COMM_DESTROY)
        for one in records[is_it & (records["comm_hash"] != 0)]:
            ended_ns = int(one["header"]["mono_ns"]) + int(one["duration_ns"])
            self._destroyed.append((int(one["pid"]), f"{int(one['comm_hash']):016x}", ended_ns))

    def _leave_destroyed(self, settled_ns: int) -> None:
        """A communicator is destroyed once all on it is over, and nobody can wait for it any more."""
        for pid, name, _ in (one for one in self._destroyed if one[2] <= settled_ns):
            position = self.positions(pid).get(name)
            if position is not None:
                position.left = position.entered
        self._destroyed = [one for one in self._destroyed if one[2] > settled_ns]

    def _note_unknown(self, records: Records) -> None:
        """Count collectives that cannot be reported. Of Gloo that is one at most: its group is met by the next."""
        records = records[~np.isin(records["op"], _UNNUMBERED)]
        self.n_unknown += len(records)
        for pid in np.unique(records["pid"][records["source"] == Source.NCCL]).tolist():
            self._unknown.setdefault(pid, False)

    def take_unknown(self) -> list[int]:
        """Processes with collectives on communicators of NCCL whose identity is not known, each process once."""
        found = [pid for pid, is_taken in self._unknown.items() if not is_taken]
        self._unknown.update(dict.fromkeys(found, True))
        return found

    def note_job(self, pid: int, number: int) -> None:
        """The job of a process, as a number of 64 bits that its members have in common and no other job has."""
        self._jobs[pid] = number

    def _find_jobs(self, pids: Records) -> Records:
        return np.array([self._jobs.get(pid, 0) for pid in pids.tolist()], np.uint64)

    def note_inside(self, frames: Records) -> None:
        """Take calls that have not returned, of ``Engine.read_in_flight``: a collective that blocks was entered too."""
        inside = frames[np.isin(frames["frame"]["source"], _SOURCES) & (frames["frame"]["seq"] > 0)]
        for pid, frame in zip(inside["pid"].tolist(), inside["frame"], strict=True):
            comm_hash = int(frame["comm_hash"])
            if frame["source"] == Source.GLOO:
                comm_hash ^= self._jobs.get(pid, 0)
            position = self.positions(pid).get(f"{comm_hash:016x}")
            seq, entry_ns = int(frame["seq"]), int(frame["entry_ns"])
            if position is not None and seq > position.entered:
                position.pace.add(entry_ns - position.entry_ns, seq - position.entered)
                position.entered, position.entry_ns = seq, entry_ns

    def add_calls(self, records: Records) -> None:
        """Take ``struct ig_call`` records, shape (n,): what waits for a stream, an event or a device."""
        records = records[((records["flags"] & Flag.NESTED) == 0) & (records["rc"] == 0)]
        records = records[_FOLLOWED[records["source"], np.minimum(records["op"], _N_OPS - 1)] > 0]
        if not len(records):
            return
        # By the begin of each call: a wait has its record when it returns, and means what was there when it began.
        records = records[np.argsort(records["header"]["mono_ns"], kind="stable")]
        acts = _FOLLOWED[records["source"], records["op"]].tolist()
        begins = records["header"]["mono_ns"].astype(np.int64)
        ends = (begins + records["duration_ns"].astype(np.int64)).tolist()
        columns = (records[name].tolist() for name in ("pid", "device", "handle"))
        streams = records["stream"].astype(np.int64).tolist()
        waits: list[tuple[int, int, int, int, int, bool]] = []
        for act, begin_ns, end_ns, pid, device, event, stream in zip(
            acts, begins.tolist(), ends, *columns, streams, strict=True
        ):
            order = self._process(pid).order
            if act == _Act.RECORD:
                order.record(event, stream, begin_ns)
            elif act == _Act.ORDER:
                order.order(stream, event, begin_ns)
            elif act == _Act.WAIT_DEVICE:
                waits.append((pid, EVERY_STREAM, device, begin_ns, end_ns, False))
            else:
                is_stream = act == _Act.WAIT_STREAM
                mark = (stream, begin_ns) if is_stream else order.find_mark(event, begin_ns)
                if mark is None:
                    continue
                for one, upto_ns in order.find_ended(*mark):
                    is_ordered = one != mark[0]
                    known = device if is_stream and not is_ordered else -1
                    waits.append((pid, one, known, upto_ns, end_ns, is_ordered))
        if waits:
            self._waits.append(np.array(waits, WAIT))

    def _process(self, pid: int) -> _Process:
        return self._processes.setdefault(pid, _Process())

    def note_exec(self, pid: int, at_ns: int) -> None:
        """A process became another program, with other communicators and streams; when, on the monotonic clock."""
        self._replaced[pid] = at_ns

    def forget(self, pid: int) -> None:
        """The process ended."""
        self._replaced.pop(pid, None)
        self._processes.pop(pid, None)
        self._jobs.pop(pid, None)
        self._unknown.pop(pid, None)

    def positions(self, pid: int) -> dict[str, CommPosition]:
        """How far a process is, by communicator."""
        known = self._processes.get(pid)
        return {} if known is None else known.positions

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that made collectives or synchronised."""
        return tuple(self._processes)

    def take(self, mono_ns: int, ended: Collection[int] | None = ()) -> list[Finished]:
        """Rows that are complete by now, in the order each process entered them.

        Args:
            mono_ns: Now.
            ended: Processes of which no more records come: what has no end by now goes out without one. None: all.
        """
        settled_ns = mono_ns - SETTLE_NS
        rows = self._take_settled(self._rows, settled_ns, ended, ROW)
        waits = self._take_settled(self._waits, settled_ns, ended, WAIT)
        replaced = {pid for pid, at_ns in self._replaced.items() if at_ns <= settled_ns}
        known = self._processes.keys()
        known_ended = known if ended is None else known & (replaced | set(ended))
        finished: list[Finished] = []
        for pid in {int(pid) for part in (rows, waits) for pid in part["pid"]} | known_ended:
            process = self._process(pid)
            fresh = rows[rows["pid"] == pid]
            _keep_one_rank(process, fresh)
            self._note_entries(process, fresh[fresh["is_told"]])
            pending = np.concatenate([process.pending, fresh])
            pending = pending[np.argsort(pending["entry_ns"], kind="stable")]
            end_rows(pending, waits[waits["pid"] == pid])
            is_over = ended is None or pid in ended or pid in replaced
            done, process.pending = (
                (pending, pending[:0]) if is_over else _split_done(pending, settled_ns)
            )
            if len(done):
                finished += self._finish(pid, process, done)
        self._leave_destroyed(settled_ns)
        for pid in replaced:
            self._begin_again(pid)
        return finished

    def _begin_again(self, pid: int) -> None:
        """With nothing of the program that a process was before, but how far it came."""
        del self._replaced[pid]
        positions = self.positions(pid)
        for position in positions.values():
            position.left = position.entered
        if pid in self._processes:
            self._processes[pid] = _Process(positions=positions)

    @staticmethod
    def _take_settled(
        parts: list[Records], until_ns: int, ended: Collection[int] | None, dtype: np.dtype[Any]
    ) -> Records:
        """Cut what returned by ``until_ns``, or is of a process that ended, out of a list of records, oldest first."""
        if not parts:
            return np.zeros(0, dtype)
        table = np.concatenate(parts)
        is_settled = np.ones(len(table), bool)
        if ended is not None:
            is_settled = (table["exit_ns"] <= until_ns) | np.isin(table["pid"], list(ended))
        parts[:] = [table[~is_settled]] if not is_settled.all() else []
        table = table[is_settled]
        ordered: Records = table[np.argsort(table["entry_ns"], kind="stable")]
        return ordered

    @staticmethod
    def _note_entries(known: _Process, rows: Records) -> None:
        for comm_hash in np.unique(rows["comm_hash"]):
            mine = rows[rows["comm_hash"] == comm_hash]
            last, name = mine[-1], f"{int(comm_hash):016x}"
            before = known.positions.get(name)
            entry_ns, entered = int(last["entry_ns"]), int(last["seq"])
            pace = Pace() if before is None else before.pace
            if before is not None:
                pace.add(entry_ns - before.entry_ns, entered - before.entered)
            position = CommPosition(
                int(last["comm_rank"]),
                int(last["n_ranks"]),
                entered,
                None if before is None else before.left,
                entry_ns,
                CollectiveOp(int(last["op"])),
                pace,
            )
            put_newest(known.positions, name, position)
        if known.several:
            known.several &= {int(name, 16) for name in known.positions}

    def _finish(self, pid: int, known: _Process, done: Records) -> list[Finished]:
        """Rows of COLLECTIVE_OP, cut where the communicator's clock changes."""
        own_ns, known.host_free_ns = own_times(done, known.host_free_ns)
        own_ns[done["is_ordered"]] = UNKNOWN_NS
        own_ns, done = own_ns[done["is_told"]], done[done["is_told"]]
        ops = np.zeros(len(done), COLLECTIVE_OP)
        for name in ("seq", "entry_ns", "n_bytes", "op"):
            ops[name] = done[name]
        is_ended = done["leave_ns"] >= 0
        self.n_unsynced += int((~is_ended).sum())
        inside_ns = np.where(is_ended, done["leave_ns"] - done["entry_ns"], UNKNOWN_NS)
        for name, times in (("inside_ns", inside_ns), ("own_ns", own_ns)):
            ops[name] = np.where(times <= MAX_DURATION_NS, times, UNKNOWN_NS)
        finished = []
        for comm_hash in np.unique(done["comm_hash"]):
            name = f"{int(comm_hash):016x}"
            mine = done["comm_hash"] == comm_hash
            for clock, is_it in ((ClockKind.SYNC, is_ended), (ClockKind.ENQUEUE, ~is_ended)):
                which = np.flatnonzero(mine & is_it)
                if not which.size:
                    continue
                last = done[which[-1]]
                position = known.positions.get(name)
                if clock is ClockKind.SYNC and position is not None:
                    position.left = max(position.left or 0, int(last["seq"]))
                finished.append(
                    Finished(
                        pid, name, int(last["comm_rank"]), int(last["n_ranks"]), clock, ops[which]
                    )
                )
        return finished


def _keep_one_rank(known: _Process, rows: Records) -> None:
    """Let a process that is several ranks of one communicator, one for each of its GPUs, speak as the lowest of them.

    Of each operation the row that was entered first stays: before it is what the process did by itself.
    """
    for comm_hash in np.unique(rows["comm_hash"][rows["is_told"]]).tolist():
        mine = np.flatnonzero(rows["is_told"] & (rows["comm_hash"] == comm_hash))
        before = known.positions.get(f"{comm_hash:016x}")
        ranks = rows["comm_rank"][mine]
        if before is not None:
            ranks = np.append(ranks, before.comm_rank)
        if comm_hash not in known.several and (ranks == ranks[0]).all():
            continue
        known.several.add(comm_hash)
        _, first = np.unique(rows["seq"][mine], return_index=True)
        is_first = np.zeros(len(mine), bool)
        is_first[first] = True
        if before is not None:
            is_first &= rows["seq"][mine] > before.entered
        rows["is_told"][mine], rows["comm_rank"][mine] = is_first, ranks.min()


def _split_done(pending: Records, now_ns: int) -> tuple[Records, Records]:
    """What can go out: everything before the first row that may still end."""
    is_ended = pending["leave_ns"] >= 0
    if not len(pending) or is_ended.all():
        return pending, pending[:0]
    later_end = np.flatnonzero(is_ended)
    is_left_behind = np.zeros(len(pending), bool)
    if later_end.size:
        is_left_behind[: later_end[-1]] = True
    is_hopeless = is_left_behind & (now_ns - pending["exit_ns"] > ENQUEUE_AFTER_NS)
    is_hopeless[: max(len(pending) - MAX_PENDING, 0)] = True
    is_out = is_ended | is_hopeless
    first_kept = len(pending) if is_out.all() else int(np.argmin(is_out))
    return pending[:first_kept], pending[first_kept:]


def own_times(rows: Records, host_free_ns: int) -> tuple[IntArray, int]:
    """Time before each row, and when the last of them was left.

    Args:
        rows: With ``entry_ns``, ``exit_ns`` and ``leave_ns`` on one clock, by entry; at least one.
        host_free_ns: When what came before them was left; UNKNOWN_NS when that is not known.
    """
    entry_ns = rows["entry_ns"].astype(np.int64)
    leaves = np.unique(rows["leave_ns"][rows["leave_ns"] >= 0])
    exits = np.maximum.accumulate(rows["exit_ns"].astype(np.int64))
    free_ns = np.concatenate([[host_free_ns], exits[:-1]])
    at = np.searchsorted(leaves, entry_ns, "right") - 1
    if leaves.size:
        left = np.where(at >= 0, leaves[np.maximum(at, 0)], UNKNOWN_NS)
        free_ns = np.maximum(free_ns, left)
    own_ns = np.where(free_ns < 0, UNKNOWN_NS, np.maximum(entry_ns - free_ns, 0))
    last_ns = max(int(exits[-1]), int(leaves[-1]) if leaves.size else UNKNOWN_NS)
    return own_ns, last_ns
