"""What a run of ``ingero up`` was asked, how far it is, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ingero.model.verdicts import ALARMS, Judgement, Verdict, VerdictKind
from ingero.sim.cluster.alerts import Alerts
from ingero.sim.cluster.faults import Fault
from ingero.sim.cluster.torch_job import JobFile
from ingero.units import NS_PER_S

NO_PROBES: Final = "no probes: the simulator reports its own calls"


@dataclass(frozen=True, slots=True)
class UpSettings:
    """What to run.

    Attributes:
        n_ranks: Hosts, with one rank each.
        faults: What to inject once the job runs evenly.
        seed: Of the job's jitter.
        duration_ns: After the injection.
        push_interval_ns: Of the agents.
        has_probes: Whether agents probe; otherwise the simulated ranks tell their own calls.
        job: A real job to run in place of the simulated one; None for that.
        record: File for what the agents pushed; None keeps nothing.
        n_fleets: Fleets that act as one.
        kill_fleet_ns: When, after the injection, the one that judges is killed; None for never.
    """

    n_ranks: int
    faults: tuple[Fault, ...]
    seed: int
    duration_ns: int
    push_interval_ns: int
    has_probes: bool = True
    job: JobFile | None = None
    record: Path | None = None
    n_fleets: int = 1
    kill_fleet_ns: int | None = None

    def ranks_of(self, kind: str) -> list[int]:
        """Ranks that faults of this kind hit."""
        return [
            fault.rank for fault in self.faults if fault.kind == kind and fault.rank is not None
        ]

    @property
    def slowable_links(self) -> list[int]:
        """Ranks whose packets are to be late."""
        return [
            fault.rank
            for fault in self.faults
            if fault.rank is not None and fault.is_network and fault.unit != "bit/s"
        ]

    @property
    def probes_note(self) -> str:
        """What is weaker without probes; empty with them."""
        return "" if self.has_probes else NO_PROBES


@dataclass(slots=True)
class Progress:
    """Where a run is.

    Attributes:
        stage: What happens now, for a person.
        isolation: How hosts are kept apart.
        note: What is weaker than usual; may be empty.
        injected_wall_ns: Time of the injection; None before it.
        since_fault_ns: Since the injection; None before it.
        kept_waiting: By rank of a real job, the part of the time since the injection that other work on this machine
            kept it from running.
        judgement: What Fleet says of the ranks; None before it says anything.
        hang: What Fleet says of ranks that stand still; None before.
        alerts: What the agents' local readers received.
        diagnoses: Why culprits are slow, as their agents answered Fleet, with the time since the injection.
        uneven: The same of ranks that are slow in turns with their peers, or together with all of their stage.
        takeover_s: From the kill of a Fleet until another was seen to judge; None without one.
        reports: Alarms that left Fleets as records; None where that was not looked at.
        named: Ranks that were ever named and by which verdict, with the time since the injection.
    """

    stage: str = "starting"
    isolation: str = ""
    note: str = ""
    injected_wall_ns: int | None = None
    since_fault_ns: int | None = None
    kept_waiting: tuple[float, ...] = ()
    judgement: Judgement | None = None
    hang: dict[str, Any] | None = None
    alerts: Alerts = field(default_factory=Alerts)
    named: dict[tuple[int, str], int | None] = field(default_factory=dict)
    diagnoses: dict[int, tuple[dict[str, Any], int | None]] = field(default_factory=dict)
    uneven: dict[int, tuple[dict[str, Any], int | None]] = field(default_factory=dict)
    takeover_s: float | None = None
    reports: list[dict[str, Any]] | None = None


def find_detection(settings: UpSettings, progress: Progress) -> float | None:
    """Seconds from the injection until every rank with a fault was named; None while one was not."""
    delays = []
    for fault in settings.faults:
        if fault.rank is None:
            return None
        times = [
            at
            for rank in fault.ranks
            if (at := progress.named.get((rank, fault.verdict))) is not None
        ]
        if not times:
            return None
        delays.append(min(times))
    return max(delays) / NS_PER_S if delays else None


def find_wrongly_named(settings: UpSettings, progress: Progress) -> list[int]:
    """Ranks that were ever named and have no fault, or one that is no rank's own.

    With whom the rank of a ``link`` fault has links only the job knows: a rank that is named as an end of one is right.
    """
    own = {rank for fault in settings.faults for rank in fault.ranks if not fault.is_network}
    right = {(rank, fault.verdict) for fault in settings.faults for rank in fault.ranks}
    has_link = any(fault.kind == "link" for fault in settings.faults)
    named = {who for who in progress.named if who not in right and who[0] not in own}
    return sorted({rank for rank, kind in named if not (has_link and kind == VerdictKind.NETWORK)})


def build_result(settings: UpSettings, progress: Progress) -> dict[str, Any]:
    """The last JSON object: verdicts of Fleet at the end, and everybody who was ever named."""
    verdicts = progress.judgement.verdicts if progress.judgement else ()
    detection_s = find_detection(settings, progress)
    return {
        "ranks": settings.n_ranks,
        "isolation": progress.isolation,
        "note": progress.note,
        "probes": settings.has_probes,
        "job": str(settings.job.file) if settings.job else None,
        "seed": settings.seed,
        "push_interval_s": settings.push_interval_ns / NS_PER_S,
        "faults": describe_faults(settings),
        "verdicts": [_verdict_json(verdict) for verdict in verdicts],
        "culprits": _named(progress, "culprit"),
        "network": _named(progress, "network"),
        "victims": [v.rank.rank for v in verdicts if v.kind is VerdictKind.VICTIM],
        "missing_ranks": _named(progress, "hang"),
        "hang": progress.hang if progress.hang and progress.hang["missing_ranks"] else None,
        "wrongly_named": find_wrongly_named(settings, progress),
        "diagnosis": find_diagnosis(settings, progress),
        "diagnoses": {
            str(rank): _diagnosis_json(progress, rank)
            for rank in sorted(progress.uneven | progress.diagnoses)
        },
        "alerts": progress.alerts.as_json(),
        "fleets": settings.n_fleets,
        "takeover_s": None if progress.takeover_s is None else round(progress.takeover_s, 2),
        "episodes": progress.reports,
        "detection_s": None if detection_s is None else round(detection_s, 2),
        "kept_waiting": [round(share, 3) for share in progress.kept_waiting],
        "watched_s": round((progress.since_fault_ns or 0) / NS_PER_S, 1),
        "note_on_work": _note_on_work(settings),
    }


def describe_faults(settings: UpSettings) -> list[dict[str, Any]]:
    """What was injected, as JSON-able values."""
    return [
        {"kind": fault.kind, "rank": fault.rank, "amount": fault.amount}
        | ({"unit": fault.unit} if fault.unit else {})
        for fault in settings.faults
    ]


def find_diagnosis(settings: UpSettings, progress: Progress) -> dict[str, Any] | None:
    """Why the rank with the fault is slow or stands, else the first that was named; None where no agent answered."""
    faulty = [fault.rank for fault in settings.faults if fault.rank is not None]
    known = [rank for rank in (*faulty, *progress.diagnoses) if rank in progress.diagnoses]
    known += list(progress.uneven)
    return _diagnosis_json(progress, known[0]) if known else None


def _diagnosis_json(progress: Progress, rank: int) -> dict[str, Any]:
    diagnosis, at_ns = (progress.uneven | progress.diagnoses)[rank]
    kinds = (*sorted(ALARMS), "hang")
    named_ns = next((at for kind in kinds if (at := progress.named.get((rank, kind)))), None)
    return {
        "rank": rank,
        "is_named": rank in progress.diagnoses,
        **diagnosis,
        "after_verdict_s": round((at_ns - named_ns) / NS_PER_S, 2)
        if at_ns is not None and named_ns is not None
        else None,
    }


def _note_on_work(settings: UpSettings) -> str:
    real = "the pushes, the Fleet and its verdicts are real"
    if settings.job is not None:
        return f"a real job, {settings.job.file.name}; the probes, {real}"
    if settings.has_probes:
        return f"simulated GPUs; the probes, {real}"
    return f"simulated GPUs that report their own calls, no probes; {real}"


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
