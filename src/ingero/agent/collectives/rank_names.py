"""Which rank of which job a process is to Fleet."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Final

from ingero.agent.health.push_body import NodeIdentity
from ingero.model.collectives import Rank
from ingero.wire.process_resource import ProcessResource

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class RankNames:
    """Names the processes of one node.

    Args:
        identity: The node.
        exited: Processes that ended; another one may take the rank of such a process.
    """

    def __init__(self, identity: NodeIdentity, exited: Collection[int]) -> None:
        self._identity = identity
        self._exited = exited
        self._ranks: dict[int, int] = {}
        self._jobs: dict[int, str] = {}
        self._resources: dict[int, ProcessResource] = {}
        self._ended_before: dict[int, frozenset[int]] = {}
        self._named: dict[tuple[int, int], Rank] = {}
        self._holders: dict[tuple[str, int], int] = {}

    def add(self, pid: int, rank: int, job: str, resource: ProcessResource = ()) -> None:
        """A process, its global rank, its job and where it runs; -1 and empty where its launcher gave none.

        The same again with more about where it runs leaves its name as it is.

        It is named when it takes part in a collective: under ``srun``, torchrun itself has the rank of its first child.
        """
        if (self._ranks.get(pid), self._jobs.get(pid)) == (rank, job):
            self._resources[pid] = resource
            for key, named in self._named.items():
                if key[0] == pid:
                    self._named[key] = replace(named, resource=resource)
            return
        self._forget_name(pid)
        self._ranks[pid], self._jobs[pid], self._resources[pid] = rank, job, resource
        self._ended_before.setdefault(pid, frozenset(self._exited))

    def find_rank(self, pid: int) -> int:
        """The rank that the launcher gave; -1 where it gave none."""
        return self._ranks.get(pid, -1)

    def name(self, pid: int, rank: int) -> Rank:
        """The process as Fleet knows it.

        Two live processes of one job and rank are two jobs whose launchers gave them the same id: the later one is
        named by its pid too. One that takes the place of one that ended is the same worker.
        """
        known = self._named.get((pid, rank))
        if known is None:
            identity, job = self._identity, self._jobs.get(pid, "")
            holder = self._holders.get((job, rank))
            # That it has ended by now does not count: both may have, and were two as long as they lived.
            if holder is None or holder in self._ended_before.get(pid, self._exited):
                self._holders[job, rank] = pid
            else:
                job = f"{job}/{pid}" if job else str(pid)
            resource = self._resources.get(pid, ())
            known = Rank(identity.cluster_id, identity.node_id, rank, job=job, resource=resource)
            self._named[pid, rank] = known
        return known

    def forget(self, pid: int) -> None:
        """Drop what is known of a process."""
        self._ranks.pop(pid, None)
        self._jobs.pop(pid, None)
        self._resources.pop(pid, None)
        self._ended_before.pop(pid, None)
        self._forget_name(pid)

    def _forget_name(self, pid: int) -> None:
        self._named = {key: rank for key, rank in self._named.items() if key[0] != pid}
        self._holders = {key: held for key, held in self._holders.items() if held != pid}


def number_job(job: str, meeting: str, boot: str | None = None) -> int:
    """A number that the members of a job have in common and other jobs of the cluster do not have.

    Args:
        job: Its id; empty where its launcher gave none.
        meeting: ``MASTER_ADDR:MASTER_PORT``, for the n-th restart with ``#n``; empty where its launcher gave none.
        boot: What distinguishes this machine from others, which counts where the job cannot reach beyond it; None reads
            the boot id.
    """
    host = meeting.rpartition(":")[0].strip("[]")
    is_local = host in {"localhost", "::1"} or host.startswith("127.") or not (job or meeting)
    if is_local and boot is None:
        boot = _BOOT.read_text().strip()
    text = "\0".join((job, meeting, (boot or "") if is_local else ""))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
