"""Runs ``ingero up --slurm``: a real job in a real Slurm, a fault, and a remediator that does something about it.

Everything is a process of its own, as it is in a cluster: ``slurmctld``, ``slurmd`` and an agent on each host, torchrun
under ``srun``, Fleet, and ``ingero-remediator``, which reads Fleet's admin endpoint and calls ``scontrol``. This module
starts them, disturbs one host, and watches.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from ingero.errors import IngeroError, RetryableError, StoreError, UnsupportedError
from ingero.model.verdicts import VerdictKind
from ingero.remediation.actuators.slurm import parse_nodes
from ingero.remediation.journal import Journal
from ingero.remediation.records import WAITING
from ingero.sim.cluster.act_result import ActMode, ActProgress, ActSettings, build_act_result
from ingero.sim.cluster.agents import HostProcesses, run_agents
from ingero.sim.cluster.cleanup import open_cleanup
from ingero.sim.cluster.echo_savings import ask_savings
from ingero.sim.cluster.faults import Fault
from ingero.sim.cluster.fleets import FleetView, RunningFleets
from ingero.sim.cluster.hosts import Cluster, open_cluster
from ingero.sim.cluster.run import LIVE, find_libraries
from ingero.sim.cluster.shares import HostShares, ProcessorShare, open_shares
from ingero.sim.cluster.slurm import PACKAGES, RunningSlurm, SlurmNode, run_slurm, why_no_slurm
from ingero.sim.cluster.slurm_job import SlurmJob
from ingero.sim.cluster.twin import TwinKind, measure_twin
from ingero.sim.cluster.warm_up import WarmUp
from ingero.sim.launcher import LaunchedProgram, launch
from ingero.sim.local_echo import LocalEcho, run_local_echo
from ingero.sim.local_fleet import ADMIN, OTLP_HTTP, run_local_fleet
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S
from ingero.web_authorities import WebAuthorities

FAULTS: Final = frozenset({"cpu-quota"})
"""What is done to a host, so that it stays behind when the job leaves it."""
_POLICY: Final = """\
# The policy of `ingero up --slurm`: the defaults, but with brakes for a job of minutes on a cluster of a few nodes.
mode: {mode}
fleet: {{admin_url: "{admin_url}", clusters: [{cluster_id}], poll_interval: 1s}}
findings:
  min_persistence: 2s
  min_lost_gpu_time: 1s
  require_quorum: false   # Fleet counts nodes that use a GPU as active, and here is none
  min_coverage: 0
  causes: [cpu-quota, cpu-contention, blocked-io, page-faults, memory-reclaim]
brakes:
  settle_time: 5s
  max_nodes_at_once: 1
  max_percent_at_once: 100
  max_percent_per_hour: 100
  stop_file: {folder}/stop
journal: {{file: {folder}/journal.db}}
action: {{slurm: {{requeue: true}}}}
"""
_AUDIT: Final = (
    'audit: {{endpoint: "{echo.otlp_url}", bearer_file: "{echo.token_file}", interval: 1s}}\n'
)
_POLL_S: Final = 0.3
_SLURM_POLL_NS: Final = NS_PER_S
_PATIENCE_NS: Final = 120 * NS_PER_S
"""With a Slurm that does not answer."""
_GRACE_NS: Final = 5 * NS_PER_S
"""After the job's end: Slurm and the journal may still have something to say."""


def check_act(faults: Sequence[Fault]) -> None:
    """Refuse what cannot be run here.

    Raises:
        UnsupportedError: There is no Slurm here, or a fault is none that a host can have.
    """
    reason = why_no_slurm()
    if reason:
        raise UnsupportedError(
            f"--slurm starts a Slurm of its own: {reason}", hint=f"apt-get install {PACKAGES}"
        )
    others = sorted({fault.kind for fault in faults} - FAULTS)
    if others:
        raise UnsupportedError(
            f"--fault {', '.join(others)} is not there with --slurm",
            hint=f"a fault of a host that stays with it: {', '.join(sorted(FAULTS))}; or none",
        )


def run_act(
    settings: ActSettings,
    follow: Callable[[ActProgress], None],
    twins: Sequence[TwinKind] = (),
    clock: Clock | None = None,
) -> dict[str, Any]:
    """Run a job through its fault and what is done about it, to its end; then, if asked, once more without one of them.

    Args:
        settings: What to run.
        follow: Is called with how far it is.
        twins: What to leave out in further runs, each of which takes as long again.
        clock: Time.

    Returns:
        The result as JSON-able values.

    Raises:
        IngeroError: A part did not start, or the job failed.
    """
    with ExitStack() as stack:
        echo = stack.enter_context(run_local_echo()) if settings.has_echo else None
        first = _run_once(settings, follow, ("", echo), clock or SystemClock())
        result = build_act_result(settings, first)
        if echo is not None:
            result["echo"] = ask_savings(echo, _name_cluster())
    if twins:
        result["twins"] = {}
    for kind in twins:
        faults = () if kind == "without-fault" else settings.up.faults
        again = replace(settings, up=replace(settings.up, faults=faults), mode="dry-run")
        twin = _run_once(again, follow, (kind, None), clock or SystemClock())
        result["twins"][kind] = measure_twin(kind, settings, first, twin)
    return result


