"""What the detection concluded about a worker: values that Fleet, replay and the benchmark pass on and print.

A *worker* is whoever reports as one rank; it may stand for several GPUs. Pure values, no behaviour beyond
spelling themselves as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ingero.errors import BadDataError
from ingero.model.collectives import Rank


class VerdictKind(StrEnum):
    """The closed list of answers. Only `CULPRIT` and `NETWORK` are worth waking somebody."""

    CULPRIT = "culprit"
    """Persistently slower in its own work than its role peers, by more than the alarm tier."""
    DRAG = "drag"
    """The same by more than the notice tier: reported with its cost, never paged."""
    NETWORK = "network"
    """Own work ordinary, transfers persistently slower than those of the peers' communicators."""
    VICTIM = "victim"
    """Ordinary own work, and much of its waiting is charged to somebody else."""
    IMBALANCE_STAGE = "imbalance:stage"
    """Its whole stage has more work than the other stages; no node is at fault."""
    IMBALANCE_DATA = "imbalance:data"
    """The slow one rotates among the peers; the batches differ, no node is at fault."""
    CLUSTER = "cluster"
    """Everybody is slower than they were themselves; nobody stands out."""
    UNKNOWN = "unknown"
    """Not enough to judge; ``reason`` says what is missing."""
    ORDINARY = "ordinary"
    """Judged, and like its peers."""


class Bet(StrEnum):
    """Which argument carried the evidence."""

    RANK = "rank"
    """It came last among its peers too often: no assumption about noise."""
    POOLED = "pooled"
    """It was slower by more than its peers ever were in the window: uses the size of the gap."""


