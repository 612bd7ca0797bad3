"""NCCL: communicators, collectives, point-to-point, groups.

Source: prototypes of ``nccl.h`` 2.32 (older releases have the same for what they have). ``ncclUniqueId`` is 128 bytes
by
value: on x86-64 it lies on the stack, so the rank that follows it is the *third* integer argument.
"""

from __future__ import annotations

import functools
from typing import Final

from ingero.agent.capture.kernel.abi import Act
from ingero.agent.capture.symbols.table import Function
from ingero.model.events import NcclOp, Source


def _row(op: NcclOp, name: str, prototype: str, *, act: Act = Act.NONE, **roles: str) -> Function:
    return Function(name, Source.NCCL, op, prototype, roles, act)


def _collective(op: NcclOp, name: str, prototype: str, **roles: str) -> tuple[Function, ...]:
    """A collective and, from NCCL 2.31 on, its twin that takes a configuration."""
    arguments = {"count": "count", "dtype": "dtype", "comm": "comm", "stream": "stream", **roles}
    return (
        _row(op, name, prototype, act=Act.COLLECTIVE, **arguments),
        _row(op, f"{name}Config", prototype, act=Act.COLLECTIVE, **arguments),
    )


_init = functools.partial(
    _row, NcclOp.COMM_INIT, act=Act.COMM_INIT, out="comm", nranks="nranks", rank="rank"
)
_BUFFERS: Final = "send:ptr recv:ptr count:u64 dtype:i32"

COMMUNICATORS: Final = (
    _init("ncclCommInitRank", "comm:ptr nranks:i32 id:id128 rank:i32", id="&id"),
    _init("ncclCommInitRankConfig", "comm:ptr nranks:i32 id:id128 rank:i32 config:ptr", id="&id"),
    _init(
        "ncclCommInitRankScalable",
        "comm:ptr nranks:i32 rank:i32 n_ids:i32 ids:ptr config:ptr",
        id="ids",
    ),
    _row(
        NcclOp.COMM_INIT_ALL,
        "ncclCommInitAll",
        "comm:ptr nranks:i32 devices:ptr",
        act=Act.COMM_INIT_ALL,
        out="comm",
        nranks="nranks",
    ),
    _row(
        NcclOp.COMM_SPLIT,
        "ncclCommSplit",
        "comm:ptr color:i32 key:i32 child:ptr config:ptr",
        act=Act.COMM_SPLIT,
        comm="comm",
        out="child",
        color="color",
    ),
    _row(
        NcclOp.COMM_SHRINK,
        "ncclCommShrink",
        "comm:ptr ranks:ptr n_ranks:i32 child:ptr config:ptr flags:i32",
        act=Act.COMM_SPLIT,
        comm="comm",
        out="child",
    ),
    _row(NcclOp.COMM_DESTROY, "ncclCommDestroy", "comm:ptr", act=Act.COMM_END, comm="comm"),
    _row(NcclOp.COMM_ABORT, "ncclCommAbort", "comm:ptr", act=Act.COMM_END, comm="comm"),
    _row(NcclOp.COMM_FINALIZE, "ncclCommFinalize", "comm:ptr", comm="comm"),
    _row(NcclOp.COMM_REVOKE, "ncclCommRevoke", "comm:ptr flags:i32", comm="comm"),
    # Getters fill in what could not be seen: a communicator made before us, the rank in a split.
    _row(
        NcclOp.COMM_USER_RANK,
        "ncclCommUserRank",
        "comm:ptr rank:ptr",
        act=Act.COMM_RANK,
        comm="comm",
        out="rank",
    ),
    _row(
        NcclOp.COMM_COUNT,
        "ncclCommCount",
        "comm:ptr count:ptr",
        act=Act.COMM_COUNT,
        comm="comm",
        out="count",
    ),
)

COLLECTIVES: Final = (
    *_collective(
        NcclOp.ALL_REDUCE,
        "ncclAllReduce",
        f"{_BUFFERS} redop:i32 comm:ptr stream:ptr",
        redop="redop",
    ),
    *_collective(
        NcclOp.REDUCE_SCATTER,
        "ncclReduceScatter",
        f"{_BUFFERS} redop:i32 comm:ptr stream:ptr",
        redop="redop",
    ),
    *_collective(NcclOp.ALL_GATHER, "ncclAllGather", f"{_BUFFERS} comm:ptr stream:ptr"),
    *_collective(
        NcclOp.BROADCAST, "ncclBroadcast", f"{_BUFFERS} root:i32 comm:ptr stream:ptr", peer="root"
    ),
    *_collective(
        NcclOp.REDUCE,
        "ncclReduce",
        f"{_BUFFERS} redop:i32 root:i32 comm:ptr stream:ptr",
        redop="redop",
        peer="root",
    ),
    *_collective(NcclOp.ALL_TO_ALL, "ncclAlltoAll", f"{_BUFFERS} comm:ptr stream:ptr"),
    *_collective(
        NcclOp.GATHER, "ncclGather", f"{_BUFFERS} root:i32 comm:ptr stream:ptr", peer="root"
    ),
    *_collective(
        NcclOp.SCATTER, "ncclScatter", f"{_BUFFERS} root:i32 comm:ptr stream:ptr", peer="root"
    ),
    _row(
        NcclOp.BROADCAST,
        "ncclBcast",
        "buffer:ptr count:u64 dtype:i32 root:i32 comm:ptr stream:ptr",
        act=Act.COLLECTIVE,
        count="count",
        dtype="dtype",
        peer="root",
        comm="comm",
        stream="stream",
    ),
)

POINT_TO_POINT: Final = tuple(
    _row(
        op,
        name,
        "buffer:ptr count:u64 dtype:i32 peer:i32 comm:ptr stream:ptr",
        act=Act.P2P,
        count="count",
        dtype="dtype",
        peer="peer",
        comm="comm",
        stream="stream",
    )
    for op, name in ((NcclOp.SEND, "ncclSend"), (NcclOp.RECV, "ncclRecv"))
)

GROUPS: Final = (
    _row(NcclOp.GROUP_START, "ncclGroupStart", "", act=Act.GROUP_START),
    _row(NcclOp.GROUP_END, "ncclGroupEnd", "", act=Act.GROUP_END),
    # Ends a group without running it.
    _row(NcclOp.GROUP_END, "ncclGroupSimulateEnd", "info:ptr", act=Act.GROUP_END),
)

NCCL: Final[tuple[Function, ...]] = (*COMMUNICATORS, *COLLECTIVES, *POINT_TO_POINT, *GROUPS)
