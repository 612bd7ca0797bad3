"""Samples the devices through NVML in a thread of its own, because a sample may take long on a busy driver."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import numpy as np

from ingero.agent.capture.gpu.readings import (
    BUCKETS,
    GpuReading,
    MigInstance,
    PcieRate,
    Xid,
    build_gpu_events,
    build_xid_events,
    find_throttles,
)
from ingero.agent.metrics.series import Kind, Labels, Series, build_counter
from ingero.model.events import EVENT, Events
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

POLL_NS: Final = 5 * NS_PER_S
_MAX_WAITING: Final = 4096

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
    ("pcie_max_generation", "gpu.pcie.generation.max", "1", 1, "Highest PCIe generation of device and slot.", ""),
    ("pcie_max_width", "gpu.pcie.width.max", "1", 1, "Most PCIe lanes of device and slot.", ""),
    ("is_mig", "gpu.mig.enabled", "1", 1, "Whether it is cut into instances.", ""),
)  # fmt: skip
_SUMS: Final = (
    ("power_violation_ns", "gpu.throttle.power.time", "s", 1e-9, "Time held down by power.",
     "gpu_throttle_power_seconds_total"),
    ("thermal_violation_ns", "gpu.throttle.thermal.time", "s", 1e-9, "Time held down by temperature.",
     "gpu_throttle_thermal_seconds_total"),
    ("hardware_violation_ns", "gpu.throttle.hw.time", "s", 1e-9, "Time held down by the board.",
     "gpu_throttle_hw_seconds_total"),
    ("sync_boost_violation_ns", "gpu.throttle.sync_boost.time", "s", 1e-9, "Time held down by the sync boost group.",
     "gpu_throttle_sync_boost_seconds_total"),
    ("reliability_violation_ns", "gpu.throttle.reliability.time", "s", 1e-9,
     "Time held down by voltage and reliability.",
     "gpu_throttle_reliability_seconds_total"),
    ("hw_thermal_violation_ns", "gpu.throttle.hw_thermal.time", "s", 1e-9, "Time of the hardware's thermal slowdown.",
     "gpu_throttle_hw_thermal_seconds_total"),
    ("power_brake_violation_ns", "gpu.throttle.power_brake.time", "s", 1e-9, "Time of the external power brake.",
     "gpu_throttle_power_brake_seconds_total"),
    ("ecc_corrected", "gpu.ecc.corrected", "1", 1, "Memory errors corrected.", "gpu_ecc_corrected_total"),
    ("ecc_uncorrected", "gpu.ecc.uncorrected", "1", 1, "Memory errors not corrected.", "gpu_ecc_uncorrected_total"),
    ("pcie_replays", "gpu.pcie.replays", "1", 1, "PCIe replays.", "gpu_pcie_replays_total"),
)  # fmt: skip
_KINDS: Final = (
    ("nvlink_errors", "gpu.nvlink.errors", "Errors of all NVLinks.", "gpu_nvlink_errors_total"),
    ("pcie_errors", "gpu.pcie.errors", "Errors of the PCIe link.", "gpu_pcie_errors_total"),
)
_INSTANCE: Final = (
    ("memory_used", "gpu.mig.memory.used", "Memory in use in the MIG instance."),
    ("memory_free", "gpu.mig.memory.free", "Memory free in the MIG instance."),
    ("memory_total", "gpu.mig.memory.total", "Memory of the MIG instance."),
)
_DIRECTION: Final = "network.io.direction"
_SENT: Final = ((_DIRECTION, "transmit"),)
_RECEIVED: Final = ((_DIRECTION, "receive"),)


class Driver(Protocol):
    """The calls of NVML that are used."""

    def read(self) -> list[GpuReading]:
        """A sample of every device."""
        ...

    def read_pcie(self) -> list[PcieRate]:
        """A sample of every device's PCIe traffic; may block, and is called by a thread of its own."""
        ...

    def take_errors(self) -> list[Xid]:
        """Critical errors since the last call."""
        ...


