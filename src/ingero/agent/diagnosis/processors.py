"""What the kernel counts of a machine's processors: for how long each worked, and a hypervisor gave it to others.

Source: proc_stat(5): ``cpuN user nice system idle iowait irq softirq steal guest guest_nice``, in clock ticks. Guests'
time is counted in ``user`` as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingero.model.counters import ProcessorTimes
from ingero.units import NS_PER_S

TICK_NS: Final = NS_PER_S // os.sysconf("SC_CLK_TCK")
_WORKS: Final = (1, 2, 3, 6, 7)
"""Fields of a line in which the processor did something."""
_STOLEN: Final = 8
_UNSTOLEN_NS: Final = 30 * NS_PER_S
"""Between two looks at a machine of which nothing was ever stolen: the file is a long one where there are many
processors, and most such machines are no virtual ones."""


@dataclass(slots=True)
class ProcessorCounters:
    """Those of this machine. One thread.

    Attributes:
        proc: ``/proc``.
    """

    proc: Path = Path("/proc")
    _times: Mapping[int, ProcessorTimes] = field(default_factory=dict)
    _next_ns: int = 0

    def read_due(self, mono_ns: int) -> Mapping[int, ProcessorTimes]:
        """Each processor's times since the machine began, by its number: as of that moment, or of a look before.

        Empty where the kernel does not tell.
        """
        if mono_ns >= self._next_ns:
            self._times = _read_times(self.proc / "stat")
            is_stolen = any(one.stolen_ns for one in self._times.values())
            self._next_ns = mono_ns + (1 if is_stolen else _UNSTOLEN_NS)
        return self._times


def _read_times(path: Path) -> dict[int, ProcessorTimes]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        name, *_ = fields = line.split() or [""]
        if not name.startswith("cpu"):
            break
        if name != "cpu" and len(fields) > _STOLEN:
            worked = sum(int(fields[at]) for at in _WORKS)
            number, stolen = int(name[3:]), int(fields[_STOLEN])
            found[number] = ProcessorTimes(worked * TICK_NS, stolen * TICK_NS, 1 << number)
    return found