def _run_once(
    settings: ActSettings,
    follow: Callable[[ActProgress], None],
    beside: tuple[str, LocalEcho | None],
    clock: Clock,
) -> ActProgress:
    """One run, which may be a twin or have an Echo beside it: where it ended."""
    with ExitStack() as stack:
        story = _open_story(stack, settings, follow, beside, clock)
        story.await_steady()
        story.inject()
        story.watch()
    return story.progress


def _name_cluster() -> str:
    return f"up-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class ActViews:
    """What a run looks at.

    Attributes:
        fleet: Fleet.
        slurm: Slurm.
        job: The job there.
        remediator: The process.
        policy: Its file; the journal lies beside it.
    """

    fleet: FleetView
    slurm: RunningSlurm
    job: SlurmJob
    remediator: LaunchedProgram
    policy: Path

    def update(self, progress: ActProgress) -> None:
        """Read what costs little: Fleet's pages, the job's log, the remediator's journal.

        Raises:
            IngeroError: One of them is not there any more.
        """
        self.fleet.update(progress.watch)
        self.job.read()
        runs = (tuple(self.job.steps(n)) for n in range(progress.job.n_restarts + 1))
        progress.runs = tuple(runs)
        if self.remediator.process.poll() is not None:
            raise IngeroError(f"ingero-remediator ended:\n{self.remediator.log}")
        self._read_journal(progress)

    def ask_slurm(self, progress: ActProgress) -> None:
        """Ask Slurm for the job and the nodes.

        Raises:
            RetryableError: It did not answer in time.
            IngeroError: It refuses, or the job failed.
        """
        self.job.ask()
        progress.job = self.job.state
        found = parse_nodes(self.slurm.run("scontrol", "-o", "show", "node"))
        progress.nodes = {name: view.state for name, (view, _) in found.items()}

    def _read_journal(self, progress: ActProgress) -> None:
        path = self.policy.with_name("journal.db")
        if not path.exists():
            return
        try:
            with Journal(path, read_only=True) as journal:
                progress.actions, progress.findings = journal.actions(), journal.findings()
        except StoreError:
            return  # it is being made
        waiting = [one.action_id for one in progress.actions if one.state in WAITING]
        progress.approve = (
            f"ingero-remediator approve {waiting[0]} --config {self.policy}" if waiting else ""
        )


def _open_story(
    stack: ExitStack,
    settings: ActSettings,
    follow: Callable[[ActProgress], None],
    beside: tuple[str, LocalEcho | None],
    clock: Clock,
) -> _Story:
    """Start all of it, in this order, and submit the job."""
    twin, echo = beside
    up, progress = settings.up, ActProgress(twin=twin)
    assert up.job is not None
    cleanup = stack.enter_context(open_cleanup())
    folder = Path(tempfile.mkdtemp(prefix="ingero-up-"))
    cleanup.add("rm", "-rf", "--", str(folder))
    n_hosts = up.n_ranks + settings.n_spares
    cluster = stack.enter_context(open_cluster(n_hosts, cleanup))
    if cluster.note:
        raise UnsupportedError(f"--slurm needs network namespaces; {cluster.note}")
    progress.watch.isolation = cluster.isolation
    progress.watch.stage = "starting Slurm, Fleet and the agents"
    follow(progress)
    shares = stack.enter_context(open_shares(n_hosts, cleanup, n_busy=up.n_ranks))
    divided = HostShares(shares)
    divided.divide(is_loading=True)  # Slurm's daemons start on the hosts too
    cleanup.add("rm", "-rf", "--", str(folder))  # what a killed run still wrote
    reachable = f"receivers.otlp.protocols.http.endpoint={cluster.address}:0"
    kept = echo.fleet_overrides if echo else ()
    fleet = stack.enter_context(run_local_fleet((*LIVE, reachable, *kept, *settings.rates)))
    slurm = stack.enter_context(_run_slurm(folder, cluster, shares, up.n_ranks))
    cluster_id = _name_cluster()
    shared = {
        "cluster_id": cluster_id,
        "n_ranks": 0,  # which rank a host has, Slurm decides
        "fleets": [fleet.url(OTLP_HTTP)],
        "folder": str(folder),
        "push_interval_ns": up.push_interval_ns,
        "files": find_libraries(up.job),
    }
    daemons = HostProcesses(tuple(slurm.daemons[host.name] for host in cluster.hosts))
    stack.enter_context(run_agents(cluster, daemons, shared))
    client = stack.enter_context(httpx.Client(timeout=10, verify=WebAuthorities()))
    policy = _write_policy(folder, settings.mode, (fleet.url(ADMIN), cluster_id), echo)
    remediator = stack.enter_context(
        launch("ingero.cli.programs.remediator", ["run", str(policy)], environ=slurm.environ)
    )
    job = stack.enter_context(SlurmJob(slurm, up.job, up.n_ranks, folder, clock))
    view = FleetView(RunningFleets([fleet], (), clock), cluster_id, client)
    views = ActViews(view, slurm, job, remediator, policy)
    # At the end too: a job that loads leaves next to nothing for those that end before it.
    stack.callback(divided.divide, is_loading=False)
    return _Story(settings, views, divided, progress, follow, clock, clock.mono_ns())


