"""Links between pipeline stages: communicators of two members, by the slot that makes them comparable between peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ingero.detect.peers import op_of_slot
from ingero.detect.registry import Registry
from ingero.model.arrays import BoolArray, IntArray
from ingero.model.collectives import CollectiveOp


@dataclass(frozen=True, slots=True)
class Links:
    """Every worker's links.

    Attributes:
        by_slot: Worker → slot → communicator, for all of two members.
        between_stages: Worker → communicator → the worker at the other end, for those that carry activations.
        comms: Communicator of each view.
        is_between_stages: Of each view, whether its communicator is in ``between_stages``.
    """

    by_slot: Mapping[int, Mapping[int, int]]
    between_stages: Mapping[int, Mapping[int, int]]
    comms: IntArray
    is_between_stages: BoolArray


def find_links(registry: Registry, slots: IntArray) -> Links:
    """Find the links among all views; ``slots`` by view, −1 before its first operation was numbered."""
    comms = np.array(registry.view_comms, np.int64)
    is_link = (slots >= 0) & (registry.n_ranks[comms] == 2)
    is_exchange = is_link & np.isin(op_of_slot(slots), (CollectiveOp.SEND, CollectiveOp.RECV))
    by_slot: dict[int, dict[int, int]] = {}
    between_stages: dict[int, dict[int, int]] = {}
    for (worker, comm), view in registry.views.items():
        if is_link[view]:
            by_slot.setdefault(worker, {})[int(slots[view])] = comm
        if not is_exchange[view]:
            continue
        others = [other for other in registry.members[comm] if other != worker]
        if len(others) == 1:
            between_stages.setdefault(worker, {})[comm] = others[0]
    return Links(by_slot, between_stages, comms, is_exchange)
