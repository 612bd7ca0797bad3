"""Runs ``ingero up``: starts everything, injects the faults, asks the Fleet until the time is over."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from ingero.errors import IngeroError
from ingero.model.hang import HangCause
from ingero.model.verdicts import ALARMS, IMBALANCES, VerdictKind
from ingero.sim.cluster.agents import run_agents, socket_of
from ingero.sim.cluster.alerts import SinkView, run_sink
from ingero.sim.cluster.cleanup import Cleanup, open_cleanup
from ingero.sim.cluster.faults import INSIDE, inject, inject_into_job
from ingero.sim.cluster.fleets import FleetView, open_fleets
from ingero.sim.cluster.hosts import Cluster, open_cluster
from ingero.sim.cluster.load import ReservedResources, find_disk_folder, open_load
from ingero.sim.cluster.recording import open_recording
from ingero.sim.cluster.result import Progress, UpSettings, build_result, find_detection
from ingero.sim.cluster.shares import open_shares
from ingero.sim.cluster.torch_job import JobFile, JobHost, TorchJob
from ingero.sim.cluster.warm_up import WarmUp
from ingero.sim.job import Job, JobSettings
from ingero.sim.runner import get_program
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.web_authorities import WebAuthorities

_SETTLE_NS: Final = 20 * NS_PER_S
"""How long to go on after the expected verdict, at most, to see what is said of the others and why."""
LIVE: Final = ("processors.nccl.reorder_window=500ms", "processors.nccl.judge_interval=250ms")
"""Settings of our own Fleet: a live agent's pushes come in order, on one connection, so a short window is enough."""
LOAD_NS: Final = 2 * NS_PER_MS
"""Processor time per step of a job whose processors get load."""
LOAD_BYTES: Final = 4 * 4096
"""Read from the disk per step by a rank whose disk gets load: four requests, 0.2 ms of 50 on an idle disk."""
TAKEOVER_TIMEOUT_NS: Final = 60 * NS_PER_S
"""No other Fleet judges this long after one was killed: none will."""
_POLL_S: Final = 0.2


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
        cleanup = stack.enter_context(open_cleanup())
        kinds = {fault.kind for fault in settings.faults}
        place = find_disk_folder() if kinds & {"io-hog", "disk"} else None
        folder = Path(tempfile.mkdtemp(prefix="ingero-up-", dir=place))
        cleanup.add("rm", "-rf", "--", str(folder))
        reserved = stack.enter_context(open_load(() if settings.job else kinds, folder))
        slowable = settings.slowable_links
        cluster = stack.enter_context(open_cluster(settings.n_ranks, cleanup, slowable))
        progress.isolation = cluster.isolation
        progress.note = "; ".join(filter(None, (cluster.note, settings.probes_note)))
        follow(progress)
        reachable = f"receivers.otlp.protocols.http.endpoint={cluster.address}:0"
        recording = stack.enter_context(open_recording(settings, progress, folder))
        overrides = (*LIVE, reachable, *recording)
        fleets = stack.enter_context(open_fleets(settings.n_fleets, overrides, folder, clock))
        if settings.job is not None:
            job = stack.enter_context(open_torch_job(settings, cluster, cleanup, folder))
        else:
            job = stack.enter_context(open_simulated_job(settings, folder, cluster, reserved))
        shared = {
            "cluster_id": cluster_id,
            "n_ranks": settings.n_ranks,
            "fleets": fleets.urls,
            "folder": str(folder),
            "push_interval_ns": settings.push_interval_ns,
            "files": find_libraries(settings.job),
        }
        stack.enter_context(run_agents(cluster, job, shared))
        client = stack.enter_context(httpx.Client(timeout=10, verify=WebAuthorities()))
        view = FleetView(fleets, cluster_id, client)
        sockets = [socket_of(folder, rank) for rank in range(settings.n_ranks)]
        sink = stack.enter_context(run_sink(sockets, client))
        job.release()
        run = _Run(settings, job, (view, sink), progress, follow, clock)
        run.await_steady()
        run.inject(cluster, reserved)
        run.watch()
        progress.reports = fleets.list_reports()
    return build_result(settings, progress)