@dataclass(frozen=True, slots=True)
class Onset:
    """Where the slowdown began.

    Attributes:
        comm: Communicator of the first operation that counted.
        seq: Its sequence number there.
        entry_ns: When the worker entered it, on the worker's own clock.
        op_index: Ordinal among the paired operations that the Judge has seen of this worker, from 0.
    """

    comm: str
    seq: int
    entry_ns: int
    op_index: int


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much slower than the median peer: 1.0 is equal, 2.0 takes twice as long.

    Attributes:
        median: Over the operations since onset (at most the detector's window).
        low: 25th percentile of the same.
        high: 75th percentile.
    """

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer for one worker.

    Attributes:
        rank: The worker.
        kind: See `VerdictKind`.
        reason: One line for a person.
        peers: Workers it was compared with, itself included.
        onset: For culprit, drag and network; else None.
        detected_entry_ns: Entry of the operation at which evidence sufficed, on the worker's clock; else None.
        n_ops_to_detect: Paired operations from onset to there, both included; else None.
        noticed_entry_ns: The same at whichever tier's evidence sufficed first: a culprit has mostly been a drag before.
        slowdown: Against the median peer; None when it was not compared.
        evidence: log10 of the e-value of the tier that carried the verdict, or of the alarm tier for the rest.
        bet: Which bet carried it; None without an alarm.
        own_ns: Its own time in all.
        wait_ns: What it lost waiting for others, in all.
        excess_ns: Own time above the median peer's since onset; 0 without onset.
        n_ops: Paired operations compared.
        victims: For a culprit, drag or network verdict: who waited for it, longest first.
        charged_to: For everybody: whom its waiting is charged to, worker → nanoseconds.
        lost_gpu_ns: Σ over its victims of charged wait × GPUs that waited.
    """

    rank: Rank
    kind: VerdictKind
    reason: str = ""
    peers: tuple[Rank, ...] = ()
    onset: Onset | None = None
    detected_entry_ns: int | None = None
    n_ops_to_detect: int | None = None
    noticed_entry_ns: int | None = None
    slowdown: Slowdown | None = None
    evidence: float = 0.0
    bet: Bet | None = None
    own_ns: int = 0
    wait_ns: int = 0
    excess_ns: int = 0
    n_ops: int = 0
    victims: tuple[Rank, ...] = ()
    charged_to: Mapping[Rank, int] = field(default_factory=dict)
    lost_gpu_ns: int = 0

    @property
    def is_alarm(self) -> bool:
        """Whether somebody should be told now."""
        return self.kind in {VerdictKind.CULPRIT, VerdictKind.NETWORK}


@dataclass(frozen=True, slots=True)
class Judgement:
    """Every verdict about one job, and the sums that must agree.

    Attributes:
        cluster_id: The cluster.
        verdicts: One per worker seen, sorted by (labels, rank, node).
        total_wait_gpu_ns: Σ wait × GPUs over all workers.
        charged_gpu_ns: The part charged to culprits, drags and slow links.
        unattributed_gpu_ns: The rest; the two add up to the total exactly.
        counts: What was read, dropped and why, by name.
    """

    cluster_id: str
    verdicts: tuple[Verdict, ...]
    total_wait_gpu_ns: int = 0
    charged_gpu_ns: int = 0
    unattributed_gpu_ns: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def culprits(self) -> tuple[Verdict, ...]:
        """The verdicts of kind culprit."""
        return tuple(v for v in self.verdicts if v.kind is VerdictKind.CULPRIT)


def describe_rank(rank: Rank) -> str:
    """How a person names the worker: its coordinates, else its rank, else its node."""
    if rank.labels:
        return ", ".join(f"{name} {value}" for name, value in rank.labels)
    if rank.rank < 0:
        return rank.node_id
    return f"rank {rank.rank}" + (f" of job {rank.job}" if rank.job else "")


def _rank_json(rank: Rank) -> dict[str, Any]:
    return {
        "cluster_id": rank.cluster_id,
        "node_id": rank.node_id,
        "rank": rank.rank,
        "n_gpus": rank.n_gpus,
        "labels": dict(rank.labels),
        "job": rank.job,
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON-able values; times in nanoseconds, absent is null."""
    onset, slowdown = verdict.onset, verdict.slowdown
    return {
        "rank": _rank_json(verdict.rank),
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "peers": [_rank_json(peer) for peer in verdict.peers],
        "onset": None
        if onset is None
        else {
            "comm": onset.comm,
            "seq": onset.seq,
            "entry_ns": onset.entry_ns,
            "op_index": onset.op_index,
        },
        "detected_entry_ns": verdict.detected_entry_ns,
        "n_ops_to_detect": verdict.n_ops_to_detect,
        "noticed_entry_ns": verdict.noticed_entry_ns,
        "slowdown": None
        if slowdown is None
        else {"median": slowdown.median, "low": slowdown.low, "high": slowdown.high},
        "evidence": verdict.evidence,
        "bet": None if verdict.bet is None else verdict.bet.value,
        "own_ns": verdict.own_ns,
        "wait_ns": verdict.wait_ns,
        "excess_ns": verdict.excess_ns,
        "n_ops": verdict.n_ops,
        "victims": [_rank_json(victim) for victim in verdict.victims],
        "charged_to": [
            {"rank": _rank_json(rank), "wait_ns": wait_ns}
            for rank, wait_ns in verdict.charged_to.items()
        ],
        "lost_gpu_ns": verdict.lost_gpu_ns,
    }


def judgement_json(judgement: Judgement) -> dict[str, Any]:
    """The judgement as JSON-able values."""
    return {
        "cluster_id": judgement.cluster_id,
        "verdicts": [verdict_json(verdict) for verdict in judgement.verdicts],
        "total_wait_gpu_ns": judgement.total_wait_gpu_ns,
        "charged_gpu_ns": judgement.charged_gpu_ns,
        "unattributed_gpu_ns": judgement.unattributed_gpu_ns,
        "counts": dict(judgement.counts),
    }


def parse_judgement(page: Mapping[str, Any]) -> Judgement:
    """The judgement behind `judgement_json`.

    Raises:
        BadDataError: A field is missing or of another kind.
    """
    try:
        return Judgement(
            cluster_id=page["cluster_id"],
            verdicts=tuple(_parse_verdict(verdict) for verdict in page["verdicts"]),
            total_wait_gpu_ns=page["total_wait_gpu_ns"],
            charged_gpu_ns=page["charged_gpu_ns"],
            unattributed_gpu_ns=page["unattributed_gpu_ns"],
            counts=dict(page["counts"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadDataError(f"not a judgement: {error!r}") from error


def _parse_rank(page: Mapping[str, Any]) -> Rank:
    return Rank(
        cluster_id=page["cluster_id"],
        node_id=page["node_id"],
        rank=page["rank"],
        n_gpus=page["n_gpus"],
        labels=tuple(page["labels"].items()),
        job=page["job"],
    )


def _parse_verdict(page: Mapping[str, Any]) -> Verdict:
    onset, slowdown, bet = page["onset"], page["slowdown"], page["bet"]
    return Verdict(
        rank=_parse_rank(page["rank"]),
        kind=VerdictKind(page["verdict"]),
        reason=page["reason"],
        peers=tuple(map(_parse_rank, page["peers"])),
        onset=None if onset is None else Onset(**onset),
        detected_entry_ns=page["detected_entry_ns"],
        n_ops_to_detect=page["n_ops_to_detect"],
        noticed_entry_ns=page["noticed_entry_ns"],
        slowdown=None if slowdown is None else Slowdown(**slowdown),
        evidence=page["evidence"],
        bet=None if bet is None else Bet(bet),
        own_ns=page["own_ns"],
        wait_ns=page["wait_ns"],
        excess_ns=page["excess_ns"],
        n_ops=page["n_ops"],
        victims=tuple(map(_parse_rank, page["victims"])),
        charged_to={_parse_rank(part["rank"]): part["wait_ns"] for part in page["charged_to"]},
        lost_gpu_ns=page["lost_gpu_ns"],
    )
