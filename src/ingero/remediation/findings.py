"""What a policy decides on: findings about nodes, and what Fleet and the scheduler said last. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ingero.model.collectives import Worker
from ingero.model.verdicts import Judgement, Verdict, VerdictKind, describe_rank
from ingero.units import NS_PER_S


@dataclass(frozen=True, slots=True)
class ClusterReading:
    """What Fleet said of one cluster.

    Attributes:
        judgement: Its verdicts.
        judged_age_ns: How long ago Fleet judged.
        n_known: Nodes that Fleet knows.
        n_active: Those that are active.
        has_quorum: Whether that is enough for a threshold.
        in_panic: Whether so many nodes fell at once that nobody is judged.
        causes: Why workers are slow, as far as their agents have answered: the kind of the first cause, empty where an
            agent declined.
    """

    judgement: Judgement
    judged_age_ns: int
    n_known: int
    n_active: int
    has_quorum: bool
    in_panic: bool
    causes: Mapping[Worker, str] = field(default_factory=dict)

    @property
    def coverage(self) -> float:
        """Share of the known nodes that are active."""
        return self.n_active / self.n_known if self.n_known else 0.0


@dataclass(frozen=True, slots=True)
class NodeView:
    """What the scheduler says of one node, or of one device where it takes out devices.

    Attributes:
        name: As the scheduler calls it.
        in_service: Whether it takes jobs and nobody drains it.
        state: As the scheduler writes it.
        mark: Id of the action of ours that its reason names; empty for none.
        reason: As the scheduler shows it.
        node: Of a device, the scheduler's name of its node; empty for a node.
    """

    name: str
    in_service: bool
    state: str = ""
    mark: str = ""
    reason: str = ""
    node: str = ""


@dataclass(frozen=True, slots=True)
class CulpritFinding:
    """One node with the worst of its ranks, tracked over several polls.

    Attributes:
        episode: Its id, kept as long as the node is a culprit with short breaks.
        cluster_id: The cluster.
        node_id: The node, as its agent names it.
        verdict: Of its worst rank; of any kind, the policy decides.
        seen_ns: Monotonic time since which it has been a culprit at every poll.
        progressed_ns: Monotonic time at which the rank was last seen to have worked; None before it was.
    """

    episode: str
    cluster_id: str
    node_id: str
    verdict: Verdict
    seen_ns: int
    progressed_ns: int | None

    @property
    def description(self) -> str:
        """One line for a person, short enough for a scheduler's reason."""
        worker = describe_rank(self.verdict.rank)
        return f"{self.verdict.kind.value} {worker}: {self.verdict.reason}"

    def as_json(self) -> dict[str, Any]:
        """The evidence that an action is kept with."""
        verdict = self.verdict
        return {
            "episode": self.episode,
            "cluster_id": self.cluster_id,
            "node_id": self.node_id,
            "rank": verdict.rank.rank,
            "job": verdict.rank.job,
            "labels": dict(verdict.rank.labels),
            "resource": dict(verdict.rank.resource),
            "verdict": verdict.kind.value,
            "reason": verdict.reason,
            "evidence_log10": verdict.evidence,
            "slowdown": verdict.slowdown.median if verdict.slowdown else None,
            "lost_gpu_s": verdict.lost_gpu_ns / NS_PER_S,
            "peers": len(verdict.peers),
            "victims": [describe_rank(rank) for rank in verdict.victims],
            "onset_entry_ns": verdict.onset.entry_ns if verdict.onset else None,
            "n_ops": verdict.n_ops,
        }


def group_by_node(judgement: Judgement) -> Mapping[str, tuple[Verdict, ...]]:
    """Verdicts of each node, the one that carries most evidence of a culprit first."""
    nodes: dict[str, list[Verdict]] = {}
    for verdict in judgement.verdicts:
        nodes.setdefault(verdict.rank.node_id, []).append(verdict)
    return {
        node: tuple(
            sorted(of, key=lambda one: (one.kind is not VerdictKind.CULPRIT, -one.evidence))
        )
        for node, of in nodes.items()
    }


@dataclass(frozen=True, slots=True)
class SiteReading:
    """One poll of Fleet and of the scheduler.

    Attributes:
        clusters: What Fleet said, by cluster; None when it did not answer.
        nodes: What the scheduler said, by its node names; None when it did not answer, or cannot be asked.
        can_read_nodes: Whether this scheduler can be asked at all.
        problems: Why something is None.
    """

    clusters: Mapping[str, ClusterReading] | None
    nodes: Mapping[str, NodeView] | None
    can_read_nodes: bool = True
    problems: tuple[str, ...] = field(default=())
