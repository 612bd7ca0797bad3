"""Every question, in the order that a menu shows them."""

from __future__ import annotations

from typing import Any, Final

from ingero.echo.queries import (
    analysis,
    collective,
    costs,
    gpu,
    hangs,
    health,
    history,
    remediation,
    savings,
    usage,
)
from ingero.echo.queries.context import QueryContext
from ingero.serving.query import Query

QUERIES: Final[tuple[Query[QueryContext, Any, Any], ...]] = (
    health.SUMMARY,
    health.FIND_STRAGGLERS,
    health.FIND_OUTLIERS,
    history.ANOMALY_LIST,
    collective.BLAME,
    collective.SKEW,
    hangs.HANGS,
    collective.NCCL_BANDWIDTH,
    costs.COST,
    costs.COST_BY_CULPRIT,
    costs.COST_BY_WEEK,
    remediation.REMEDIATION,
    savings.SAVINGS,
    history.TIMELINE,
    history.NODE_DETAIL,
    gpu.KERNEL_LAUNCHES,
    gpu.MEMCPY,
    gpu.MEMFRAG,
    usage.USAGE,
    analysis.RUN_ANALYSIS,
)
