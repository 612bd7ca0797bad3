"""What a cluster's Judge works with, from the processor's configuration. Pure."""

from __future__ import annotations

from ingero.detect.judge import JudgeSettings
from ingero.detect.ranks.settings import EDetectorSettings
from ingero.fleet.processors.collectives.config import NcclConfig


def build_settings(config: NcclConfig) -> JudgeSettings:
    """The Judge's settings."""
    return JudgeSettings(
        detector=EDetectorSettings(
            alpha=config.alpha,
            alarm_slowdown=config.alarm_slowdown,
            notice_slowdown=config.notice_slowdown,
            notice_spread=config.notice_spread,
        ),
        alarms_per_worker_day=config.alarms_per_worker_day,
        reorder_ns=config.reorder_window,
        patience_ns=config.patience,
        stale_ns=config.idle_timeout,
        max_workers=config.max_workers,
        max_pending_ops=config.max_pending_ops,
    )
