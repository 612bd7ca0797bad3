"""What the journal keeps of an action, and which states it goes through. Pure values.

::

    proposed ──► approved ──► begun ──► done ──► undoing ──► undone
        │            │           │        └────► left (somebody else changed the node)
        └► rejected  └► expired  └► undoing ──► void (it never took effect)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class ActionState(StrEnum):
    """Where an action is."""

    PROPOSED = "proposed"
    """Waits for a person."""
    APPROVED = "approved"
    """A person agreed; it is done when the policy still agrees."""
    REJECTED = "rejected"
    """A person refused."""
    EXPIRED = "expired"
    """Nobody answered in time, or the finding is over."""
    BEGUN = "begun"
    """Written before the scheduler is asked; not known to be in effect."""
    DONE = "done"
    """In effect."""
    UNDOING = "undoing"
    """To be reversed, or to be watched until it is sure that there is nothing to reverse."""
    UNDONE = "undone"
    """Reversed."""
    VOID = "void"
    """It never took effect."""
    LEFT = "left"
    """Somebody else changed the node meanwhile; it is theirs."""


HOLDING: Final = frozenset({ActionState.BEGUN, ActionState.DONE, ActionState.UNDOING})
"""States in which a node is, or may be, out of service by us."""
WAITING: Final = frozenset({ActionState.PROPOSED, ActionState.APPROVED})
ENDED: Final = frozenset({ActionState.UNDONE, ActionState.VOID, ActionState.LEFT})
"""States after which nothing is to be done, unless the scheduler shows the action all the same."""
ASKED_BACK: Final = "a person asked for it back"
"""The remark of an action when a person asks for it to be reversed."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A time by both clocks: the monotonic one counts within one boot, the wall clock beyond.

    Attributes:
        mono_ns: CLOCK_MONOTONIC.
        wall_ns: CLOCK_REALTIME.
        boot: Id of the boot that ``mono_ns`` is of.
    """

    mono_ns: int
    wall_ns: int
    boot: str

    def since(self, past: Moment) -> int:
        """Nanoseconds since then. Across boots by the wall clock, and 0 where that was set back."""
        if past.boot == self.boot:
            return self.mono_ns - past.mono_ns
        return max(0, self.wall_ns - past.wall_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionRecord:
    """One action on one node.

    Attributes:
        action_id: Short, and part of what the scheduler shows.
        episode: The finding that it answers.
        cluster_id: The cluster.
        node_id: The node, as its agent names it.
        target: The same, as the scheduler names it.
        kind: Which actuator.
        state: Where it is.
        began: When it was written first, or begun.
        changed: When its state changed last.
        took_effect: Whether the scheduler has shown it.
        jobs: Jobs to requeue with the number of their restarts; None before they were read.
        evidence: The finding as JSON.
        clauses: What let it, as JSON.
        note: The last remark.
        is_asked_back: Whether a person has asked for it to be reversed.
    """

    action_id: str
    episode: str
    cluster_id: str
    node_id: str
    target: str
    kind: str
    state: ActionState
    began: Moment
    changed: Moment
    took_effect: bool = False
    jobs: Mapping[str, int] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    clauses: tuple[Mapping[str, Any], ...] = ()
    note: str = ""
    is_asked_back: bool = False

    def as_json(self) -> dict[str, Any]:
        """For people and programs; times in nanoseconds since the epoch."""
        return {
            "id": self.action_id,
            "episode": self.episode,
            "cluster_id": self.cluster_id,
            "node_id": self.node_id,
            "target": self.target,
            "kind": self.kind,
            "state": self.state.value,
            "began_unix_ns": self.began.wall_ns,
            "changed_unix_ns": self.changed.wall_ns,
            "took_effect": self.took_effect,
            "jobs": None if self.jobs is None else dict(self.jobs),
            "evidence": dict(self.evidence),
            "clauses": [dict(clause) for clause in self.clauses],
            "note": self.note,
            "asked_back": self.is_asked_back,
        }


@dataclass(frozen=True, slots=True)
class FindingRecord:
    """A finding and what the policy made of it last.

    Attributes:
        episode: Its id.
        cluster_id: The cluster.
        node_id: The node.
        opened_wall_ns: When it was first seen.
        judged_wall_ns: When the policy looked at it last.
        is_open: Whether it still is a finding.
        evidence: As JSON.
        clauses: As JSON.
        decision: One line for a person.
    """

    episode: str
    cluster_id: str
    node_id: str
    opened_wall_ns: int
    judged_wall_ns: int
    is_open: bool
    evidence: Mapping[str, Any]
    clauses: tuple[Mapping[str, Any], ...]
    decision: str

    def as_json(self) -> dict[str, Any]:
        """For people and programs."""
        return {
            "episode": self.episode,
            "cluster_id": self.cluster_id,
            "node_id": self.node_id,
            "opened_unix_ns": self.opened_wall_ns,
            "judged_unix_ns": self.judged_wall_ns,
            "open": self.is_open,
            "decision": self.decision,
            "evidence": dict(self.evidence),
            "clauses": [dict(clause) for clause in self.clauses],
        }
