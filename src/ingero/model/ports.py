"""What the ports of a process's RDMA devices showed for some seconds: InfiniBand, RoCE, EFA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ingero.model.port_counters import RECEIVED, SENT

ACTIVE: Final = "ACTIVE"
"""State of a port that carries data. Source: Linux, Documentation/ABI/stable/sysfs-class-infiniband."""


def find_packets(
    counts: Mapping[str, int], unknown: Sequence[str], names: Sequence[str]
) -> int | None:
    """The count of the first of these counters that a device has; None where that is not known, or there is none."""
    name = next((name for name in names if name in counts or name in unknown), "")
    return counts.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPort:
    """One port in some seconds. Whatever it carried is counted, also for other processes.

    Attributes:
        name: ``mlx5_0 port 1``.
        state: At the end, `ACTIVE` or another; empty where it is not known.
        phys_state: Of the link below, at the end: ``LinkUp``.
        rate_gbps: Gigabits a second that it negotiated; 0 where that is not known.
        best_gbps: The greatest rate of an active port of the same board on this host; 0 where there is no other.
        window_ns: Between the first and the last reading.
        busy_ns: Of that, with packets, and `stalled_ns`.
        stalled_ns: Of that, in which nothing was sent until a timer ran out.
        counts: By how much each counter rose that could be read at both ends and did not start anew in between.
        totals: What each of these had counted at the beginning, since its device or somebody set it to 0.
        unknown: The other counters: one that cannot be read, is gone, fell, or stands at its greatest value.
        was_active: Whether its state was `ACTIVE` at the beginning.
    """

    name: str
    state: str
    phys_state: str
    rate_gbps: float
    best_gbps: float
    window_ns: int
    busy_ns: int
    stalled_ns: int
    counts: Mapping[str, int]
    totals: Mapping[str, int] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    was_active: bool = True

    @property
    def n_sent(self) -> int | None:
        """Packets; None where that is not known."""
        return find_packets(self.counts, self.unknown, SENT)

    @property
    def n_received(self) -> int | None:
        """Packets; None where that is not known."""
        return find_packets(self.counts, self.unknown, RECEIVED)


@dataclass(frozen=True, slots=True)
class RdmaTraffic:
    """All ports of the RDMA devices that a process has open.

    Attributes:
        ports: By device and number.
        reason: Why it is not known which these are; empty otherwise.
    """

    ports: tuple[RdmaPort, ...] = field(default=())
    reason: str = ""
