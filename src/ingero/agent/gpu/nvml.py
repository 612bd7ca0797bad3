"""NVML through NVIDIA's own binding (``nvidia-ml-py``), in this process.

A missing library or package is one error at the start; a value that a device does not have is None afterwards. Source of
meanings and units: nvml.h of the binding's version (13.6), whose functions it names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from ingero.agent.gpu.readings import GpuReading, Xid
from ingero.errors import UnsupportedError
from ingero.telemetry.clock import Clock

_MOST_ERRORS: Final = 256
_NVLINK_ERRORS: Final = (
    "NVML_NVLINK_ERROR_DL_REPLAY",
    "NVML_NVLINK_ERROR_DL_RECOVERY",
    "NVML_NVLINK_ERROR_DL_CRC_FLIT",
)


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
        except self._nvml.NVMLError:
            return None

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

    def _read(self, index: int) -> GpuReading:
        nvml, device = self._nvml, self._devices[index]
        memory = self._ask("nvmlDeviceGetMemoryInfo", device)
        rates = self._ask("nvmlDeviceGetUtilizationRates", device)
        mig = self._ask("nvmlDeviceGetMigMode", device)
        uuid, name = self._names[index]
        return GpuReading(
            index=index,
            uuid=uuid,
            name=name,
            memory_used=getattr(memory, "used", None),
            memory_free=getattr(memory, "free", None),
            memory_total=getattr(memory, "total", None),
            gpu_pct=getattr(rates, "gpu", None),
            memory_pct=getattr(rates, "memory", None),
            sm_mhz=self._ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_SM),
            memory_mhz=self._ask("nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_MEM),
            temperature_c=self._ask("nvmlDeviceGetTemperature", device, nvml.NVML_TEMPERATURE_GPU),
            power_mw=self._ask("nvmlDeviceGetPowerUsage", device),
            reasons=self._ask("nvmlDeviceGetCurrentClocksEventReasons", device),
            power_violation_ns=self._violation(device, nvml.NVML_PERF_POLICY_POWER),
            thermal_violation_ns=self._violation(device, nvml.NVML_PERF_POLICY_THERMAL),
            hardware_violation_ns=self._violation(device, nvml.NVML_PERF_POLICY_BOARD_LIMIT),
            ecc_corrected=self._ecc(device, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            ecc_uncorrected=self._ecc(device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            nvlinks_active=self._active_links(index),
            nvlink_errors=self._link_errors(index),
            pcie_generation=self._ask("nvmlDeviceGetCurrPcieLinkGeneration", device),
            pcie_width=self._ask("nvmlDeviceGetCurrPcieLinkWidth", device),
            pcie_replays=self._ask("nvmlDeviceGetPcieReplayCounter", device),
            is_mig=bool(mig[0]) if mig is not None else None,
            process_bytes=self._processes(device),
        )

    def _violation(self, device: Any, policy: int) -> int | None:  # noqa: ANN401 - a handle
        told = self._ask("nvmlDeviceGetViolationStatus", device, policy)
        return None if told is None else int(told.violationTime)  # nanoseconds

    def _ecc(self, device: Any, kind: int) -> int | None:  # noqa: ANN401 - a handle
        since_reset = self._nvml.NVML_VOLATILE_ECC
        told: int | None = self._ask("nvmlDeviceGetTotalEccErrors", device, kind, since_reset)
        return told

    def _active_links(self, index: int) -> int | None:
        device, links = self._devices[index], self._links[index]
        states = [self._ask("nvmlDeviceGetNvLinkState", device, link) for link in links]
        return sum(state == 1 for state in states) if links else None

    def _link_errors(self, index: int) -> int | None:
        told = [
            self._ask(
                "nvmlDeviceGetNvLinkErrorCounter",
                self._devices[index],
                link,
                getattr(self._nvml, kind),
            )
            for link in self._links[index]
            for kind in _NVLINK_ERRORS
        ]
        known = [count for count in told if count is not None]
        return sum(known) if known else None

    def _processes(self, device: Any) -> dict[int, int | None] | None:  # noqa: ANN401 - a handle
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", device)
        return None if found is None else {int(one.pid): one.usedGpuMemory for one in found}

    def take_errors(self) -> list[Xid]:
        """Critical errors since the last call, oldest first."""
        errors: list[Xid] = []
        if self._events is None:
            return errors
        indexes = {uuid: index for index, (uuid, _) in enumerate(self._names)}
        while len(errors) < _MOST_ERRORS:
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
