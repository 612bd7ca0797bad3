"""Gloo, the backend of PyTorch's collectives on the CPU.

Process groups, collectives, and waits for point-to-point operations, all of it C++ inside ``libtorch_cpu.so``: a
function may be left by an exception. What a collective is asked comes as an options object whose layout no header
promises, so that a version of PyTorch is known or it is refused.

Sources: of PyTorch 2.13.0 ``torch/csrc/distributed/c10d/ProcessGroupGloo.hpp`` and the headers of the Gloo it is built
with; names by the Itanium C++ ABI. That the offsets hold is tested by running the collectives of a real PyTorch
(tests/kernel/test_gloo.py).
"""

from __future__ import annotations

import functools
from typing import Final

from ingero.agent.capture.kernel.abi import Act
from ingero.agent.capture.symbols.table import Function
from ingero.model.events import GlooOp, Source

_GROUP: Final = "c10d16ProcessGroupGloo"


def _row(
    op: GlooOp, name: str, prototype: str, *, act: Act, needs_return: bool = True, **roles: str
) -> Function:
    return Function(name, Source.GLOO, op, prototype, roles, act, needs_return=needs_return)


_silent = functools.partial(_row, needs_return=False)


def _collective(op: GlooOp, name: str, options: str, tag: int, **roles: str) -> Function:
    """``gloo::NAME(OPTIONS&)``; the options begin with a pointer to the context."""
    kind = f"{'RK' if name == 'allreduce' else 'R'}NS_{len(options)}{options}E"
    fields = {"comm": "options@0", "tag": f"options@{tag}:i32", **roles}
    symbol = f"_ZN4gloo{len(name)}{name}E{kind}"
    return Function(symbol, Source.GLOO, op, "options:ptr", fields, Act.COLLECTIVE)


GLOO: Final[tuple[Function, ...]] = (
    _row(
        GlooOp.GROUP,
        f"_ZN4{_GROUP}C1ERKN3c1013intrusive_ptrINS_5StoreENS1_6detail34intrusive_target_default_null_type"
        "IS3_EEEEiiNS2_INS0_7OptionsENS5_ISA_EEEE",
        "this:ptr store:ptr rank:i32 nranks:i32 options:ptr",
        act=Act.GLOO_GROUP,
        id="store@0",
        rank="rank",
        nranks="nranks",
    ),
    _silent(
        GlooOp.CONNECT,
        "_ZN4gloo10rendezvous7Context15connectFullMeshESt10shared_ptrINS0_5StoreEERS2_INS_9transport6DeviceEE",
        "this:ptr store:ptr device:ptr",
        act=Act.GLOO_CONNECT,
        comm="this",
    ),
    _silent(GlooOp.CLOSE, "_ZN4gloo7ContextD2Ev", "this:ptr", act=Act.GLOO_CLOSE, comm="this"),
    _silent(
        GlooOp.CAUGHT,
        f"_ZN4{_GROUP}9AsyncWork19finishWorkGlooErrorERKNSt15__exception_ptr13exception_ptrE",
        "this:ptr exception:ptr",
        act=Act.GLOO_CAUGHT,
    ),
    _silent(GlooOp.NEXT, f"_ZN4{_GROUP}7nextTagEv", "this:ptr", act=Act.GLOO_NEXT, comm="this"),
    _collective(
        GlooOp.ALL_REDUCE, "allreduce", "AllreduceOptions", 128, size="options@80*options@88"
    ),
    _collective(GlooOp.ALL_GATHER, "allgather", "AllgatherOptions", 40),
    _collective(GlooOp.ALL_GATHER, "allgatherv", "AllgathervOptions", 64),
    _collective(GlooOp.ALL_TO_ALL, "alltoall", "AlltoallOptions", 40),
    _collective(GlooOp.ALL_TO_ALL, "alltoallv", "AlltoallvOptions", 136),
    _collective(GlooOp.BARRIER, "barrier", "BarrierOptions", 24),
    _collective(
        GlooOp.BROADCAST,
        "broadcast",
        "BroadcastOptions",
        52,
        size="options@32*options@40",
        peer="options@48:i32",
    ),
    _collective(GlooOp.GATHER, "gather", "GatherOptions", 44, peer="options@40:i32"),
    _collective(
        GlooOp.REDUCE,
        "reduce",
        "ReduceOptions",
        88,
        size="options@32*options@40",
        peer="options@48:i32",
    ),
    _collective(GlooOp.SCATTER, "scatter", "ScatterOptions", 60, peer="options@56:i32"),
    *(
        _row(
            op,
            f"_ZN4{_GROUP}8{name}Work4waitENSt6chrono8durationIlSt5ratioILl1ELl1000EEEE",
            "this:ptr timeout_ms:u64",
            act=Act.P2P,
        )
        for op, name in ((GlooOp.SEND, "Send"), (GlooOp.RECV, "Recv"))
    ),
)

TORCH_VERSIONS: Final = frozenset({"2.13.0"})
"""Releases of PyTorch whose layouts these rows have."""
