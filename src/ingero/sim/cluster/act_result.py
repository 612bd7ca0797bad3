"""What a run of ``ingero up --slurm`` was asked, how far it is, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ingero.remediation.records import HOLDING, ActionRecord, FindingRecord
from ingero.sim.cluster.result import Progress, UpSettings, build_result
from ingero.sim.cluster.savings import Savings, StepPoint, count_savings, find_step_ns
from ingero.sim.cluster.slurm_job import SlurmJobState
from ingero.units import NS_PER_MS, NS_PER_S

ActMode = Literal["dry-run", "ask", "auto"]
MODES: Final[tuple[ActMode, ...]] = ("dry-run", "ask", "auto")
"""Those of `ingero.remediation.config.RemediatorConfig`."""
_DELAYS: Final = (
    ("fault", "verdict"),
    ("verdict", "cause"),
    ("cause", "drained"),
    ("verdict", "drained"),
    ("drained", "running"),
    ("running", "step"),
    ("fault", "step"),
)
"""From one moment to another."""
_HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class ActSettings:
    """What to run.

    Attributes:
        up: The cluster, the job and its faults; how long to watch is not used.
        n_spares: Hosts beyond those that the job takes.
        mode: Of the remediator.
        limit_ns: How long to watch after the fault, at most; None until the job has ended.
        gpu_rate: Price of a rank's hour; None where it is not known.
        currency: Of the price.
        has_echo: Whether an Echo runs beside, and is asked at the end.
    """

    up: UpSettings
    n_spares: int = 1
    mode: ActMode = "dry-run"
    limit_ns: int | None = None
    gpu_rate: float | None = None
    currency: str = "USD"
    has_echo: bool = False

    @property
    def rates(self) -> tuple[str, ...]:
        """Settings of our own Fleet that price every GPU alike."""
        if self.gpu_rate is None:
            return ()
        return (
            f"processors.nccl.rates.fallback_rate={self.gpu_rate}",
            f"processors.nccl.rates.currency={self.currency}",
        )

    def price(self, gpu_seconds: float | None) -> float | None:
        """GPU time in money."""
        if gpu_seconds is None or self.gpu_rate is None:
            return None
        return round(gpu_seconds * self.gpu_rate / _HOUR_S, 4)


@dataclass(slots=True)
class ActProgress:
    """Where a run is.

    Attributes:
        watch: What Fleet says.
        job: What Slurm says of the job.
        nodes: What Slurm says of each node, by name.
        runs: Steps that the job's log shows, by run of the job: the first, and one after each requeue.
        actions: What stands in the remediator's journal.
        findings: What its policy makes of each culprit.
        moments: When what happened first, on the monotonic clock.
        approve: What a person types to approve an action that waits; empty where none does.
        now_ns: When this was looked at.
        twin: Which run this is, where it repeats another one.
    """

    watch: Progress = field(default_factory=Progress)
    job: SlurmJobState = field(default_factory=SlurmJobState)
    nodes: dict[str, str] = field(default_factory=dict)
    runs: tuple[tuple[StepPoint, ...], ...] = ()
    actions: tuple[ActionRecord, ...] = ()
    findings: tuple[FindingRecord, ...] = ()
    moments: dict[str, int] = field(default_factory=dict)
    approve: str = ""
    now_ns: int = 0
    twin: str = ""

    @property
    def stage(self) -> str:
        """What is going on, in words."""
        stage = self.watch.stage
        return f"the same job {self.twin.replace('-', ' ')}: {stage}" if self.twin else stage

    def note(self, name: str) -> None:
        """Something has happened, for the first time or again."""
        self.moments.setdefault(name, self.now_ns)

    def since(self, name: str) -> int | None:
        """Nanoseconds since something happened; None where it has not."""
        at_ns = self.moments.get(name)
        return None if at_ns is None else self.now_ns - at_ns

    @property
    def drained(self) -> list[str]:
        """Nodes that Slurm shows as drained."""
        return sorted(name for name, state in self.nodes.items() if "DRAIN" in state)

    @property
    def last_step(self) -> int | None:
        """The newest step that the job's log shows."""
        points = [run[-1] for run in self.runs if run]
        return points[-1].step if points else None


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Mean times of a step, in nanoseconds; None for a stretch of which fewer than two steps were seen.

    Attributes:
        before: Before the fault.
        during: From the fault to the action, or to the end where nothing was done.
        after: From the first step after the job was requeued.
    """

    before: float | None
    during: float | None
    after: float | None


def find_step_times(progress: ActProgress) -> StepTimes:
    """How long a step took, before, during and after."""
    moments = progress.moments
    first = progress.runs[0] if progress.runs else ()
    fault_ns, drained_ns = moments.get("fault"), moments.get("drained")
    during = None if fault_ns is None else find_step_ns(first, fault_ns, drained_ns)
    after = find_step_ns(progress.runs[-1]) if len(progress.runs) > 1 else None
    return StepTimes(find_step_ns(first, 0, fault_ns), during, after)


def find_savings(settings: ActSettings, progress: ActProgress) -> Savings | None:
    """What the action saved; None where nothing was done, or too little was seen."""
    moments = progress.moments
    if "fault" not in moments or "drained" not in moments or len(progress.runs) < 2:
        return None
    span_ns = moments["fault"], moments["drained"]
    return count_savings(progress.runs[0], progress.runs[-1], settings.up.n_ranks, span_ns)


def find_delays(progress: ActProgress) -> dict[str, float | None]:
    """Seconds from one moment of the run to another; None where one of them was not seen."""
    delays = {}
    for begin, end in _DELAYS:
        times = progress.moments.get(begin), progress.moments.get(end)
        is_known = times[0] is not None and times[1] is not None
        delays[f"{begin}_to_{end}"] = (
            round((times[1] - times[0]) / NS_PER_S, 2)  # type: ignore[operator]
            if is_known
            else None
        )
    return delays


def build_act_result(settings: ActSettings, progress: ActProgress) -> dict[str, Any]:
    """The last JSON object."""
    seen = build_result(settings.up, progress.watch)
    savings, steps = find_savings(settings, progress), find_step_times(progress)
    acted = [one for one in progress.actions if one.state in HOLDING]
    saved_s = None if savings is None else savings.as_json()["saved_gpu_seconds"]
    return {
        "culprits": seen["culprits"],
        "drained": progress.drained,
        "requeued": progress.job.n_restarts > 0,
        "finished": progress.job.name == "COMPLETED",
        "saved_gpu_seconds": saved_s,
        "saved_amount": settings.price(saved_s),
        "currency": None if settings.gpu_rate is None else settings.currency,
        "mode": settings.mode,
        "savings": None if savings is None else savings.as_json(),
        "step_ms": {
            "before": to_ms(steps.before),
            "during": to_ms(steps.during),
            "after": to_ms(steps.after),
        },
        "last_step": progress.last_step,
        "diagnosis": seen["diagnosis"],
        "delays_s": find_delays(progress),
        "nodes": progress.nodes,
        "job": {
            "file": seen["job"],
            "state": progress.job.name,
            "restarts": progress.job.n_restarts,
            "nodes": progress.job.nodes,
        },
        "actions": [one.as_json() for one in progress.actions],
        "findings": [one.as_json() for one in progress.findings],
        "policy_clauses": [dict(one) for action in acted for one in action.clauses],
        "ranks": settings.up.n_ranks,
        "spares": settings.n_spares,
        "faults": seen["faults"],
        "wrongly_named": seen["wrongly_named"],
        "verdicts": seen["verdicts"],
        "push_interval_s": seen["push_interval_s"],
    }


def to_ms(step_ns: float | None) -> float | None:
    """Milliseconds, as results show them."""
    return None if step_ns is None else round(step_ns / NS_PER_MS, 1)
