"""What the detection concluded about a worker: values that Fleet, replay and the benchmark pass on and print.

A *worker* is what reports as one rank; it may stand for several GPUs. Pure values, no behaviour beyond
spelling themselves as JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Final, TypeVar

from ingero.errors import BadDataError
from ingero.model.collectives import Rank


class VerdictKind(StrEnum):
    """The closed list of answers. Only `CULPRIT` and `NETWORK` are worth paging for."""

    CULPRIT = "culprit"
    """Persistently slower in its own work than its role peers, by more than the alarm tier."""
    DRAG = "drag"
    """The same by more than the notice tier: reported with its cost, never paged."""
    NETWORK = "network"
    """Own work ordinary, transfers persistently slower than those of the peers' communicators."""
    VICTIM = "victim"
    """Ordinary own work, and much of its waiting is charged to others."""
    IMBALANCE_STAGE = "imbalance:stage"
    """Its whole stage works longer than the other stages: it has more work, or something that all its nodes share is
    slow. None stands out among them."""
    IMBALANCE_DATA = "imbalance:data"
    """The slow one rotates among the peers: uneven work, as of batches that differ; no node is at fault."""
    CLUSTER = "cluster"
    """All are slower than they were themselves; none stands out."""
    UNKNOWN = "unknown"
    """Not enough to judge; ``reason`` says what is missing."""
    ORDINARY = "ordinary"
    """Judged, and like its peers."""


ALARMS: Final = frozenset({VerdictKind.CULPRIT, VerdictKind.NETWORK})
"""Worth paging for."""
IMBALANCES: Final = frozenset({VerdictKind.IMBALANCE_DATA, VerdictKind.IMBALANCE_STAGE})
"""Peers are slow in turns, or all together: no single node is at fault."""


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
        excess_ns: Own time above the median peer's since onset, with history that of all its slowdowns; of a stage that
            works longer than the others above theirs, in all; otherwise 0 without onset.
        since_onset_ns: Own time in that; otherwise 0 without onset.
        n_ops: Paired operations compared.
        victims: For a culprit, drag or network verdict: who waited for it, longest first.
        charged_to: To whom its waiting is charged to, worker → nanoseconds.
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
    since_onset_ns: int = 0

    @property
    def is_alarm(self) -> bool:
        """Whether it is worth paging for."""
        return self.kind in ALARMS


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


ReadT = TypeVar("ReadT", Rank, Verdict, Judgement)


def _name_of(field: str) -> str:
    """The JSON name of a field."""
    return "verdict" if field == "kind" else field


def _rank_json(rank: Rank) -> dict[str, Any]:
    # Spelled out: a page of a large job has as many of these as the job has pairs of peers.
    return {
        "cluster_id": rank.cluster_id,
        "node_id": rank.node_id,
        "rank": rank.rank,
        "n_gpus": rank.n_gpus,
        "labels": dict(rank.labels),
        "job": rank.job,
        "resource": dict(rank.resource),
    }


def _fields_json(value: Verdict | Judgement | Onset | Slowdown) -> dict[str, Any]:
    return {_name_of(one.name): _to_json(getattr(value, one.name)) for one in fields(value)}


def _to_json(value: object) -> object:
    """Fields by name, ranks as objects, kinds by their value."""
    if isinstance(value, Rank):
        return _rank_json(value)
    if isinstance(value, tuple):
        return [_rank_json(rank) for rank in value]
    if isinstance(value, Onset | Slowdown):
        return _fields_json(value)
    return value.value if isinstance(value, StrEnum) else value


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The verdict as JSON-able values; times in nanoseconds, absent is null."""
    charges = [
        {"rank": _rank_json(rank), "wait_ns": wait_ns}
        for rank, wait_ns in verdict.charged_to.items()
    ]
    return _fields_json(verdict) | {"charged_to": charges}


def judgement_json(judgement: Judgement) -> dict[str, Any]:
    """The judgement as JSON-able values."""
    verdicts = [verdict_json(verdict) for verdict in judgement.verdicts]
    page = _fields_json(replace(judgement, verdicts=()))
    return page | {"verdicts": verdicts, "counts": dict(judgement.counts)}


def _read(
    kind: type[ReadT], page: Mapping[str, Any], /, **parsers: Callable[[Any], object]
) -> ReadT:
    """An object from the page's values of its fields, each through its parser if it has one."""
    values = {one.name: page[_name_of(one.name)] for one in fields(kind)}
    return kind(**values | {name: parse(values[name]) for name, parse in parsers.items()})


def parse_judgement(page: Mapping[str, Any]) -> Judgement:
    """The judgement behind `judgement_json`.

    Raises:
        BadDataError: A field is missing or of another kind.
    """
    try:
        return _read(Judgement, page, verdicts=_parse_verdicts, counts=dict)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadDataError(f"not a judgement: {error!r}") from error


def _parse_rank(page: Mapping[str, Any]) -> Rank:
    def pairs(page: dict[str, str]) -> tuple[tuple[str, str], ...]:
        return tuple(page.items())

    # A Fleet of before 0.4 does not say where a rank runs.
    return _read(Rank, {"resource": {}, **page}, labels=pairs, resource=pairs)


def _parse_ranks(pages: Iterable[Mapping[str, Any]]) -> tuple[Rank, ...]:
    return tuple(map(_parse_rank, pages))


def _parse_verdicts(pages: Iterable[Mapping[str, Any]]) -> tuple[Verdict, ...]:
    parsers: dict[str, Callable[[Any], object]] = {
        "rank": _parse_rank,
        "kind": VerdictKind,
        "peers": _parse_ranks,
        "onset": lambda onset: None if onset is None else Onset(**onset),
        "slowdown": lambda slowdown: None if slowdown is None else Slowdown(**slowdown),
        "bet": lambda bet: None if bet is None else Bet(bet),
        "victims": _parse_ranks,
        "charged_to": lambda parts: {_parse_rank(one["rank"]): one["wait_ns"] for one in parts},
    }
    return tuple(_read(Verdict, page, **parsers) for page in pages)
