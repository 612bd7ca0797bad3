"""Which workers are in alarm, since when, and the events of entering and leaving."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingero.detect.ranks.settings import N_TIERS
from ingero.detect.stacking import append_groups
from ingero.model.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Crossing:
    """A worker entered or left alarm.

    Attributes:
        group: Index of the peer group in the detector.
        worker: Index of the worker in its group.
        tier: ALARM or NOTICE.
        op: Ordinal of the operation within the group at which it happened, from 0.
        onset_op: Ordinal at which the slowdown began.
        is_alarm: True for entering, False for leaving.
        log10_evidence: Of S when entering, of the reversed test when clearing.
        is_pooled: The pooled bet's wealth had grown more than that of the bets on ranks.
        by_sums: The sums bet's wealth alone sufficed.
        is_retracted: It left because the effective block length turned out to be longer.
        log_peak: Natural log of the greatest wealth, at an effective block length of 1.
    """

    group: int
    worker: int
    tier: int
    op: int
    onset_op: int
    is_alarm: bool
    log10_evidence: float = 0.0
    is_pooled: bool = False
    by_sums: bool = False
    is_retracted: bool = False
    log_peak: float = 0.0


class Alarms:
    """Alarms of stacked peer groups.

    Args:
        n_peers: Workers per group.

    Attributes:
        in_alarm: Shape (2 tiers, G, m).
        onset_op: Ordinal at which the change point's sum last left 0, shape (2 tiers, G, m); fixed while in alarm.
        sums_op: Likewise the sums bet's wealth.
        by_sums: Which alarms the sums bet alone raised, shape (2 tiers, G, m).
        block_length: Effective block length at which each entered, shape (2 tiers, G, m).
    """

    def __init__(self, n_peers: int) -> None:
        shape = (N_TIERS, 0, n_peers)
        self.in_alarm: BoolArray = np.zeros(shape, bool)
        self.onset_op: IntArray = np.zeros(shape, np.int64)
        self.sums_op: IntArray = np.zeros(shape, np.int64)
        self.by_sums: BoolArray = np.zeros(shape, bool)
        self.block_length: FloatArray = np.ones(shape)

    def add_groups(self, n_groups: int) -> None:
        """Add groups without history."""
        self.in_alarm = append_groups(self.in_alarm, n_groups, 1)
        self.onset_op = append_groups(self.onset_op, n_groups, 1)
        self.sums_op = append_groups(self.sums_op, n_groups, 1)
        self.by_sums = append_groups(self.by_sums, n_groups, 1)
        self.block_length = append_groups(self.block_length, n_groups, 1, 1.0)
