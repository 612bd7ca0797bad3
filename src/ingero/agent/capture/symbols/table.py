"""One row per probed function, and the descriptor that the kernel reads for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ingero.agent.capture.kernel.abi import Act, Role, get_dtype
from ingero.agent.capture.symbols.abi import build_arguments, build_selector
from ingero.model.arrays import Records
from ingero.model.events import Source
from ingero.model.operations import get_pending_code

_ROLES: Final[dict[str, tuple[Role, ...]]] = {
    "size": (Role.SIZE0, Role.SIZE1, Role.SIZE2),
    "handle": (Role.HANDLE,),
    "stream": (Role.STREAM,),
    "aux": (Role.AUX,),
    "out": (Role.OUT,),
    "comm": (Role.COMM,),
    "count": (Role.COUNT,),
    "dtype": (Role.DTYPE,),
    "redop": (Role.REDOP,),
    "peer": (Role.PEER,),
    "rank": (Role.RANK,),
    "nranks": (Role.NRANKS,),
    "id": (Role.ID,),
    "grid": (Role.GRID_X, Role.GRID_Y, Role.GRID_Z),
    "block": (Role.BLOCK_X, Role.BLOCK_Y, Role.BLOCK_Z),
    "color": (Role.COLOR,),
    "tag": (Role.TAG,),
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function of a library and what its arguments mean.

    Attributes:
        name: The symbol.
        source: Where its records are filed.
        op: Its operation code; several functions may share one.
        prototype: Its parameters, as `ingero.agent.capture.symbols.abi` writes them.
        roles: What each parameter is, by keys of the role table; factors of a size are joined by ``*``.
        act: What the engine does at its return.
        suffixes: Further exports of the same prototype, such as ``_ptsz``.
        needs_return: Whether duration, return code or an out value is wanted; costs a second probe.
    """

    name: str
    source: Source
    op: int
    prototype: str
    roles: dict[str, str] = field(default_factory=dict)
    act: Act = Act.NONE
    suffixes: tuple[str, ...] = ()
    needs_return: bool = True

    @property
    def is_cxx(self) -> bool:
        """Whether an exception may leave it: then it is never given a return probe."""
        return self.source is Source.GLOO

    def names(self) -> tuple[str, ...]:
        """Every symbol that this row describes."""
        return (self.name, *(self.name + suffix for suffix in self.suffixes))


def row(
    source: Source,
    op: int,
    name: str,
    prototype: str,
    *,
    act: Act = Act.NONE,
    suffixes: tuple[str, ...] = (),
    **roles: str,
) -> Function:
    """A table row; a function without a return probe is made with `Function` itself."""
    return Function(name, source, op, prototype, roles, act, suffixes)


def build_descriptor(function: Function, machine: str) -> Records:
    """The ``struct ig_descriptor`` of a function; shape (1,)."""
    arguments = build_arguments(function.prototype, machine)
    descriptor = np.zeros(1, get_dtype("descriptor"))
    descriptor["op"] = function.op
    descriptor["source"] = int(function.source)
    descriptor["act"] = int(function.act)
    descriptor["needs_return"] = function.needs_return
    descriptor["is_collective"] = function.source in {Source.NCCL, Source.GLOO}
    descriptor["pending_rc"] = get_pending_code(function.source, function.op)
    for role, text in function.roles.items():
        expressions = _expand(text, arguments[text].kind if text in arguments else "")
        for place, expression in zip(_ROLES[role], expressions, strict=False):
            descriptor["args"][0, int(place)] = build_selector(expression, arguments)
    return descriptor


def _expand(text: str, kind: str) -> list[str]:
    if kind == "dim3":
        return [text, f"{text}.y", f"{text}.z"]
    return text.split("*")