def _run_slurm(
    folder: Path, cluster: Cluster, shares: Sequence[ProcessorShare], n_ranks: int
) -> Any:  # noqa: ANN401 - the context manager of run_slurm
    place = folder / "s"
    place.mkdir()
    nodes = [
        SlurmNode(
            host.name,
            host.address,
            host.prefix,
            share.members[0],
            weight=1 if number < n_ranks else 10,  # spares last
        )
        for number, (host, share) in enumerate(zip(cluster.hosts, shares, strict=True))
    ]
    return run_slurm(place, nodes, cluster.address)


def _write_policy(
    folder: Path, mode: ActMode, where: tuple[str, str], echo: LocalEcho | None
) -> Path:
    path = folder / "policy.yaml"
    admin_url, cluster_id = where
    text = _POLICY.format(mode=mode, admin_url=admin_url, cluster_id=cluster_id, folder=folder)
    text += "" if echo is None else _AUDIT.format(echo=echo)
    path.write_text(text, encoding="utf-8")
    return path


@dataclass(slots=True)
class _Story:
    """The part of a run between the start and the end."""

    settings: ActSettings
    views: ActViews
    shares: HostShares
    progress: ActProgress
    follow: Callable[[ActProgress], None]
    clock: Clock
    answered_ns: int

    def await_steady(self) -> None:
        """Wait until Fleet has compared every rank for a while."""
        self.progress.watch.stage = "the job starts"
        warm_up = WarmUp(self.settings.up.n_ranks, self.clock.mono_ns())
        while not (
            warm_up.is_over(self.progress.watch.judgement, self.clock.mono_ns())
            and len(self.progress.runs[0]) > 1
        ):
            self._update()
            if self.progress.job.is_over:
                raise IngeroError(
                    "the job ended before Fleet had compared its ranks",
                    hint="give it more steps, such as `-- --steps 3000`",
                )

    def inject(self) -> None:
        """Turn every fault on."""
        for fault in self.settings.up.faults:
            assert fault.rank is not None
            self.shares.hit(fault.rank, fault.amount)
        faults = self.settings.up.faults
        names = ", ".join(f"{fault.kind} of rank {fault.rank}" for fault in faults)
        self.progress.watch.stage = f"running with {names}" if names else "running"
        self.progress.now_ns = self.clock.mono_ns()
        if faults:
            self.progress.note("fault")
        self.progress.note("watched")

    def watch(self) -> None:
        """Look until the job has ended, or the time is over."""
        limit_ns = self.settings.limit_ns
        while not (self.progress.job.is_over and (self.progress.since("over") or 0) > _GRACE_NS):
            self._update()
            self._note_moments()
            if self.progress.job.is_over:
                self.progress.note("over")
                if not self._is_pending():
                    return
            watched_ns = self.progress.since("watched") or 0
            if limit_ns is not None and watched_ns >= limit_ns:
                return

    def _is_pending(self) -> bool:
        """Whether an action was begun of which Slurm shows nothing yet."""
        return bool(self.progress.actions) and not self.progress.drained

    def _note_moments(self) -> None:
        progress, watch = self.progress, self.progress.watch
        if any(kind == VerdictKind.CULPRIT for _, kind in watch.named):
            progress.note("verdict")
        if watch.diagnoses:
            progress.note("cause")
        if progress.drained:
            progress.note("drained")
            watch.stage = "the node is drained, the job waits for its turn"
        if progress.job.n_restarts and progress.job.name == "RUNNING":
            progress.note("running")
            watch.stage = "the job starts again, without the node"
        if len(progress.runs) > 1 and progress.runs[-1]:
            progress.note("step")
            watch.stage = "the job goes on from its checkpoint"

    def _update(self) -> None:
        self.progress.now_ns = self.clock.mono_ns()
        self.progress.watch.since_fault_ns = self.progress.since("fault")
        self.views.update(self.progress)
        self.shares.divide(is_loading=not self.progress.runs[-1])
        poll_ns = 0 if self._is_pending() else _SLURM_POLL_NS
        if self.progress.now_ns - self.answered_ns >= poll_ns:
            self._ask_slurm()
        self.follow(self.progress)
        time.sleep(_POLL_S)

    def _ask_slurm(self) -> None:
        """Ask it; one answer too late is no reason to end."""
        try:
            self.views.ask_slurm(self.progress)
        except RetryableError:
            if self.clock.mono_ns() - self.answered_ns > _PATIENCE_NS:
                raise
        else:
            self.answered_ns = self.clock.mono_ns()