@contextmanager
def open_torch_job(
    settings: UpSettings, cluster: Cluster, cleanup: Cleanup, folder: Path
) -> Iterator[Job | TorchJob]:
    """A real job, held, each of its ranks with a share of the processors.

    Args:
        settings: What to run, and the faults that it has to be prepared for.
        cluster: Where.
        cleanup: Removes what it needs.
        folder: Of the ranks' temporary files too: it lies on a disk where disks can be made slow.

    Raises:
        UnsupportedError: Processor time cannot be divided here.
    """
    assert settings.job is not None, "the caller made sure"
    slow_disks = settings.ranks_of("disk")
    with open_shares(len(cluster.hosts), cleanup, slow_disks=slow_disks) as shares:
        hosts = [
            JobHost(host.prefix, host.address, host.interface, share)
            for host, share in zip(cluster.hosts, shares, strict=True)
        ]
        inside = {
            rank: f"{fault.kind}:{fault.amount}"
            for fault in settings.faults
            if fault.kind in INSIDE
            for rank in (range(settings.n_ranks) if fault.rank is None else (fault.rank,))
        }
        with TorchJob(settings.job, hosts, folder, f"up-{os.getpid()}", inside) as running:
            yield running


@contextmanager
def open_simulated_job(
    settings: UpSettings, folder: Path, cluster: Cluster, reserved: ReservedResources
) -> Iterator[Job | TorchJob]:
    """The simulated job, held."""
    with Job(plan_job(settings, folder, cluster, reserved)) as job:
        if reserved.processor is not None:
            for rank in settings.ranks_of("cpu-hog"):
                reserved.processor.pin(job.pids[rank])
        yield job


def find_libraries(job: JobFile | None) -> list[str]:
    """What agents probe before anything runs: nothing is missed while they look for it."""
    found = job.libraries if job is not None else sorted(get_program().parent.glob("lib*"))
    return [str(path) for path in found]


def plan_job(
    settings: UpSettings, folder: Path, cluster: Cluster, reserved: ReservedResources
) -> JobSettings:
    """The job that the faults can be seen in."""
    kinds = {fault.kind for fault in settings.faults}
    disk = reserved.disk
    return JobSettings(
        settings.n_ranks,
        folder,
        cluster.address,
        [host.prefix for host in cluster.hosts],
        settings.seed,
        load_ns=LOAD_NS if "cpu-hog" in kinds else 0,
        data=dict.fromkeys(settings.ranks_of("io-hog"), disk.path) if disk else {},
        load_bytes=LOAD_BYTES if disk else 0,
        has_pairs="slow-link" in kinds,
        has_reports=not settings.has_probes,
    )