class GpuWatch:
    """The devices' last readings, and the rows of what happened to them.

    Args:
        driver: Reads NVML. `read_pcie` is called by one thread, and meanwhile the rest by another.
        clock: Both clocks.

    Attributes:
        n_dropped: Rows that were not taken in time.
    """

    def __init__(self, driver: Driver, clock: Clock) -> None:
        self.n_dropped = 0
        self._driver = driver
        self._clock = clock
        self._readings: list[GpuReading] = []
        self._pcie: list[PcieRate] = []
        self._sampled_ns = 0
        self._xids: Counter[str] = Counter()
        self._waiting: list[Events] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._run, args=(self.sample,), name="ingero-nvml", daemon=True
            ),
            threading.Thread(
                target=self._run, args=(self.sample_pcie,), name="ingero-nvml-pcie", daemon=True
            ),
        ]

    @property
    def model(self) -> str:
        """The devices' models, each once; empty before the first sample."""
        return ", ".join(dict.fromkeys(reading.name for reading in self._readings))

    @property
    def readings(self) -> tuple[GpuReading, ...]:
        """The last sample of every device."""
        with self._lock:
            return tuple(self._readings)

    def start(self) -> None:
        """Sample now, and then on a timer until `close`; PCIe traffic is sampled on the timer only."""
        self.sample()
        for thread in self._threads:
            thread.start()

    def _run(self, sample: Callable[[], None]) -> None:
        while not self._stop.wait(POLL_NS / NS_PER_S):
            sample()

    def sample_pcie(self) -> None:
        """Sample the PCIe traffic of every device once; blocks as long as the driver does."""
        pcie = self._driver.read_pcie()
        with self._lock:
            self._pcie = pcie

    def sample(self) -> None:
        """Sample every device once."""
        mono_ns, wall_ns = self._clock.mono_ns(), self._clock.wall_ns()
        readings = self._driver.read()
        errors = self._driver.take_errors()
        before = {reading.index: reading for reading in self._readings}
        between_ns = mono_ns - self._sampled_ns
        parts = [
            build_gpu_events(before.get(now.index), now, wall_ns, between_ns) for now in readings
        ]
        rows = np.concatenate([*parts, build_xid_events(errors), np.empty(0, EVENT)])
        uuids = {reading.index: reading.uuid for reading in readings}
        with self._lock:
            self._readings, self._sampled_ns = readings, mono_ns
            # Of each device from the start: what begins at 1 has grown by nothing for an alert.
            self._xids.update(dict.fromkeys(uuids.values(), 0))
            self._xids.update(uuids.get(error.index, "") for error in errors)
            if sum(map(len, self._waiting)) + len(rows) > _MAX_WAITING:
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
            readings, xids, pcie = list(self._readings), dict(self._xids), list(self._pcie)
        for field, name, unit, scale, description, prometheus in _GAUGES:
            points = _find_points(readings, field, scale)
            yield Series(name, Kind.GAUGE, unit, description, points, prometheus)
        for field, name, unit, scale, description, prometheus in _SUMS:
            points = _find_points(readings, field, scale)
            yield build_counter(name, unit, description, points, prometheus)
        for bucket in BUCKETS:
            points = tuple(
                (_device(reading), float(bucket in find_throttles(reading.reasons)))
                for reading in readings
                if reading.reasons is not None
            )
            description = f"Whether clocks are held down ({bucket}) at this moment."
            yield Series(f"gpu.throttle.{bucket}_active", Kind.GAUGE, "1", description, points)
        yield Series(
            "gpu.memory.fragmentation_estimate", Kind.GAUGE, "1",
            "Share of memory that neither programs use nor is free: what the driver and the firmware keep.",
            tuple(
                (_device(reading), reading.memory_reserved / reading.memory_total)
                for reading in readings
                if reading.memory_reserved is not None and reading.memory_total
            ),
        )  # fmt: skip
        yield Series(
            "gpu.memory.process.allocated_bytes", Kind.GAUGE, "By", "Memory by process.",
            tuple(_iter_process_points(readings)),
        )  # fmt: skip
        yield from _iter_link_series(readings, pcie)
        yield from _iter_instance_series(readings)
        yield Series(
            "gpu.xid.errors", Kind.SUM, "1", "Critical errors that the driver reported meanwhile.",
            tuple(((("gpu.uuid", uuid),), float(count)) for uuid, count in xids.items()),
            "gpu_xid_errors_total",
        )  # fmt: skip
        yield Series(
            "ingero.trace.gpu.dropped_rows", Kind.SUM, "1",
            "Rows of throttling and errors that were not taken in time.", (((), float(self.n_dropped)),),
            "ingero_trace_gpu_dropped_rows_total",
        )  # fmt: skip

    def close(self) -> None:
        """Stop sampling."""
        self._stop.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join()


