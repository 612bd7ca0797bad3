"""Starts the agents of a cluster, one process per host, and ends them."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ingero.errors import IngeroError
from ingero.sim.cluster.agent import PROGRAM, READY
from ingero.sim.cluster.hosts import Cluster, in_host
from ingero.sim.job import Job

READY_TIMEOUT_S: Final = 60.0
_END_S: Final = 8.0


def socket_of(folder: Path, rank: int) -> Path:
    """Socket on which the agent of a host reports its episodes."""
    return folder / f"remediate-{rank}.sock"


@contextmanager
def run_agents(
    cluster: Cluster, job: Job, shared: dict[str, Any]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One agent per host, ready; they end with the context.

    Raises:
        IngeroError: One did not start; the message holds what it said.
    """
    agents: list[subprocess.Popen[str]] = []
    try:
        for rank, (host, pid) in enumerate(zip(cluster.hosts, job.pids, strict=True)):
            own = {
                "rank": rank,
                "pid": pid,
                "node_id": host.name,
                "socket": str(socket_of(Path(shared["folder"]), rank)),
                "report": str(job.settings.report_path(rank)) if job.settings.has_reports else "",
            }
            settings = json.dumps({**shared, **own})
            agents.append(
                subprocess.Popen(
                    in_host(host, [sys.executable, "-c", PROGRAM, settings]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(Path(shared["folder"]) / f"agent-{rank}.log").open("w"),
                    text=True,
                    start_new_session=True,
                )
            )
        _await_ready(agents, Path(shared["folder"]))
        yield agents
    finally:
        _end(agents)


def _await_ready(agents: Sequence[subprocess.Popen[str]], folder: Path) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    with selectors.DefaultSelector() as selector:
        for rank, agent in enumerate(agents):
            assert agent.stdout is not None
            selector.register(agent.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            events = selector.select(max(deadline - time.monotonic(), 0))
            if not events:
                raise IngeroError(f"agents were not ready after {READY_TIMEOUT_S:.0f} s")
            for key, _ in events:
                line = agents[key.data].stdout.readline()
                if line.strip() != READY:
                    said = (folder / f"agent-{key.data}.log").read_text().strip()
                    last = said.splitlines()[-1] if said else "it said nothing"
                    raise IngeroError(f"the agent of host {key.data} did not start: {last}")
                selector.unregister(key.fileobj)


def _end(agents: Sequence[subprocess.Popen[str]]) -> None:
    for agent in agents:
        assert agent.stdin is not None
        agent.stdin.close()
    deadline = time.monotonic() + _END_S
    for agent in agents:
        try:
            agent.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()
        if agent.stdout is not None:
            agent.stdout.close()
