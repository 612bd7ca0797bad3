"""One look at one device, and the events since the look before. Pure: nothing here calls NVML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.events import EVENT, EventFlag, Events, GpuOp, Source

POWER, THERMAL, SOFTWARE, HARDWARE = "power", "thermal", "sw", "hw"
BUCKETS: Final = (POWER, THERMAL, SOFTWARE, HARDWARE)
_IDLE: Final = 0x1
_BUCKETS_BY_BIT: Final = {
    # nvml.h, nvmlClocksEventReason*: what holds the clocks down, as the documented four gauges group it.
    0x2: (SOFTWARE,),  # application clocks
    0x4: (POWER, SOFTWARE),  # software power cap
    0x8: (HARDWARE,),  # hardware slowdown
    0x10: (SOFTWARE,),  # sync boost
    0x20: (THERMAL, SOFTWARE),
    0x40: (THERMAL, HARDWARE),
    0x80: (POWER, HARDWARE),  # power brake
    0x100: (SOFTWARE,),  # display clock setting
}


def find_throttles(reasons: int) -> frozenset[str]:
    """The documented groups that a mask of reasons belongs to; a bit that is not known counts as hardware."""
    groups: set[str] = set()
    for bit in (1 << i for i in range(64)):
        if reasons & bit and bit != _IDLE:
            groups.update(_BUCKETS_BY_BIT.get(bit, (HARDWARE,)))
    return frozenset(groups)


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG device: a compute instance in a GPU instance; None is what the driver does not tell.

    Attributes:
        uuid: Its identity, the one that ``CUDA_VISIBLE_DEVICES`` takes.
        gpu_instance: Number of the GPU instance. Compute instances in one share its memory.
        compute_instance: Number of the compute instance in it.
        memory_used: Bytes of the GPU instance.
        memory_free: Bytes.
        memory_total: Bytes.
        process_bytes: Memory by process id, as in `GpuReading`.
    """

    uuid: str
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_used: int | None = None
    memory_free: int | None = None
    memory_total: int | None = None
    process_bytes: dict[int, int | None] | None = None


