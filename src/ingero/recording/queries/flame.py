"""Stacks of a part as one tree: which code paths the time of an operation comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec

from ingero.recording.queries.stacks import FoldedStack, FoldedStacks

_MAX_NODES: Final = 3000
_MAX_DEPTH: Final = 256


class Flame(msgspec.Struct, frozen=True):
    """One frame with everything that it calls; children by name."""

    name: str
    calls: Annotated[int, msgspec.Meta(description="calls through here, sampled rows weighted")]
    total_us: float
    children: list[Flame]


class FlameAnswer(msgspec.Struct, frozen=True):
    """The tree: outermost function first, the operation at each leaf."""

    root: Flame
    stacks: int
    rows: Annotated[int, msgspec.Meta(description="stored rows that carry a stack")]
    left_out: Annotated[int, msgspec.Meta(description="stacks left out to keep the tree small")]
    call_share: Annotated[
        float | None,
        msgspec.Meta(
            description="part of the calls of these operations that has a stack: every number here is of those; "
            "null: nobody counted the others"
        ),
    ]


@dataclass(slots=True)
class _Node:
    calls: int = 0
    total_ns: int = 0
    children: dict[str, _Node] = field(default_factory=dict)


def build_flame(folded: FoldedStacks) -> FlameAnswer:
    """Join stacks, those with the most time first, until the tree is full."""
    stacks = folded.stacks
    root, n_nodes, left_out = _Node(), 0, 0
    for stack in stacks:
        frames = stack.frames[-_MAX_DEPTH:]
        if n_nodes + len(frames) > _MAX_NODES:
            left_out += 1
            continue
        n_nodes += _add(root, frames, stack)
    n_rows = sum(stack.n_rows for stack in stacks)
    return FlameAnswer(_freeze("all", root), len(stacks), n_rows, left_out, folded.call_share)


def _add(root: _Node, frames: Sequence[str], stack: FoldedStack) -> int:
    """Add one path; returns how many nodes it needed."""
    n_made = 0
    here = root
    here.calls += stack.n_calls
    here.total_ns += stack.total_ns
    for name in frames:
        if name not in here.children:
            here.children[name] = _Node()
            n_made += 1
        here = here.children[name]
        here.calls += stack.n_calls
        here.total_ns += stack.total_ns
    return n_made


def _freeze(name: str, node: _Node) -> Flame:
    children = [_freeze(child, below) for child, below in sorted(node.children.items())]
    return Flame(name, node.calls, round(node.total_ns / 1e3, 1), children)
