"""What was concluded of a cluster in one round: values that the parts of the processor hand on. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from ingero.fleet.processors.collectives.cuts import CostCut
from ingero.fleet.processors.collectives.lags import PeerLag
from ingero.model.collectives import Worker
from ingero.model.verdicts import Judgement, Verdict, VerdictKind

QUIET: Final = frozenset({VerdictKind.ORDINARY, VerdictKind.UNKNOWN})
"""Verdicts that say nothing against a worker."""


@dataclass(frozen=True, slots=True)
class VerdictChange:
    """A worker's verdict became another.

    Attributes:
        before: What it was; None when nothing was said of the worker.
        verdict: What it is.
    """

    before: VerdictKind | None
    verdict: Verdict

    @property
    def is_quiet(self) -> bool:
        """Whether neither verdict says anything."""
        return self.verdict.kind in QUIET and (self.before is None or self.before in QUIET)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """One round's result for one cluster.

    Attributes:
        judgement: Every verdict as of now.
        history: The same, naming also whose alarm has cleared since, who was left behind, and who is silent. Above
            `MAX_HISTORY` workers it is up to ``cost_interval`` old.
        lags: Of the communicators that reported in this round.
        changes: Against the round before.
        judged_ns: Monotonic time of the round.
        alpha: Budget per operation that the Judge works with.
        generation: Which Judge this is of; its sums are since that one began.
        is_dated: Whether the cluster's pushes come from a log, of which costs are reported by its cuts.
        cut: The newest cut; None before the first.
    """

    judgement: Judgement
    history: Judgement
    lags: tuple[PeerLag, ...]
    changes: tuple[VerdictChange, ...]
    judged_ns: int
    alpha: float
    generation: int = 1
    is_dated: bool = False
    cut: CostCut | None = None

    def at(self, cut: CostCut) -> Conclusion:
        """What this would be, as far as costs go, had it been concluded at a cut."""
        return replace(self, history=cut.history, generation=cut.generation)


def join_jobs(cluster_id: str, jobs: Sequence[Judgement]) -> Judgement:
    """One judgement for all jobs of a cluster, which share no communicator; each was judged by itself."""
    return Judgement(
        cluster_id,
        tuple(verdict for job in jobs for verdict in job.verdicts),
        total_wait_gpu_ns=sum(job.total_wait_gpu_ns for job in jobs),
        charged_gpu_ns=sum(job.charged_gpu_ns for job in jobs),
        unattributed_gpu_ns=sum(job.unattributed_gpu_ns for job in jobs),
        counts=jobs[0].counts if jobs else {},  # the Judge counts over all of them
    )


def leave_out(
    judgement: Judgement, silent: Collection[Worker]
) -> tuple[Judgement, tuple[Verdict, ...]]:
    """A judgement without some workers, with sums of those that stay; and the verdicts that were left out."""
    ended = tuple(verdict for verdict in judgement.verdicts if verdict.rank.worker in silent)
    if not ended:
        return judgement, ()
    stay = tuple(verdict for verdict in judgement.verdicts if verdict.rank.worker not in silent)
    total = sum(verdict.wait_ns * verdict.rank.n_gpus for verdict in stay)
    charged = sum(sum(verdict.charged_to.values()) * verdict.rank.n_gpus for verdict in stay)
    kept = replace(
        judgement,
        verdicts=stay,
        total_wait_gpu_ns=total,
        charged_gpu_ns=charged,
        unattributed_gpu_ns=total - charged,
    )
    return kept, ended
