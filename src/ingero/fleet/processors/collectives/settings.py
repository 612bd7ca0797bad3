"""What a cluster's Judge works with, from the processor's configuration. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from ingero.detect.judge import JudgeSettings
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.model.collectives import CollectiveRun

_NS_PER_DAY: Final = 86_400e9
_MIN_ALPHA: Final = 1e-12
_MAX_ALPHA: Final = 1e-2


def build_settings(config: NcclConfig, alpha: float) -> JudgeSettings:
    """The Judge's settings."""
    return JudgeSettings(
        detector=EDetectorSettings(
            alpha=alpha,
            alarm_slowdown=config.alarm_slowdown,
            notice_slowdown=config.notice_slowdown,
            notice_spread=config.notice_spread,
        ),
        reorder_ns=config.reorder_window,
        patience_ns=config.patience,
        max_workers=config.max_workers,
        max_pending_ops=config.max_pending_ops,
    )


def find_alpha(config: NcclConfig, runs: Sequence[CollectiveRun]) -> float:
    """The budget per operation: as set, or from the budget in time and the rate at which these runs' ranks operate."""
    if config.alarms_per_worker_day is None:
        return config.alpha
    rates = [
        (run.ops.size - 1) / span_ns
        for run in runs
        if run.ops.size > 1 and (span_ns := int(np.ptp(run.ops["entry_ns"]))) > 0
    ]
    if not rates:
        return config.alpha
    ops_per_day = float(np.median(rates)) * _NS_PER_DAY
    return min(max(config.alarms_per_worker_day / ops_per_day, _MIN_ALPHA), _MAX_ALPHA)
