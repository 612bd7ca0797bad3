"""The whole machine once a second: processors, memory, swap and load, from ``/proc``.

Sources: proc_stat(5), proc_meminfo(5), proc_loadavg(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingero.agent.metrics.series import Kind, Series
from ingero.model.arrays import Records
from ingero.model.recording import SNAPSHOT

_IDLE_FIELDS = (3, 4)  # idle and iowait: a processor that waits for a disk could run a program


class Processors:
    """How busy the processors were between two reads of ``/proc/stat``.

    Source: proc_stat(5): user nice system idle iowait irq softirq steal, in ticks since boot.

    Args:
        proc: Where ``/proc`` is.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._path = proc / "stat"
        self._previous: tuple[int, int] | None = None

    def read(self) -> float | None:
        """Busy share of all of them since the read before, 0 to 1.

        None at the first and when the file cannot be read.
        """
        try:
            line = self._path.read_text(encoding="ascii").split("\n", 1)[0]
            times = [int(text) for text in line.split()[1:9]]
            total, idle = sum(times), sum(times[i] for i in _IDLE_FIELDS)
        except (OSError, ValueError, IndexError):
            return None
        before, self._previous = self._previous, (total, idle)
        if before is None or total <= before[0]:
            return None
        # The kernel's count of iowait may go back.
        return min(max(1 - (idle - before[1]) / (total - before[0]), 0.0), 1.0)

    def read_idle(self) -> float | None:
        """The rest of it: the share in which they ran nothing."""
        share = self.read()
        return None if share is None else 1 - share


@dataclass(frozen=True, slots=True)
class MachineState:
    """One sample of the machine.

    Attributes:
        cpu_share: Busy share of all processors since the sample before, 0 to 1; None at the first.
        memory_share: Share of memory that is not available.
        available_bytes: Memory that programs can still get.
        swap_bytes: Swap in use.
        load1: Load average of the last minute.
    """

    cpu_share: float | None
    memory_share: float
    available_bytes: int
    swap_bytes: int
    load1: float


class Machine:
    """Samples the machine; remembers the sample before.

    Args:
        proc: Where ``/proc`` is.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._processors = Processors(proc)
        self.state: MachineState | None = None

    def sample(self) -> MachineState | None:
        """Read it now; None when a file cannot be opened, for want of descriptors say."""
        try:
            lines, load = self._read("meminfo").splitlines(), self._read("loadavg")
        except OSError:
            self.state = None
            return None
        memory = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines}
        available = memory.get("MemAvailable", memory["MemFree"])
        self.state = MachineState(
            cpu_share=self._processors.read(),
            memory_share=1 - available / memory["MemTotal"],
            available_bytes=available,
            swap_bytes=memory.get("SwapTotal", 0) - memory.get("SwapFree", 0),
            load1=float(load.split()[0]),
        )
        return self.state

    def _read(self, name: str) -> str:
        return (self._proc / name).read_text(encoding="ascii")

    def iter_series(self) -> Iterator[Series]:
        """The last sample as series; nothing before the first, and when it failed."""
        state = self.state
        if state is None:
            return
        for name, unit, description, value in (
            ("system.cpu.utilization", "1", "Busy share of all processors.", state.cpu_share),
            (
                "system.memory.utilization", "1", "Share of memory in use.", state.memory_share,
            ),
            (
                "system.memory.usage.available", "By", "Memory that programs can still get.",
                state.available_bytes,
            ),
            ("system.cpu.load_average.1m", "1", "Load average of a minute.", state.load1),
        ):  # fmt: skip
            if value is not None:
                yield Series(name, Kind.GAUGE, unit, description, (((), float(value)),))


def build_snapshot(state: MachineState, wall_ns: int) -> Records:
    """A row of SNAPSHOT; a first sample has no share of the processors and is 0 there, as recordings have it."""
    row = np.zeros(1, SNAPSHOT)
    row["wall_ns"] = wall_ns
    row["cpu_pct"] = 100 * (state.cpu_share or 0)
    row["mem_pct"] = 100 * state.memory_share
    row["mem_available_mib"] = state.available_bytes >> 20
    row["swap_mib"] = state.swap_bytes >> 20
    row["load1"] = state.load1
    return row
