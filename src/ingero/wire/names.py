"""Every name that crosses a process boundary: metrics, attributes, headers, paths, states.

Spelled once. A name's meaning and its source stand beside it.
"""

from __future__ import annotations

from enum import StrEnum


class Signal(StrEnum):
    """The three OTLP signals; the value is the pipeline's type in a Collector configuration."""

    METRICS = "metrics"
    LOGS = "logs"
    TRACES = "traces"