def _device(reading: GpuReading) -> Labels:
    return (("gpu.uuid", reading.uuid),)


def _find_points(
    readings: list[GpuReading], field: str, scale: float
) -> tuple[tuple[Labels, float], ...]:
    return tuple(
        (_device(reading), float(value) * scale)
        for reading in readings
        if (value := getattr(reading, field)) is not None
    )


def _iter_link_series(readings: list[GpuReading], pcie: list[PcieRate]) -> Iterator[Series]:
    for field, name, description, prometheus in _KINDS:
        counts = tuple(
            ((*_device(reading), ("error.type", kind)), float(count))
            for reading in readings
            for kind, count in (getattr(reading, field) or {}).items()
        )
        yield build_counter(name, "1", description, counts, prometheus)
    sums = tuple(
        ((*_device(reading), *direction), float(n_bytes))
        for reading in readings
        for direction, n_bytes in (
            (_SENT, reading.nvlink_sent_bytes),
            (_RECEIVED, reading.nvlink_received_bytes),
        )
        if n_bytes is not None
    )
    description = "Payload over all NVLinks."
    yield build_counter("gpu.nvlink.io", "By", description, sums, "gpu_nvlink_io_bytes_total")
    rates = tuple(
        ((("gpu.uuid", one.uuid), *direction), float(bytes_s))
        for one in pcie
        for direction, bytes_s in ((_SENT, one.sent_bytes_s), (_RECEIVED, one.received_bytes_s))
        if bytes_s is not None
    )
    description = "PCIe traffic in a sample of 20 ms."
    prometheus = "gpu_pcie_throughput_bytes_per_second"
    yield Series("gpu.pcie.throughput", Kind.GAUGE, "By/s", description, rates, prometheus)


def _iter_instance_series(readings: list[GpuReading]) -> Iterator[Series]:
    for field, name, description in _INSTANCE:
        points = tuple(
            (_instance(reading, one), float(value))
            for reading in readings
            for one in reading.instances or ()
            if (value := getattr(one, field)) is not None
        )
        prometheus = f"{name.replace('.', '_')}_bytes"
        yield Series(name, Kind.GAUGE, "By", description, points, prometheus)


def _instance(reading: GpuReading, one: MigInstance) -> Labels:
    labels: list[tuple[str, str | int]] = [*_device(reading), ("gpu.mig_uuid", one.uuid)]
    if one.gpu_instance is not None:
        labels.append(("gpu.gpu_instance_id", one.gpu_instance))
    if one.compute_instance is not None:
        labels.append(("gpu.compute_instance_id", one.compute_instance))
    return tuple(labels)


def _iter_process_points(readings: list[GpuReading]) -> Iterator[tuple[Labels, float]]:
    """By instance where one reports it, so that no byte counts twice; of the whole device the rest."""
    for reading in readings:
        pids: set[int] = set()
        for one in reading.instances or ():
            for pid, n_bytes in (one.process_bytes or {}).items():
                if n_bytes is not None:
                    pids.add(pid)
                    yield (*_instance(reading, one), ("pid", pid)), float(n_bytes)
        for pid, n_bytes in (reading.process_bytes or {}).items():
            if n_bytes is not None and pid not in pids:
                yield (*_device(reading), ("pid", pid)), float(n_bytes)
