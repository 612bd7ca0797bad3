"""The devices' series by OpenTelemetry's semantic conventions for hardware, beside those of the documented names.

Of the conventions' series those are left out that NVML does not answer: what crosses the device in all (``hw.gpu.io``:
NVLink is counted, PCIe is sampled), and a state of the whole device (``hw.status``).

Source: OpenTelemetry semantic conventions 1.37, hardware: GPU, common and temperature metrics; status "development".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from ingero.agent.capture.gpu.readings import GpuReading
from ingero.agent.metrics.series import Kind, Labels, Series, build_counter

_TYPE: Final[Labels] = (("hw.type", "gpu"),)
_TASK: Final[Labels] = (("hw.gpu.task", "general"),)
_Find = Callable[[GpuReading], float | None]


def _find_used_share(reading: GpuReading) -> float | None:
    used, total = reading.memory_used, reading.memory_total
    return used / total if used is not None and total else None


def _find_busy_share(reading: GpuReading) -> float | None:
    return reading.gpu_pct / 100 if reading.gpu_pct is not None else None


def _find_watts(reading: GpuReading) -> float | None:
    return reading.power_mw / 1000 if reading.power_mw is not None else None


_SERIES: Final[tuple[tuple[str, Kind, str, str, Labels, _Find, str], ...]] = (
    ("hw.gpu.memory.limit", Kind.UP_DOWN, "By", "Size of the GPU memory.", (),
     lambda reading: reading.memory_total, "hw_gpu_memory_limit_bytes"),
    ("hw.gpu.memory.usage", Kind.UP_DOWN, "By", "GPU memory used.", (),
     lambda reading: reading.memory_used, "hw_gpu_memory_usage_bytes"),
    ("hw.gpu.memory.utilization", Kind.GAUGE, "1", "Fraction of GPU memory used.", (),
     _find_used_share, "hw_gpu_memory_utilization_ratio"),
    ("hw.gpu.utilization", Kind.GAUGE, "1", "Fraction of time with a kernel running.", _TASK,
     _find_busy_share, "hw_gpu_utilization_ratio"),
    ("hw.power", Kind.GAUGE, "W", "Power drawn by the component.", _TYPE,
     _find_watts, "hw_power_watts"),
)  # fmt: skip
_ERRORS: Final = (("corrected", "ecc_corrected"), ("uncorrected", "ecc_uncorrected"))


def iter_hardware_series(readings: Iterable[GpuReading]) -> Iterator[Series]:
    """The last readings as ``hw.*``; what a device does not tell has no point."""
    known = list(readings)
    for name, kind, unit, description, more, find, prometheus in _SERIES:
        points = tuple(
            ((*_device(reading), *more), float(value))
            for reading in known
            if (value := find(reading)) is not None
        )
        yield Series(name, kind, unit, description, points, prometheus)
    errors = tuple(
        ((*_device(reading), *_TYPE, ("error.type", kind)), float(count))
        for reading in known
        for kind, field in _ERRORS
        if (count := getattr(reading, field)) is not None
    )
    description = "Number of errors encountered by the component: of its memory, counted by ECC."
    yield build_counter("hw.errors", "{error}", description, errors, "hw_errors_total")
    degrees = tuple(
        (_sensor(reading), float(reading.temperature_c))
        for reading in known
        if reading.temperature_c is not None
    )
    description = "Temperature in degrees Celsius."
    yield Series(
        "hw.temperature", Kind.GAUGE, "Cel", description, degrees, "hw_temperature_celsius"
    )


def _device(reading: GpuReading) -> Labels:
    return (
        ("hw.id", reading.uuid),
        ("hw.name", f"GPU {reading.index}"),
        ("hw.model", reading.name),
        ("hw.vendor", "NVIDIA"),
    )


def _sensor(reading: GpuReading) -> Labels:
    """A sensor is a component of its own, whose parent is the device."""
    return (
        ("hw.id", f"{reading.uuid}/die"),
        ("hw.name", f"GPU {reading.index} die"),
        ("hw.parent", reading.uuid),
        ("hw.sensor_location", "GPU_DIE"),
    )
