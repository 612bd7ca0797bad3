"""``memory_limiter``: refuses batches while the process uses too much memory.

Pushers wait then, instead of the kernel killing the collector.

Above the soft limit (limit minus spike) batches are refused as retryable, which a receiver answers with 503 or
RESOURCE_EXHAUSTED; above the limit garbage is collected first. Nothing is lost: a refused batch is still the pusher's.

Source: opentelemetry-collector ``processor/memorylimiterprocessor`` (key names, meaning). It measures the Go heap; we
measure resident memory. With no limit set at all the Collector does not start; ours then takes 80 % of what the machine
or the cgroup has.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from ingero.config import Duration, StrictModel
from ingero.errors import RetryableError
from ingero.fleet.component import ComponentId, Host, Stability
from ingero.fleet.consumer import Batch, Consumer
from ingero.fleet.factory import ProcessorFactory
from ingero.fleet.views import RefusalView
from ingero.otlp.names import Signal
from ingero.telemetry.declare import counter, gauge
from ingero.units import format_size, parse_duration

REFUSED: Final = counter(
    "otelcol_processor_refused_items_total",
    "Items refused while memory was over its soft limit; their pushers may send them again.",
    "processor",
)
LIMITED: Final = gauge(
    "ingero_fleet_memory_limited", "1 while batches are refused for lack of memory.", "processor"
)

_MIB: Final = 1 << 20
_DEFAULT_LIMIT_PCT: Final = 80
_log = logging.getLogger("ingero.fleet.processors.memory_limiter")


class MemoryLimiterConfig(StrictModel):
    """How much memory is too much."""

    check_interval: Duration = Field(
        parse_duration("1s"), gt=0, description="How often memory is measured."
    )
    limit_mib: int = Field(0, ge=0, description="Hard limit in MiB; 0 uses limit_percentage.")
    spike_limit_mib: int = Field(
        0,
        ge=0,
        description="Room in MiB between the soft and the hard limit; 0 is a fifth of the limit.",
    )
    limit_percentage: int = Field(
        0,
        ge=0,
        le=100,
        description="Hard limit as a share of the machine's or the cgroup's memory; 0 with no limit_mib is 80.",
    )
    spike_limit_percentage: int = Field(
        0,
        ge=0,
        le=100,
        description="Room between the limits as such a share; 0 is a fifth of the limit.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.limit_mib and self.spike_limit_mib >= self.limit_mib:
            raise ValueError("spike_limit_mib must be below limit_mib")
        if self.limit_percentage and self.spike_limit_percentage >= self.limit_percentage:
            raise ValueError("spike_limit_percentage must be below limit_percentage")
        return self

    def limits_bytes(self, total_bytes: int) -> tuple[int, int]:
        """The hard and the soft limit on a machine with this much memory."""
        if self.limit_mib:
            hard, spike = self.limit_mib * _MIB, self.spike_limit_mib * _MIB
        else:
            hard = total_bytes * (self.limit_percentage or _DEFAULT_LIMIT_PCT) // 100
            spike = total_bytes * self.spike_limit_percentage // 100
        return hard, hard - (spike or hard // 5)


class MemoryLimiter:
    """Refuses while memory is short.

    Args:
        component: Whose counters these are.
        config: The limits.
        signal: The pipeline's.
        following: What gets the batches.
        read_resident: Resident bytes of this process.
    """

    def __init__(
        self,
        component: ComponentId,
        config: MemoryLimiterConfig,
        signal: Signal,
        following: Consumer,
        *,
        read_resident: Callable[[], int] | None = None,
    ) -> None:
        del signal
        self._name = str(component)
        self._config = config
        self._following = following
        self._read = read_resident or read_resident_bytes
        self._is_short = False

    async def start(self, host: Host) -> None:
        """Measure once, then at each interval."""
        self._hard, self._soft = self._config.limits_bytes(read_total_bytes())
        self._refused = host.meter.counter(REFUSED).bound(processor=self._name)
        self._gauge = host.meter.gauge(LIMITED)
        self._retry_after_ns = self._config.check_interval
        self._check()
        host.offer(RefusalView, self)
        host.every(self._config.check_interval, self._check)

    async def stop(self) -> None:
        """Nothing waits here."""

    def consume(self, batch: Batch) -> None:
        """Pass a batch on, or refuse it while memory is short.

        Raises:
            RetryableError: Memory is over its soft limit.
        """
        refusal = self.find_refusal()
        if refusal is not None:
            self._refused(batch.export.n_items)
            raise refusal
        self._following.consume(batch)

    def find_refusal(self) -> RetryableError | None:
        """Whether memory is short."""
        if not self._is_short:
            return None
        message = f"processors.{self._name}: memory is short"
        return RetryableError(message, retry_after_ns=self._retry_after_ns)

    def _check(self) -> None:
        resident = self._read()
        if resident > self._hard:
            gc.collect()
            resident = self._read()
        is_short = resident > self._soft
        if is_short is not self._is_short:
            description = "is short: refusing batches" if is_short else "is enough again"
            _log.warning(
                "processors.%s: memory %s (%s of %s)",
                self._name,
                description,
                format_size(resident),
                format_size(self._soft),
            )
        self._is_short = is_short
        self._gauge.set(is_short, processor=self._name)


def read_resident_bytes() -> int:
    """Resident memory of this process. Source: proc(5), /proc/pid/statm, second field in pages."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def read_total_bytes() -> int:
    """Memory that this process may use: the cgroup's ``memory.max`` where there is one, else the machine's."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        path = Path(name)
        if path.exists():
            text = path.read_text(encoding="ascii").strip()
            return machine if text == "max" else min(machine, int(text))
    return machine


FACTORY: Final = ProcessorFactory(
    type="memory_limiter",
    config=MemoryLimiterConfig,
    description="Refuses batches while memory is short, so that pushers wait.",
    stability=Stability.BETA,
    metrics=(REFUSED, LIMITED),
    create=MemoryLimiter,
)
