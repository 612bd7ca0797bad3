"""Parts of a time, each with its cause, become the answer to a question: shares, what was ruled out, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ingero.model.diagnosis import CauseKind, DiagnosedCause
from ingero.model.incidents import RuledOut
from ingero.recording.causal.attribution import NAMED_SHARE

_NAMES: Final = {
    CauseKind.CPU_QUOTA: "out of CPU quota (cgroup)",
    CauseKind.CPU_CONTENTION: "waiting for a free CPU",
    CauseKind.CPU_STEAL: "its virtual machine's processors are taken by the hypervisor",
    CauseKind.STOPPED: "stopped or frozen",
    CauseKind.BLOCKED_IO: "blocked on I/O",
    CauseKind.PAGE_FAULTS: "page faults",
    CauseKind.MEMORY_RECLAIM: "memory reclaim",
    CauseKind.MORE_COMPUTING: "computing on the host",
    CauseKind.GPU_COMPUTING: "computing on the GPU",
    CauseKind.ASLEEP: "asleep: it waits for a lock, a socket or another process",
    CauseKind.NETWORK_DELAY: "packets take long on their way",
    CauseKind.NETWORK_LOSS: "packets are lost on their way",
    CauseKind.WINDOW_LIMITED: "a full window or send buffer",
    CauseKind.SLOW_PORT: "a port that is down, or slower than its like",
}
_NEXT_STEPS: Final = {
    CauseKind.CPU_QUOTA: (
        "raise the container's CPU limit (cpu.max), or remove it",
        "use fewer host threads",
    ),
    CauseKind.CPU_CONTENTION: (
        "move the neighbours off this node, or lower their cpu.weight",
        "give the job its own CPUs (taskset, cpuset)",
    ),
    CauseKind.CPU_STEAL: (
        "give the virtual machine processors of its own, or move it to a host that has them free",
        "`vmstat 1` on this node shows it as `st`",
    ),
    CauseKind.STOPPED: (
        "find who sends SIGSTOP, traces it or freezes its cgroup: a debugger, a checkpointer, `docker pause`",
    ),
    CauseKind.BLOCKED_IO: (
        "read ahead in workers, or in more of them, and write checkpoints in the background",
        "`sudo ingero trace` on this node tells which requests",
    ),
    CauseKind.PAGE_FAULTS: ("add memory: pages are read back from a disk",),
    CauseKind.MEMORY_RECLAIM: ("free host memory or raise the memory limit",),
    CauseKind.GPU_COMPUTING: (
        "compare the GPU's clocks, power, temperature and throttling with the peers' (`nvidia-smi -q`)",
        "look whether its data are more than its peers', and who else uses this GPU",
    ),
    CauseKind.MORE_COMPUTING: (
        "look at the lines at which it runs, and whether its data are more than its peers'",
        "compare the processors' clocks with the peers'",
        "`sudo ingero trace` on this node tells where in the program",
    ),
    CauseKind.ASLEEP: ("look at the line at which it waits",),
    CauseKind.NETWORK_DELAY: (
        "look for a queue or a detour on the way to that host: switches, `tracepath`, rate limits (`tc -s qdisc`)",
        "compare the speed of both ends' interfaces with that of others (`ethtool`)",
    ),
    CauseKind.NETWORK_LOSS: (
        "look for errors on both ends' ports and cables (`ethtool -S`), and for drops on the switches between them",
    ),
    CauseKind.WINDOW_LIMITED: (
        "look at what the process at the other end does: it does not read",
        "raise the largest buffers (net.ipv4.tcp_rmem, net.ipv4.tcp_wmem)",
    ),
    CauseKind.UNEXPLAINED: ("`sudo ingero trace` on this node, then `ingero explain`",),
}


@dataclass(frozen=True, slots=True)
class ExcessCauses:
    """What was found.

    Attributes:
        causes: Greatest share first, ``unexplained`` last.
        ruled_out: The others that could be looked at.
        todo: Next steps.
        excess_ns: The time that was to be explained.
    """

    causes: tuple[DiagnosedCause, ...]
    ruled_out: tuple[RuledOut, ...]
    todo: tuple[str, ...]
    excess_ns: int


@dataclass(frozen=True, slots=True)
class CausePart:
    """A cause before it has a share.

    Attributes:
        kind: Which.
        extra_ns: What it takes of the time that is to be explained.
        evidence: What was measured.
        name: In plain words; empty for the usual.
        todo: Next steps; empty for the usual.
    """

    kind: CauseKind
    extra_ns: float
    evidence: tuple[str, ...]
    name: str = ""
    todo: tuple[str, ...] = ()


def conclude(parts: list[CausePart], excess_ns: int, *why: str) -> ExcessCauses:
    """The answer: causes with `NAMED_SHARE` of the time or more, and the rest as unexplained with ``why``."""
    whole_ns = max(float(excess_ns), sum(part.extra_ns for part in parts), 1.0)
    shares = {part.kind: part.extra_ns / whole_ns for part in parts}
    found, ruled_out, todo = list[DiagnosedCause](), list[RuledOut](), list[str]()
    for part in sorted(parts, key=lambda part: (-part.extra_ns, part.kind)):
        name, share = part.name or _NAMES[part.kind], round(shares[part.kind], 3)
        if shares[part.kind] >= NAMED_SHARE:
            found.append(DiagnosedCause(part.kind, name, share, part.evidence))
            todo += part.todo or _NEXT_STEPS[part.kind]
        else:
            ruled_out.append(RuledOut(_NAMES[part.kind], share, "; ".join(part.evidence)))
    rest = round(1.0 - sum(cause.share for cause in found), 3)
    if not found or rest >= NAMED_SHARE:
        found.append(DiagnosedCause(CauseKind.UNEXPLAINED, "unexplained", rest, why))
        todo += _NEXT_STEPS[CauseKind.UNEXPLAINED]
    return ExcessCauses(tuple(found), tuple(ruled_out), tuple(todo), max(excess_ns, 0))
