"""Settings of the health loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from ingero.agent.health.signals.baseline import BaselineSettings
from ingero.agent.health.signals.classify import ClassifierSettings
from ingero.agent.health.signals.machine import MachineSettings
from ingero.agent.health.signals.score import ScoreSettings
from ingero.agent.health.threshold_choice import ModeSettings
from ingero.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """How often the node is read and pushed, and how it is judged.

    Attributes:
        push_interval_ns: Between regular pushes.
        sample_interval_ns: Between two samples; no longer than the push interval.
        early_push_delta: A score that moved by more than this is pushed at once; 1 or more never.
        early_push_gap_ns: Least time between an early push and the push before it.
        peers_wait_ns: How long a node is under Fleet's threshold before it asks Fleet once more and then calls itself
            a straggler. The pushes of peers that fell with it arrive meanwhile, and Fleet withholds the threshold.
            A threshold that is not Fleet's does not wait.
    """

    push_interval_ns: int = 10 * NS_PER_S
    sample_interval_ns: int = NS_PER_S
    early_push_delta: float = 0.05
    early_push_gap_ns: int = NS_PER_S
    peers_wait_ns: int = 0
    machine: MachineSettings = field(default_factory=MachineSettings)
    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    score: ScoreSettings = field(default_factory=ScoreSettings)
    classifier: ClassifierSettings = field(default_factory=ClassifierSettings)
    mode: ModeSettings = field(default_factory=ModeSettings)
