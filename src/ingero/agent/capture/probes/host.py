"""The probes of the host as a table: which object, which ring, and what one loses without it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingero.agent.capture.kernel.perf import COUNT_PAGE_FAULTS, COUNT_PAGE_FAULTS_MAJOR


@dataclass(frozen=True, slots=True)
class HostProbe:
    """One object whose programs attach by themselves.

    Attributes:
        name: The stem of ``bpf/<name>.bpf.c`` and what users call it.
        ring: Its ring's map.
        record: Its record, ``struct ig_<record>``.
        says: What it tells.
        costs: What is missing without it.
        wakes: Whether a record should be read at once.
        filtering: Programs that are needed only where a filter says whom to watch.
        more_rings: Further rings of the object, with their record.
        events: Programs that run at a software event of perf, by name; the others attach where they were compiled for.
    """

    name: str
    ring: str
    record: str
    says: str
    costs: str
    wakes: bool = False
    filtering: tuple[str, ...] = ()
    more_rings: tuple[tuple[str, str], ...] = ()
    events: Mapping[str, int] = field(default_factory=dict)


PROBES: Final = (
    HostProbe(
        "process",
        "processes",
        "process",
        "processes that fork, exec and exit",
        "children of watched processes are not followed, and ended ones stay listed",
        wakes=True,
        more_rings=(("unfinished", "unfinished"),),
    ),
    HostProbe(
        "sched",
        "off_cpus",
        "off_cpu",
        "why threads of GPU processes were off the CPU, and who had it",
        "no explanation of slow host code: preempted, waiting for I/O and asleep look alike",
    ),
    HostProbe(
        "block",
        "blocks",
        "block",
        "disk requests, queued and served",
        "no link from stalls to disks",
    ),
    HostProbe(
        "net",
        "sockets",
        "span",
        "bytes that GPU processes send and receive on sockets",
        "no link from stalls to storage and data over the network",
    ),
    HostProbe(
        "memory",
        "reclaims",
        "span",
        "memory pages of GPU processes, and time they lost making room themselves",
        "a host short of memory looks like slow code",
    ),
    HostProbe(
        "fault",
        "faults",
        "span",
        "page faults that waited for a disk",
        "memory that was swapped out, or files read through memory, look like slow code",
        events={"fault_begin": COUNT_PAGE_FAULTS, "fault_end": COUNT_PAGE_FAULTS_MAJOR},
    ),
    HostProbe(
        "tcp",
        "retransmits",
        "tcp",
        "TCP segments sent again",
        "no sign of a lossy network",
        filtering=("tcp_sent", "tcp_received", "tcp_connecting"),
    ),
    HostProbe(
        "oom",
        "victims",
        "process",
        "victims of the OOM killer",
        "a killed rank looks like a crash",
        wakes=True,
    ),
)


def find_software_events(names: Collection[str]) -> frozenset[int]:
    """``PERF_COUNT_SW_*`` that these host probes need."""
    return frozenset(
        config for probe in PROBES if probe.name in names for config in probe.events.values()
    )