@dataclass(slots=True)
class _Run:
    """The part of a run between the start and the end."""

    settings: UpSettings
    job: Job | TorchJob
    views: tuple[FleetView, SinkView]
    progress: Progress
    follow: Callable[[Progress], None]
    clock: Clock

    def await_steady(self) -> None:
        """Wait until Fleet has compared every rank for a while."""
        self.progress.stage = "warming up"
        warm_up = WarmUp(self.settings.n_ranks, self.clock.mono_ns())
        loading = self.job if isinstance(self.job, TorchJob) else None
        while not warm_up.is_over(
            self.progress.judgement, self.clock.mono_ns(), self.progress.hang
        ):
            self._update(())
            # Not every program meets at torchrun's store; each that computes has loaded what it needs.
            has_begun = self.progress.judgement is not None
            if loading is not None and loading.divide(has_begun=has_begun):
                loading = None

    def inject(self, cluster: Cluster, reserved: ReservedResources) -> None:
        """Turn every fault on."""
        for fault in self.settings.faults:
            if isinstance(self.job, TorchJob):
                inject_into_job(fault, self.job, cluster)
            else:
                inject(fault, self.job, cluster, reserved)
        names = ", ".join(
            fault.kind if fault.rank is None else f"{fault.kind} of rank {fault.rank}"
            for fault in self.settings.faults
        )
        self.progress.stage = f"running with {names}" if names else "running"

    def watch(self) -> None:
        """Look for a while, and note by how much strangers disturbed the job meanwhile."""
        began_ns, waited = self.clock.mono_ns(), self._read_kept_waiting()
        self.progress.injected_wall_ns = self.clock.wall_ns()
        self._update_until_settled(began_ns)
        took_ns = max(self.clock.mono_ns() - began_ns, 1)
        self.progress.kept_waiting = tuple(
            max(now - then, 0) / took_ns
            for then, now in zip(waited, self._read_kept_waiting(), strict=True)
        )

    def _read_kept_waiting(self) -> tuple[int, ...]:
        return self.job.read_kept_waiting() if isinstance(self.job, TorchJob) else ()

    def _update_until_settled(self, began_ns: int) -> None:
        """Look until the time is over, or the expected was said and settled; what was said late may still settle."""
        settled_ns = None
        gone = [fault.rank for fault in self.settings.faults if fault.kind == "kill"]
        while True:
            now_ns = self.clock.mono_ns()
            self.progress.since_fault_ns = now_ns - began_ns
            self._update([rank for rank in gone if rank is not None])
            if self._is_handing_over():
                continue
            if find_detection(self.settings, self.progress) is not None:
                settled_ns = settled_ns or now_ns
                is_late = now_ns - settled_ns >= _SETTLE_NS
                if is_late or self._is_explained():
                    return
            is_due = now_ns - began_ns >= self.settings.duration_ns and settled_ns is None
            if is_due or self._is_over():
                return

    def _is_handing_over(self) -> bool:
        """Kill the Fleet that judges when it is time; whether another still has to take over."""
        kill_ns, fleets = self.settings.kill_fleet_ns, self.views[0].fleets
        since_ns = self.progress.since_fault_ns or 0
        if kill_ns is None or self._is_over():
            return False
        if not fleets.is_killed:
            is_done = since_ns >= kill_ns and fleets.kill_judge()
            self.progress.stage += ", a Fleet killed" if is_done else ""
            return True
        if self.progress.takeover_s is None and since_ns - kill_ns > TAKEOVER_TIMEOUT_NS:
            raise IngeroError("no Fleet has taken over from the killed one")
        return self.progress.takeover_s is None

    def _is_over(self) -> bool:
        """Whether a real job has come to its end."""
        return isinstance(self.job, TorchJob) and self.job.is_over

    def _is_explained(self) -> bool:
        """Whether Fleet has said something of every rank, and why each that it names is slow or stands."""
        if any(fault.is_hang for fault in self.settings.faults):
            roots = self.progress.hang["roots"] if self.progress.hang else []
            missing = {root["rank"] for root in roots if root["cause"] != HangCause.ENDED}
            return missing <= self.progress.diagnoses.keys()
        verdicts = self.progress.judgement.verdicts if self.progress.judgement else ()
        slow = {rank for rank, kind in self.progress.named if kind in ALARMS}
        is_uneven = any(verdict.kind in IMBALANCES for verdict in verdicts)
        return (
            (bool(self.progress.uneven) or not is_uneven)
            and slow <= self.progress.diagnoses.keys()
            and all(verdict.kind is not VerdictKind.ORDINARY for verdict in verdicts)
        )

    def _update(self, gone: Sequence[int]) -> None:
        self.job.check(gone)
        fleet, sink = self.views
        fleet.update(self.progress)
        sink.update(self.progress.alerts, self.progress.since_fault_ns)
        self.follow(self.progress)
        time.sleep(_POLL_S)
