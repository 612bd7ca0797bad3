"""Which processes of this machine have the plug-in for NCCL, and what it tells."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ingero.agent.capture.discover.processes import iter_pids
from ingero.agent.collectives.plugin_ring import find_rings_of


@dataclass(frozen=True, slots=True)
class PluginStatus:
    """One process with the plug-in.

    Attributes:
        pid: As we see it.
        api: Version of NCCL's interface that is in use.
        n_comms: Communicators it has.
        n_ops: Collectives that ended since the first communicator was made.
        n_lost: Collectives that the plug-in could not tell of.
    """

    pid: int
    api: int
    n_comms: int
    n_ops: int
    n_lost: int


def find_plugins(parent: Path) -> list[PluginStatus]:
    """Every process whose plug-in tells and that we may look at, by pid.

    Args:
        parent: Where plug-ins make their rings, as the processes see it.
    """
    found = []
    with ExitStack() as stack:
        for pid in iter_pids():
            for ring in find_rings_of(pid, parent).values():
                stack.enter_context(ring)
                n_comms, n_ops = len(ring.read_places()), ring.count()
                found.append(PluginStatus(pid, ring.api, n_comms, n_ops, ring.counts.n_lost))
    return sorted(found, key=lambda one: one.pid)
