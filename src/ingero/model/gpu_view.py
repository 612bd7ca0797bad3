"""Which GPU a process means by a number: CUDA counts the devices that it is shown, and each process is shown its own.

Two containers, or two values of ``CUDA_VISIBLE_DEVICES``, have a device 0 each. What can be seen of a process without
asking its CUDA: which devices its root folder has, and what its environment chose of them. A program that chooses for
itself after its start is not seen to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

Device: TypeAlias = tuple[object, ...]
"""A device; equal for two processes of a node that mean the same one."""

KeyT = TypeVar("KeyT")
_DEFAULT_ORDER: Final = "FASTEST_FIRST"  # CUDA C++ Programming Guide, "CUDA Environment Variables"


@dataclass(frozen=True, slots=True, order=True)
class GpuView:
    """What a process is shown.

    Attributes:
        nodes: Names of the device nodes of NVIDIA's driver in its ``/dev``: ``nvidia0``, and of MIG instances
            ``nvidia-caps/nvidia-cap3``; sorted.
        visible: ``CUDA_VISIBLE_DEVICES``; None where it is not set.
        order: ``CUDA_DEVICE_ORDER``; empty where it is not set.
    """

    nodes: tuple[str, ...] = ()
    visible: str | None = None
    order: str = ""

    def find(self, number: int) -> Device | None:
        """The device of a number; None where that is not known."""
        named: Device = ("number", self.nodes, self.order or _DEFAULT_ORDER)
        if self.visible is None:
            only = self.nodes[0] if len(self.nodes) == 1 and number == 0 else ""
            return ("node", only) if only else (*named, number)
        chosen = [part.strip() for part in self.visible.split(",")]
        if not 0 <= number < len(chosen):
            return None
        one = chosen[number]
        if one.isdecimal():
            return GpuView(self.nodes, None, self.order).find(int(one))
        return ("id", one) if one.startswith(("GPU-", "MIG-")) else None


def find_same(
    one: GpuView | None, other: GpuView | None, numbers: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Pairs of numbers that mean the same device.

    Args:
        one: Of the first process; None where nothing is known.
        other: Of the second process of the same node.
        numbers: Pairs of a number of the first and one of the second.
    """
    if one is None and other is None:  # a recorder that did not look: the numbers are all there is
        return {(mine, theirs) for mine, theirs in numbers if mine == theirs}
    if one is None or other is None:
        return set()
    return {
        (mine, theirs)
        for mine, theirs in numbers
        if (device := one.find(mine)) is not None and device == other.find(theirs)
    }


def merge_views(known: MutableMapping[KeyT, GpuView], more: Mapping[KeyT, GpuView]) -> None:
    """Add what processes are shown; one of which two things are said shares with nobody that is known."""
    for key, view in more.items():
        known[key] = view if known.get(key, view) == view else UNKNOWN


UNKNOWN: Final = GpuView(visible="")
"""Of a process of which two things are said, as where a number was given to another one: it shares with nobody."""
