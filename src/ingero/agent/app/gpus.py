"""Looks at the devices through NVML in a thread of its own, because a look may take long on a busy driver."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Final, Protocol

import numpy as np

from ingero.agent.app.measures import Kind, Labels, Series
from ingero.agent.gpu.readings import (
    BUCKETS,
    GpuReading,
    Xid,
    build_gpu_events,
    build_xid_events,
    find_throttles,
)
from ingero.model.events import EVENT, Events
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

POLL_NS: Final = 5 * NS_PER_S
_MOST_WAITING: Final = 4096

_GAUGES: Final = (
    ("memory_used", "gpu.memory.used", "By", 1, "Memory in use.", "gpu_memory_used_bytes"),
    ("memory_free", "gpu.memory.free", "By", 1, "Memory free.", "gpu_memory_free_bytes"),
    ("memory_total", "gpu.memory.total", "By", 1, "Memory.", "gpu_memory_total_bytes"),
    ("gpu_pct", "gpu.utilization", "1", 0.01, "Share of the time with a kernel running.", ""),
    ("memory_pct", "gpu.memory.utilization", "1", 0.01, "Share of the time with memory read or written.", ""),
    ("sm_mhz", "gpu.clock.sm", "MHz", 1, "Clock of the multiprocessors.", "gpu_clock_sm_mhz"),
    ("memory_mhz", "gpu.clock.memory", "MHz", 1, "Clock of the memory.", "gpu_clock_memory_mhz"),
    ("temperature_c", "gpu.temperature", "Cel", 1, "Temperature of the die.", "gpu_temperature_celsius"),
    ("power_mw", "gpu.power", "W", 1e-3, "Power drawn.", "gpu_power_watts"),
    ("nvlinks_active", "gpu.nvlink.active", "1", 1, "NVLinks that are up.", ""),
    ("pcie_generation", "gpu.pcie.generation", "1", 1, "PCIe generation now.", ""),
    ("pcie_width", "gpu.pcie.width", "1", 1, "PCIe lanes now.", ""),
    ("is_mig", "gpu.mig.enabled", "1", 1, "Whether it is cut into instances.", ""),
)  # fmt: skip
_SUMS: Final = (
    ("power_violation_ns", "gpu.throttle.power.time", "s", 1e-9, "Time held down by power.", "gpu_throttle_power_seconds_total"),
    ("thermal_violation_ns", "gpu.throttle.thermal.time", "s", 1e-9, "Time held down by temperature.", "gpu_throttle_thermal_seconds_total"),
    ("hardware_violation_ns", "gpu.throttle.hw.time", "s", 1e-9, "Time held down by the board.", "gpu_throttle_hw_seconds_total"),
    ("ecc_corrected", "gpu.ecc.corrected", "1", 1, "Memory errors mended.", "gpu_ecc_corrected_total"),
    ("ecc_uncorrected", "gpu.ecc.uncorrected", "1", 1, "Memory errors not mended.", "gpu_ecc_uncorrected_total"),
    ("nvlink_errors", "gpu.nvlink.errors", "1", 1, "Replays, recoveries and CRC errors.", "gpu_nvlink_errors_total"),
    ("pcie_replays", "gpu.pcie.replays", "1", 1, "PCIe replays.", "gpu_pcie_replays_total"),
)  # fmt: skip


class Driver(Protocol):
    """What is asked of NVML."""

    def read(self) -> list[GpuReading]:
        """A look at every device."""
        ...

    def take_errors(self) -> list[Xid]:
        """Critical errors since the last call."""
        ...


class GpuWatch:
    """The devices' last readings, and the rows of what happened to them.

    Args:
        driver: What is asked. Used by one thread at a time.
        clock: Both clocks.

    Attributes:
        n_dropped: Rows that nobody took in time.
    """

    def __init__(self, driver: Driver, clock: Clock) -> None:
        self.n_dropped = 0
        self._driver = driver
        self._clock = clock
        self._readings: list[GpuReading] = []
        self._looked_ns = 0
        self._xids: Counter[str] = Counter()
        self._waiting: list[Events] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ingero-nvml", daemon=True)

    @property
    def model(self) -> str:
        """The devices' models, each once; empty before the first look."""
        return ", ".join(dict.fromkeys(reading.name for reading in self._readings))

    def start(self) -> None:
        """Look now, and then on a timer until `close`."""
        self.look()
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(POLL_NS / NS_PER_S):
            self.look()

    def look(self) -> None:
        """Look at every device once."""
        mono_ns, wall_ns = self._clock.mono_ns(), self._clock.wall_ns()
        readings = self._driver.read()
        errors = self._driver.take_errors()
        before = {reading.index: reading for reading in self._readings}
        between_ns = mono_ns - self._looked_ns
        parts = [
            build_gpu_events(before.get(now.index), now, wall_ns, between_ns) for now in readings
        ]
        rows = np.concatenate([*parts, build_xid_events(errors), np.empty(0, EVENT)])
        uuids = {reading.index: reading.uuid for reading in readings}
        with self._lock:
            self._readings, self._looked_ns = readings, mono_ns
            self._xids.update(uuids.get(error.index, "") for error in errors)
            if sum(map(len, self._waiting)) + len(rows) > _MOST_WAITING:
                self.n_dropped += len(rows)
            elif len(rows):
                self._waiting.append(rows)

    def take_events(self) -> Events:
        """Rows since the last call."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        return np.concatenate([np.empty(0, EVENT), *waiting])

    def iter_series(self) -> Iterator[Series]:
        """The last readings."""
        with self._lock:
            readings, xids = list(self._readings), dict(self._xids)
        for kind, table in ((Kind.GAUGE, _GAUGES), (Kind.SUM, _SUMS)):
            for field, name, unit, scale, says, prometheus in table:
                points = tuple(
                    (_device(reading), float(value) * scale)
                    for reading in readings
                    if (value := getattr(reading, field)) is not None
                )
                yield Series(name, kind, unit, says, points, prometheus)
        for bucket in BUCKETS:
            points = tuple(
                (_device(reading), float(bucket in find_throttles(reading.reasons)))
                for reading in readings
                if reading.reasons is not None
            )
            says = f"Whether clocks are held down ({bucket}) at this moment."
            yield Series(f"gpu.throttle.{bucket}_active", Kind.GAUGE, "1", says, points)
        yield Series(
            "gpu.memory.process.allocated_bytes", Kind.GAUGE, "By", "Memory by process.",
            tuple(_iter_process_points(readings)),
        )  # fmt: skip
        yield Series(
            "gpu.xid.errors", Kind.SUM, "1", "Critical errors that the driver reported meanwhile.",
            tuple(((("gpu.uuid", uuid),), float(count)) for uuid, count in xids.items()),
            "gpu_xid_errors_total",
        )  # fmt: skip

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


def _device(reading: GpuReading) -> Labels:
    return (("gpu.uuid", reading.uuid),)


def _iter_process_points(readings: list[GpuReading]) -> Iterator[tuple[Labels, float]]:
    for reading in readings:
        for pid, n_bytes in (reading.process_bytes or {}).items():
            if n_bytes is not None:
                yield (*_device(reading), ("pid", pid)), float(n_bytes)