@dataclass(frozen=True, slots=True)
class PcieRate:
    """What went over one device's PCIe link in a sample of 20 ms; None is what the driver does not tell.

    Attributes:
        uuid: The device.
        sent_bytes_s: From the device, bytes a second.
        received_bytes_s: To the device, bytes a second.
    """

    uuid: str
    sent_bytes_s: int | None = None
    received_bytes_s: int | None = None


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at one device; None is what the device or the driver does not tell.

    Attributes:
        index: NVML's number of the device.
        uuid: Its identity.
        name: Its model.
        memory_used: Bytes.
        memory_free: Bytes.
        memory_total: Bytes.
        memory_reserved: Bytes that the driver and the firmware keep, part of those used.
        gpu_pct: Share of the last sample period with a kernel running, 0 to 100.
        memory_pct: The same for reading or writing memory.
        sm_mhz: Clock of the multiprocessors.
        memory_mhz: Clock of the memory.
        temperature_c: Of the die.
        power_mw: Drawn now.
        reasons: Mask of what holds the clocks down now.
        power_violation_ns: Time held down by power since the driver was loaded.
        thermal_violation_ns: The same by temperature.
        hardware_violation_ns: The same by the board's own limits.
        sync_boost_violation_ns: The same by the slowest device of its sync boost group.
        reliability_violation_ns: The same by the limits of voltage and reliability.
        hw_thermal_violation_ns: The same by the hardware's thermal slowdown, which halves the clocks or worse.
        power_brake_violation_ns: The same by the power brake that the machine asserts.
        ecc_corrected: Errors corrected since the last reset.
        ecc_uncorrected: Errors not corrected since the last reset.
        nvlinks_active: Links that are up.
        nvlink_errors: By kind, over all links; a kind that no link tells is left out.
        nvlink_sent_bytes: Payload over all links since the driver was loaded.
        nvlink_received_bytes: The same, to the device.
        pcie_generation: Of the link now; an idle device lowers it.
        pcie_width: Width of the link now.
        pcie_max_generation: The highest that this device and this slot can do together.
        pcie_max_width: The same of the width.
        pcie_replays: Since the driver was loaded.
        pcie_errors: By kind; a kind that is not reported is left out.
        is_mig: Whether it is cut into instances.
        instances: Those instances; None where it is not cut.
        process_bytes: Memory by process id; a value is None where the driver does not tell.
    """

    index: int
    uuid: str = ""
    name: str = ""
    memory_used: int | None = None
    memory_free: int | None = None
    memory_total: int | None = None
    memory_reserved: int | None = None
    gpu_pct: int | None = None
    memory_pct: int | None = None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    temperature_c: int | None = None
    power_mw: int | None = None
    reasons: int | None = None
    power_violation_ns: int | None = None
    thermal_violation_ns: int | None = None
    hardware_violation_ns: int | None = None
    sync_boost_violation_ns: int | None = None
    reliability_violation_ns: int | None = None
    hw_thermal_violation_ns: int | None = None
    power_brake_violation_ns: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    nvlinks_active: int | None = None
    nvlink_errors: dict[str, int] | None = None
    nvlink_sent_bytes: int | None = None
    nvlink_received_bytes: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_max_generation: int | None = None
    pcie_max_width: int | None = None
    pcie_replays: int | None = None
    pcie_errors: dict[str, int] | None = None
    is_mig: bool | None = None
    instances: tuple[MigInstance, ...] | None = None
    process_bytes: dict[int, int | None] | None = None


@dataclass(frozen=True, slots=True)
class Xid:
    """A critical error that the driver reported."""

    index: int
    number: int
    wall_ns: int


_HELD: Final = (
    ("power_violation_ns", GpuOp.THROTTLE_POWER),
    ("thermal_violation_ns", GpuOp.THROTTLE_THERMAL),
    ("hardware_violation_ns", GpuOp.THROTTLE_HARDWARE),
)


def build_gpu_events(
    before: GpuReading | None, now: GpuReading, wall_ns: int, between_ns: int
) -> Events:
    """Rows of what happened to a device between two looks.

    Throttling is by the violation counters, so that what began and ended between the looks is seen; its row starts as
    late as it can have. A counter that went back (the driver was loaded again) tells nothing.

    Args:
        before: The look before; None tells nothing.
        now: This one.
        wall_ns: When this one was.
        between_ns: Time between them.
    """
    rows = list(_iter_facts(before, now, between_ns)) if before is not None else []
    events = np.zeros(len(rows), EVENT)
    events["source"], events["gpu_id"], events["weight"] = Source.GPU, now.index, 1
    events["flags"] = EventFlag.EXEMPLAR
    for i, (op, held_ns, number) in enumerate(rows):
        events[i]["op"], events[i]["duration_ns"], events[i]["arg0"] = op, held_ns, number
        events[i]["start_ns"] = wall_ns - held_ns
    return events


def _iter_facts(
    before: GpuReading, now: GpuReading, between_ns: int
) -> Iterator[tuple[GpuOp, int, int]]:
    for name, op in _HELD:
        held_ns = _grown(getattr(before, name), getattr(now, name))
        if held_ns:
            yield op, min(held_ns, between_ns), now.reasons or 0
    n_errors = _grown(before.ecc_uncorrected, now.ecc_uncorrected)
    if n_errors:
        yield GpuOp.ECC_UNCORRECTED, 0, n_errors


def _grown(before: int | None, now: int | None) -> int:
    return max(now - before, 0) if before is not None and now is not None else 0


def build_xid_events(errors: list[Xid]) -> Events:
    """Rows of critical errors, arg0 their number."""
    events = np.zeros(len(errors), EVENT)
    events["source"], events["op"], events["weight"] = Source.GPU, GpuOp.XID, 1
    events["flags"] = EventFlag.EXEMPLAR
    for i, error in enumerate(errors):
        events[i]["gpu_id"], events[i]["arg0"] = error.index, error.number
        events[i]["start_ns"] = error.wall_ns
    return events
