"""Runs ``ingero up``: starts everything, injects the faults, asks the Fleet until the time is over."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from ingero.cli.cluster.agent import PROGRAM, READY
from ingero.cli.cluster.ask import ask_hang
from ingero.cli.cluster.faults import Fault, inject
from ingero.cli.cluster.hosts import Cluster, in_host, open_cluster
from ingero.cli.local_fleet import EPHEMERAL, SHIPPED_CONFIG, run_local_fleet
from ingero.cli.replay.network import ask_judgement
from ingero.errors import IngeroError
from ingero.gpusim.job import Job, JobSettings
from ingero.model.verdicts import Judgement, Verdict, VerdictKind
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S

LIVE: Final = ("processors.nccl.reorder_window=500ms", "processors.nccl.judge_interval=250ms")
"""Settings of our own Fleet: a live agent's pushes come in order, on one connection, and nobody waits longer than it must."""
READY_TIMEOUT_S: Final = 60.0
STEADY_OPS: Final = 100
"""Compared operations of every rank before a fault is injected."""
STEADY_TIMEOUT_NS: Final = 60 * NS_PER_S
_POLL_S: Final = 0.2
_END_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class UpSettings:
    """What to run.

    Attributes:
        n_ranks: Hosts, with one rank each.
        faults: What to inject once the job runs evenly.
        seed: Of the job's jitter.
        duration_ns: After the injection.
        push_interval_ns: Of the agents.
        settle_ns: How long to go on after the expected verdict, at most, to see what is said of the others.
    """

    n_ranks: int
    faults: tuple[Fault, ...]
    seed: int
    duration_ns: int
    push_interval_ns: int
    settle_ns: int = 10 * NS_PER_S


@dataclass(slots=True)
class Progress:
    """Where a run is.

    Attributes:
        stage: What happens now, for a person.
        isolation: How hosts are kept apart.
        note: What is weaker than usual; may be empty.
        since_fault_ns: Since the injection; None before it.
        judgement: What Fleet says of the ranks; None before it says anything.
        hang: What Fleet says of ranks that stand still; None before.
        named: Ranks that were ever named and by which verdict, with the time since the injection.
    """

    stage: str = "starting"
    isolation: str = ""
    note: str = ""
    since_fault_ns: int | None = None
    judgement: Judgement | None = None
    hang: dict[str, Any] | None = None
    named: dict[tuple[int, str], int | None] = field(default_factory=dict)


class FleetView:
    """What the Fleet says, as its admin endpoint tells it."""

    def __init__(self, admin_url: str, cluster_id: str, client: httpx.Client) -> None:
        self._admin_url = admin_url
        self._cluster_id = cluster_id
        self._client = client

    def look(self, progress: Progress) -> None:
        """Ask for verdicts and hangs, and note who is named."""
        progress.judgement = ask_judgement(self._client, self._admin_url, self._cluster_id)
        progress.hang = ask_hang(self._client, self._admin_url, self._cluster_id)
        verdicts = progress.judgement.verdicts if progress.judgement else ()
        found = [(v.rank.rank, v.kind.value) for v in verdicts if v.is_alarm]
        if progress.hang is not None:
            found += [(rank, "hang") for rank in progress.hang["missing_ranks"]]
        for who in found:
            progress.named.setdefault(who, progress.since_fault_ns)


