"""Starts the agents of a cluster, one process per host, and ends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingero.sim.cluster.hosts import Cluster
from ingero.sim.cluster.torch_job import TorchJob
from ingero.sim.job import Job
from ingero.sim.launcher import start


@dataclass(frozen=True, slots=True)
class HostProcesses:
    """Processes whose children are the ranks of jobs to come.

    Attributes:
        pids: One of each host, such as its ``slurmd``.
    """

    pids: tuple[int, ...]


def socket_of(folder: Path, rank: int) -> Path:
    """Socket on which the agent of a host reports its episodes."""
    return folder / f"remediate-{rank}.sock"


@contextmanager
def run_agents(
    cluster: Cluster, job: Job | TorchJob | HostProcesses, shared: dict[str, Any]
) -> Iterator[None]:
    """One agent per host, ready; they end with the context.

    Raises:
        IngeroError: One did not start; the message holds its log.
    """
    agents = []
    with ExitStack() as stack:
        reports = _find_reports(job)
        for rank, (host, pid) in enumerate(zip(cluster.hosts, job.pids, strict=True)):
            own = {
                "rank": rank,
                "pid": pid,
                "node_id": host.name,
                "socket": str(socket_of(Path(shared["folder"]), rank)),
                "report": reports[rank],
            }
            settings = json.dumps({**shared, **own})
            started = start("ingero.sim.cluster.agent", [settings], prefix=host.prefix)
            agents.append(stack.enter_context(started))
        for agent in agents:
            agent.wait_until_ready()
        yield
        for agent in agents:
            agent.end()  # all at once; leaving the context waits for each


def _find_reports(job: Job | TorchJob | HostProcesses) -> list[str]:
    """By rank, where a simulated one tells its own calls; empty where it is probed."""
    if isinstance(job, Job) and job.settings.has_reports:
        return [str(job.settings.report_path(rank)) for rank in range(job.settings.n_ranks)]
    return [""] * len(job.pids)
