"""NVML through NVIDIA's own binding (``nvidia-ml-py``), in this process.

A missing library or package is one error at the start; a value that a device does not have is None afterwards. Source
of meanings and units: nvml.h of the binding's version (13.6), whose functions it names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from ingero.agent.capture.gpu.fields import (
    ALL_LINKS,
    HELD,
    NVLINK_ERRORS,
    NVLINK_RECEIVED_KIB,
    NVLINK_SENT_KIB,
    PCIE_ERRORS,
    Field,
    decode_fields,
    find_kinds,
)
from ingero.agent.capture.gpu.readings import GpuReading, MigInstance, PcieRate, Xid
from ingero.errors import UnsupportedError
from ingero.telemetry.clock import Clock

_MAX_ERRORS: Final = 256
_LINK_ERRORS: Final = {
    "replay": "NVML_NVLINK_ERROR_DL_REPLAY",
    "recovery": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "crc_flit": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
    "ecc_data": "NVML_NVLINK_ERROR_DL_ECC_DATA",
}
_FIELDS: Final[tuple[Field, ...]] = (
    *((number, 0) for number in (*HELD.values(), *PCIE_ERRORS.values())),
    (NVLINK_SENT_KIB, ALL_LINKS),
    (NVLINK_RECEIVED_KIB, ALL_LINKS),
)
_KIB: Final = 1024
_KB: Final = 1000


class Nvml:
    """The devices of this machine.

    Args:
        clock: Stamps errors.

    Attributes:
        driver: Version of the driver.

    Raises:
        UnsupportedError: The package or the library is missing, or the driver does not answer.
    """

    def __init__(self, clock: Clock) -> None:
        try:
            import pynvml  # noqa: PLC0415 - an extra, and slow to import
        except ImportError as error:
            raise UnsupportedError(
                "NVML: the package nvidia-ml-py is not installed",
                hint="pip install 'ingero[agent]'",
            ) from error
        self._nvml: ModuleType = pynvml
        self._clock = clock
        try:
            pynvml.nvmlInitWithFlags(0)
            self.driver: str = pynvml.nvmlSystemGetDriverVersion()
            self._devices = [
                pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())
            ]
        except pynvml.NVMLError as error:
            raise UnsupportedError(
                f"NVML: {error}",
                hint="it comes with NVIDIA's driver (libnvidia-ml.so.1); `nvidia-smi` shows whether that works",
            ) from error
        self._names = [
            (
                self._ask("nvmlDeviceGetUUID", device) or "",
                self._ask("nvmlDeviceGetName", device) or "",
            )
            for device in self._devices
        ]
        self._links = [self._find_links(device) for device in self._devices]
        self._events = self._open_events()

    def __len__(self) -> int:
        return len(self._devices)

    def _ask(self, function: str, *arguments: Any) -> Any:  # noqa: ANN401 - whatever the binding gives
        """What a function says; None where the device or the driver does not have it."""
        ask: Callable[..., Any] = getattr(self._nvml, function)
        try:
            return ask(*arguments)
        except (self._nvml.NVMLError, self._nvml.NVMLLibraryMismatchError):
            return None  # the second, no NVMLError: an older library without a versioned function

    def _find_links(self, device: Any) -> list[int]:  # noqa: ANN401 - a handle
        """The NVLinks that are there; a device without any refuses the first."""
        links = []
        for link in range(self._nvml.NVML_NVLINK_MAX_LINKS):
            if self._ask("nvmlDeviceGetNvLinkState", device, link) is None:
                break
            links.append(link)
        return links

    def _open_events(self) -> Any:  # noqa: ANN401 - a handle
        events = self._ask("nvmlEventSetCreate")
        if events is not None:
            for device in self._devices:
                kind = self._nvml.nvmlEventTypeXidCriticalError
                self._ask("nvmlDeviceRegisterEvents", device, kind, events)
        return events

    def read(self) -> list[GpuReading]:
        """Look at every device; some tens of calls, a few milliseconds each on some drivers."""
        return [self._read(index) for index in range(len(self._devices))]

    def read_pcie(self) -> list[PcieRate]:
        """Sample every device's PCIe traffic.

        Blocks for 20 ms per device and direction (nvmlDeviceGetPcieThroughput); may be called while another thread is
        in `read`. The byte counters among the field values do not block, but wrap (nvml.h), at a width that is not
        answer.
        """
        sent, received = self._nvml.NVML_PCIE_UTIL_TX_BYTES, self._nvml.NVML_PCIE_UTIL_RX_BYTES
        return [
            PcieRate(uuid, self._pcie_rate(device, sent), self._pcie_rate(device, received))
            for device, (uuid, _) in zip(self._devices, self._names, strict=True)
        ]

    def _pcie_rate(self, device: Any, counter: int) -> int | None:  # noqa: ANN401 - a handle
        answer: int | None = self._ask("nvmlDeviceGetPcieThroughput", device, counter)  # KB/s
        return None if answer is None else answer * _KB

    def _read(self, index: int) -> GpuReading:
        nvml, device = self._nvml, self._devices[index]
        memory = self._ask("nvmlDeviceGetMemoryInfo", device)
        reserved = self._ask("nvmlDeviceGetMemoryInfo", device, nvml.nvmlMemory_v2)
        rates = self._ask("nvmlDeviceGetUtilizationRates", device)
        mig = self._ask("nvmlDeviceGetMigMode", device)
        uuid, name = self._names[index]
        answer = self._fields(device, list(_FIELDS))
        return GpuReading(
            index=index,
            uuid=uuid,
            name=name,
            memory_used=getattr(memory, "used", None),
            memory_free=getattr(memory, "free", None),
            memory_total=getattr(memory, "total", None),
            memory_reserved=getattr(reserved, "reserved", None),
            gpu_pct=getattr(rates, "gpu", None),
            memory_pct=getattr(rates, "memory", None),
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", device, nvml.NVML_TEMPERATURE_GPU),
            power_mw=self._ask("nvmlDeviceGetPowerUsage", device),
            reasons=self._ask("nvmlDeviceGetCurrentClocksEventReasons", device),
            power_violation_ns=self._violation(device, "power", answer),
            thermal_violation_ns=self._violation(device, "thermal", answer),
            hardware_violation_ns=self._violation(device, "board_limit", answer),
            sync_boost_violation_ns=self._violation(device, "sync_boost", answer),
            reliability_violation_ns=self._violation(device, "reliability", answer),
            hw_thermal_violation_ns=answer.get((HELD["hw_thermal"], 0)),
            power_brake_violation_ns=answer.get((HELD["power_brake"], 0)),
            ecc_corrected=self._ecc(device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            nvlinks_active=self._active_links(index),
            nvlink_errors=self._link_errors(index),
            nvlink_sent_bytes=_scaled(answer.get((NVLINK_SENT_KIB, ALL_LINKS))),
            nvlink_received_bytes=_scaled(answer.get((NVLINK_RECEIVED_KIB, ALL_LINKS))),
            pcie_generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration", device),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", device),
            pcie_max_generation=self._ask("nvmlDeviceGetMaxPcieLinkGeneration", device),
            pcie_max_width=self._ask("nvmlDeviceGetMaxPcieLinkWidth", device),
            pcie_replays=self._ask("nvmlDeviceGetPcieReplayCounter", device),
            pcie_errors=find_kinds(answer, PCIE_ERRORS),
            is_mig=bool(mig[0]) if mig is not None else None,
            instances=self._instances(device) if mig is not None and mig[0] else None,
            process_bytes=self._processes(device),
        )

    def _fields(self, device: Any, fields: list[Field]) -> dict[Field, int]:  # noqa: ANN401 - a handle
        return decode_fields(self._ask("nvmlDeviceGetFieldValues", device, fields))

    def _violation(
        self,
        device: Any,  # noqa: ANN401 - a handle
        policy: str,
        fields: dict[Field, int],
    ) -> int | None:
        number = HELD[policy] - HELD["power"]  # as nvmlPerfPolicyType_t counts them
        answer = self._ask("nvmlDeviceGetViolationStatus", device, number)
        return fields.get((HELD[policy], 0)) if answer is None else int(answer.violationTime)

    def _instances(self, device: Any) -> tuple[MigInstance, ...] | None:  # noqa: ANN401 - a handle
        """The MIG devices; their indexes may have gaps."""
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", device)
        if most is None:
            return None
        found = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", device, i) for i in range(most))
        return tuple(self._read_instance(one) for one in found if one is not None)

    def _read_instance(self, device: Any) -> MigInstance:  # noqa: ANN401 - a handle
        memory = self._ask("nvmlDeviceGetMemoryInfo", device)
        return MigInstance(
            uuid=self._ask("nvmlDeviceGetUUID", device) or "",
            gpu_instance=self._ask("nvmlDeviceGetGpuInstanceId", device),
            compute_instance=self._ask("nvmlDeviceGetComputeInstanceId", device),
            memory_used=getattr(memory, "used", None),
            memory_free=getattr(memory, "free", None),
            memory_total=getattr(memory, "total", None),
            process_bytes=self._processes(device),
        )

    def _ecc(self, device: Any, kind: int) -> int | None:  # noqa: ANN401 - a handle
        since_reset = self._nvml.NVML_VOLATILE_ECC
        answer: int | None = self._ask("nvmlDeviceGetTotalEccErrors", device, kind, since_reset)
        return answer

    def _active_links(self, index: int) -> int | None:
        device, links = self._devices[index], self._links[index]
        states = [self._ask("nvmlDeviceGetNvLinkState", device, link) for link in links]
        return sum(state == 1 for state in states) if links else None

    def _link_errors(self, index: int) -> dict[str, int] | None:
        device, links = self._devices[index], self._links[index]
        counts: dict[str, int] = {}
        for name, kind in _LINK_ERRORS.items():
            code = getattr(self._nvml, kind)
            for link in links:
                answer = self._ask("nvmlDeviceGetNvLinkErrorCounter", device, link, code)
                if answer is not None:
                    counts[name] = counts.get(name, 0) + answer
        if counts or not links:
            return counts or None
        fields: dict[Field, int] = {}
        for link in links:
            fields |= self._fields(device, [(number, link) for number in NVLINK_ERRORS.values()])
        return find_kinds(fields, NVLINK_ERRORS)

    def _processes(self, device: Any) -> dict[int, int | None] | None:  # noqa: ANN401 - a handle
        """Compute processes and MPS clients; one in several instances of the device counts with all its memory."""
        n_bytes: dict[int, int | None] = {}
        is_reported = False
        for kind in ("Compute", "MPSCompute"):
            found = self._ask(f"nvmlDeviceGet{kind}RunningProcesses", device)
            is_reported |= found is not None
            here: dict[int, int | None] = {}
            for one in found or ():
                pid, used = int(one.pid), one.usedGpuMemory
                before = here.get(pid)
                here[pid] = used if before is None else before + (used or 0)
            n_bytes = {**here, **n_bytes}  # a client may be on both lists
        return n_bytes if is_reported else None

    def take_errors(self) -> list[Xid]:
        """Critical errors since the last call, oldest first."""
        errors: list[Xid] = []
        if self._events is None:
            return errors
        indexes = {uuid: index for index, (uuid, _) in enumerate(self._names)}
        while len(errors) < _MAX_ERRORS:
            event = self._ask("nvmlEventSetWait", self._events, 0)
            if event is None:  # NVML_ERROR_TIMEOUT: nothing waits
                break
            uuid = self._ask("nvmlDeviceGetUUID", event.device) or ""
            errors.append(Xid(indexes.get(uuid, -1), int(event.eventData), self._clock.wall_ns()))
        return errors

    def close(self) -> None:
        """Let the driver go."""
        if self._events is not None:
            self._ask("nvmlEventSetFree", self._events)
            self._events = None
        self._ask("nvmlShutdown")


def _scaled(kib: int | None) -> int | None:
    return None if kib is None else kib * _KIB