@contextmanager
def run_agents(
    cluster: Cluster, job: Job, told: dict[str, Any]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One agent per host, ready; they end with the context.

    Raises:
        IngeroError: One did not start; the message holds what it said.
    """
    agents: list[subprocess.Popen[str]] = []
    try:
        for rank, (host, pid) in enumerate(zip(cluster.hosts, job.pids, strict=True)):
            settings = json.dumps({**told, "rank": rank, "pid": pid, "node_id": host.name})
            agents.append(
                subprocess.Popen(
                    in_host(host, [sys.executable, "-c", PROGRAM, settings]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=(Path(told["folder"]) / f"agent-{rank}.log").open("w"),
                    text=True,
                    start_new_session=True,
                )
            )
        _await_ready(agents, Path(told["folder"]))
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


def run_up(
    settings: UpSettings, follow: Callable[[Progress], None], clock: Clock | None = None
) -> dict[str, Any]:
    """Run a cluster through its faults.

    Returns:
        The result as JSON-able values.

    Raises:
        IngeroError: A part did not start, or the job ended by itself.
    """
    clock = clock or SystemClock()
    cluster_id = f"up-{os.getpid()}"
    progress = Progress()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ingero-up-")))
        cluster = stack.enter_context(open_cluster(settings.n_ranks))
        progress.isolation, progress.note = cluster.isolation, cluster.note
        follow(progress)
        overrides = (
            *EPHEMERAL,
            *LIVE,
            f"receivers.otlp.protocols.http.endpoint={cluster.address}:0",
        )
        fleet = stack.enter_context(run_local_fleet(SHIPPED_CONFIG, overrides))
        job = stack.enter_context(
            Job(
                JobSettings(
                    settings.n_ranks,
                    folder,
                    cluster.address,
                    [host.prefix for host in cluster.hosts],
                    settings.seed,
                )
            )
        )
        told = {
            "cluster_id": cluster_id,
            "n_ranks": settings.n_ranks,
            "fleet": "http://" + fleet.find_endpoint("otlp", "http"),
            "folder": str(folder),
            "push_interval_ns": settings.push_interval_ns,
        }
        stack.enter_context(run_agents(cluster, job, told))
        client = stack.enter_context(httpx.Client(timeout=10))
        admin_url = "http://" + fleet.find_endpoint("ingero_threshold", "admin")
        view = FleetView(admin_url, cluster_id, client)
        job.release()
        run = _Run(settings, job, view, progress, follow, clock)
        run.await_steady()
        run.inject(cluster)
        run.watch()
    return build_result(settings, progress)


@dataclass(slots=True)
class _Run:
    """The part of a run between the start and the end."""

    settings: UpSettings
    job: Job
    view: FleetView
    progress: Progress
    follow: Callable[[Progress], None]
    clock: Clock

    def await_steady(self) -> None:
        """Wait until Fleet has compared every rank for a while."""
        self.progress.stage = "warming up"
        deadline_ns = self.clock.mono_ns() + STEADY_TIMEOUT_NS
        while True:
            self._look(())
            judgement = self.progress.judgement
            verdicts = judgement.verdicts if judgement else ()
            if len(verdicts) == self.settings.n_ranks and all(
                v.n_ops >= STEADY_OPS for v in verdicts
            ):
                return
            if self.clock.mono_ns() > deadline_ns:
                raise IngeroError(
                    "Fleet has not compared the ranks after 60 s",
                    hint="`ingero check` says what this machine can trace",
                )

    def inject(self, cluster: Cluster) -> None:
        """Turn every fault on."""
        for fault in self.settings.faults:
            inject(fault, self.job, cluster)
        names = ", ".join(
            fault.kind if fault.rank is None else f"{fault.kind} of rank {fault.rank}"
            for fault in self.settings.faults
        )
        self.progress.stage = f"running with {names}" if names else "running"

    def watch(self) -> None:
        """Look until the time is over, or the expected was said and settled."""
        began_ns = self.clock.mono_ns()
        settled_ns = None
        gone = [fault.rank for fault in self.settings.faults if fault.kind == "kill"]
        while True:
            now_ns = self.clock.mono_ns()
            self.progress.since_fault_ns = now_ns - began_ns
            self._look([rank for rank in gone if rank is not None])
            if find_detection(self.settings, self.progress) is not None:
                settled_ns = settled_ns or now_ns
                if now_ns - settled_ns >= self.settings.settle_ns or self._is_explained():
                    return
            if now_ns - began_ns >= self.settings.duration_ns:
                return

    def _is_explained(self) -> bool:
        """Whether Fleet has said of every rank why it is slow, or that the job stands."""
        if any(fault.is_hang for fault in self.settings.faults):
            return True
        verdicts = self.progress.judgement.verdicts if self.progress.judgement else ()
        return all(verdict.kind is not VerdictKind.ORDINARY for verdict in verdicts)

    def _look(self, gone: Sequence[int]) -> None:
        self.job.check(gone)
        self.view.look(self.progress)
        self.follow(self.progress)
        time.sleep(_POLL_S)


def find_detection(settings: UpSettings, progress: Progress) -> float | None:
    """Seconds from the injection until every rank with a fault was named; None while one was not."""
    delays = []
    for fault in settings.faults:
        if fault.rank is None:
            return None
        kinds = ["hang"] if fault.is_hang else [VerdictKind.CULPRIT, VerdictKind.NETWORK]
        times = [
            at for kind in kinds if (at := progress.named.get((fault.rank, str(kind)))) is not None
        ]
        if not times:
            return None
        delays.append(min(times))
    return max(delays) / NS_PER_S if delays else None


def build_result(settings: UpSettings, progress: Progress) -> dict[str, Any]:
    """The last JSON object: verdicts of Fleet at the end, and everybody who was ever named."""
    verdicts = progress.judgement.verdicts if progress.judgement else ()
    expected = {fault.rank for fault in settings.faults if fault.rank is not None}
    detection_s = find_detection(settings, progress)
    return {
        "ranks": settings.n_ranks,
        "isolation": progress.isolation,
        "note": progress.note,
        "seed": settings.seed,
        "push_interval_s": settings.push_interval_ns / NS_PER_S,
        "faults": [
            {"kind": fault.kind, "rank": fault.rank, "amount": fault.amount}
            for fault in settings.faults
        ],
        "verdicts": [_verdict_json(verdict) for verdict in verdicts],
        "culprits": _named(progress, "culprit"),
        "network": _named(progress, "network"),
        "victims": [v.rank.rank for v in verdicts if v.kind is VerdictKind.VICTIM],
        "missing_ranks": _named(progress, "hang"),
        "hang": progress.hang if progress.hang and progress.hang["missing_ranks"] else None,
        "wrongly_named": sorted({rank for rank, _ in progress.named} - expected),
        "detection_s": None if detection_s is None else round(detection_s, 2),
        "watched_s": round((progress.since_fault_ns or 0) / NS_PER_S, 1),
        "note_on_work": "simulated GPUs; the probes, the pushes, the Fleet and its verdicts are real",
    }


def _named(progress: Progress, kind: str) -> list[int]:
    return sorted(rank for rank, what in progress.named if what == kind)


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "rank": verdict.rank.rank,
        "node_id": verdict.rank.node_id,
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "slowdown": None if verdict.slowdown is None else round(verdict.slowdown.median, 3),
        "n_ops": verdict.n_ops,
        "n_ops_to_detect": verdict.n_ops_to_detect,
        "lost_gpu_s": round(verdict.lost_gpu_ns / NS_PER_S, 3),
    }
