"""The probes of the host as a table: which object, which ring, and what one loses without it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final

from ingero.agent.capture.kernel.perf import COUNT_PAGE_FAULTS, COUNT_PAGE_FAULTS_MAJOR


@dataclass(frozen=True, slots=True)
class AttachPoint:
    """Where a program can run.

    Attributes:
        program: The program for it.
        description: What users would call it.
        needs: A name in the kernel's type information: ``btf_trace_NAME`` for a tracepoint, a function's for its entry
            or exit.
        n_arguments: Arguments that the tracepoint must have; 0 for any number.
    """

    program: str
    description: str
    needs: str
    n_arguments: int = 0


@dataclass(frozen=True, slots=True)
class Hook:
    """Something that kernels tell at different attach points.

    Attributes:
        costs: What is missing without it.
        attach_points: The newest first; a program is loaded for the first that the kernel has and takes.
        is_for_filter: Whether it is needed only where a filter says whom to watch.
    """

    costs: str
    attach_points: tuple[AttachPoint, ...]
    is_for_filter: bool = False


_SWITCH: Final = Hook(
    "threads that leave the CPU are not seen",
    (
        AttachPoint(
            "sched_switch", "sched_switch with the state left", "btf_trace_sched_switch", 4
        ),
        AttachPoint(
            "sched_switch_3", "sched_switch without the state left", "btf_trace_sched_switch"
        ),
    ),
)
_SENT: Final = Hook(
    "bytes sent on sockets are not counted",
    (
        AttachPoint("sock_sent", "sock_send_length", "btf_trace_sock_send_length"),
        AttachPoint("sock_sent_fexit", "the end of sock_sendmsg()", "sock_sendmsg"),
    ),
)
_RECEIVED: Final = Hook(
    "bytes received on sockets are not counted",
    (
        AttachPoint("sock_received", "sock_recv_length", "btf_trace_sock_recv_length"),
        AttachPoint("sock_received_fexit", "the end of sock_recvmsg()", "sock_recvmsg"),
    ),
)
_SENDER: Final = Hook(
    "with a filter, segments of sockets that only send are left out",
    (
        AttachPoint("tcp_sent", "sock_send_length", "btf_trace_sock_send_length"),
        AttachPoint("tcp_sent_fentry", "tcp_sendmsg()", "tcp_sendmsg"),
    ),
    is_for_filter=True,
)
_RECEIVER: Final = Hook(
    "with a filter, segments of sockets that only receive are left out",
    (
        AttachPoint("tcp_received", "sock_recv_length", "btf_trace_sock_recv_length"),
        AttachPoint("tcp_received_fentry", "tcp_recvmsg()", "tcp_recvmsg"),
    ),
    is_for_filter=True,
)


@dataclass(frozen=True, slots=True)
class HostProbe:
    """One object whose programs attach by themselves.

    Attributes:
        name: The stem of ``bpf/<name>.bpf.c`` and what users call it.
        ring: Its ring's map.
        record: Its record, ``struct ig_<record>``.
        description: What it tells.
        costs: What is missing without it.
        wakes: Whether a record should be read at once.
        filtering: Programs that are needed only where a filter says whom to watch.
        more_rings: Further rings of the object, with their record.
        hooks: Programs of which each kernel takes another.
        events: Programs that run at a software event of perf, by name; the others attach where they were compiled for.
    """

    name: str
    ring: str
    record: str
    description: str
    costs: str
    wakes: bool = False
    filtering: tuple[str, ...] = ()
    more_rings: tuple[tuple[str, str], ...] = ()
    hooks: tuple[Hook, ...] = ()
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
        hooks=(_SWITCH,),
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
        hooks=(_SENT, _RECEIVED),
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
        filtering=("tcp_connecting",),
        hooks=(_SENDER, _RECEIVER),
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
