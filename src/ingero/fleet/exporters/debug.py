"""``debug``: writes what arrives to the log.

Source: opentelemetry-collector ``exporter/debugexporter`` (key names, meaning of verbosity and sampling).
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Final, Literal

from pydantic import Field

from ingero.config import StrictModel
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch
from ingero.fleet.factory import ExporterFactory
from ingero.otlp.codec import encode_json, iter_log_rows, iter_points
from ingero.otlp.names import Signal
from ingero.units import NS_PER_S

_ITEMS: Final = {Signal.METRICS: "data points", Signal.LOGS: "log records", Signal.TRACES: "spans"}
_log = logging.getLogger("ingero.fleet.exporters.debug")


class DebugConfig(StrictModel):
    """How much is written."""

    verbosity: Literal["basic", "normal", "detailed"] = Field(
        "basic",
        description="basic counts items, normal writes a line per item, detailed the whole batch.",
    )
    sampling_initial: int = Field(
        2, ge=0, description="Batches written in each second before sampling starts."
    )
    sampling_thereafter: int = Field(
        1, ge=0, description="After those, every n-th batch is written; 0 writes none."
    )


class DebugExporter:
    """Writes batches to the log."""

    def __init__(self, component: ComponentId, config: DebugConfig) -> None:
        self._name = str(component)
        self._config = config
        self._lock = threading.Lock()
        self._second = -1
        self._n_in_second = 0

    async def start(self, host: Host) -> None:
        """Take the clock that sampling runs by."""
        self._clock = host.clock

    async def stop(self) -> None:
        """Nothing waits here."""

    def consume(self, batch: Batch) -> None:
        """Write the batch, or skip it by sampling."""
        if not self._is_sampled():
            return
        items = _ITEMS[batch.signal]
        _log.info("exporters.%s: %d %s", self._name, batch.export.n_items, items)
        if self._config.verbosity == "normal":
            for line in _iter_lines(batch):
                _log.info("exporters.%s: %s", self._name, line)
        elif self._config.verbosity == "detailed":
            text = json.dumps(json.loads(encode_json(batch.export)), indent=2)
            for line in text.splitlines():
                _log.info("exporters.%s: %s", self._name, line)

    def _is_sampled(self) -> bool:
        with self._lock:
            second = self._clock.mono_ns() // NS_PER_S
            if second != self._second:
                self._second, self._n_in_second = second, 0
            self._n_in_second += 1
            past = self._n_in_second - self._config.sampling_initial
        if past <= 0:
            return True
        every = self._config.sampling_thereafter
        return every > 0 and past % every == 0


def _iter_lines(batch: Batch) -> list[str]:
    if batch.signal is Signal.METRICS:
        return [str(point) for point in iter_points(batch.export)]
    if batch.signal is Signal.LOGS:
        return [str(row) for row in iter_log_rows(batch.export)]
    return [
        f"{span.name} trace_id={span.trace_id!r} span_id={span.span_id!r}"
        for resource in batch.export.root.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


FACTORY: Final = ExporterFactory(
    type="debug",
    config=DebugConfig,
    description="Writes what arrives to the log.",
    stability=Stability.BETA,
    create=DebugExporter,
)
