"""What the kernel has counted about one process: cumulative counters, and where its time went for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

RUNNING: Final = "R"
"""On a processor or ready. Source: proc_pid_stat(5), as for the next."""
ASLEEP: Final = "S"
BLOCKED: Final = "D"
STOPPED: Final = "Tt"
"""By a signal, or by a tracer."""
ENDED: Final = "Z"
"""And its parent has not asked how."""
OFF_SPAN: Final = np.dtype([
    ("start_ns", "<i8"),
    ("off_ns", "<i8"),
    ("wait_ns", "<i8"),
    ("reason", "u1"),
])
"""A stretch of time off a processor: when it began, its length, the part of it ready to run, an `OffCpuReason`."""


class TaskTimes(NamedTuple):
    """What the kernel has counted of one thread since it began.

    Attributes:
        ran_ns: On a processor.
        ready_ns: Ready to run without one.
        start_ticks: When it began, in clock ticks since boot: with its number it tells it from a later one.
    """

    ran_ns: int
    ready_ns: int
    start_ticks: int = 0


@dataclass(frozen=True, slots=True)
class QuotaMember:
    """Another process under a quota: the same one, whatever name it takes.

    Attributes:
        pid: Its number.
        start_ticks: When it began, in clock ticks since boot.
        name: As it was called when it was read.
    """

    pid: int
    start_ticks: int
    name: str = field(compare=False)

    @property
    def label(self) -> str:
        """For people: ``stress (12)``."""
        return f"{self.name} ({self.pid})" if self.pid else self.name


OTHERS: Final = QuotaMember(0, 0, "others in its cgroup")
"""Stands for all others of peers' quotas."""


class ThrottledTotals(NamedTuple):
    """How a cgroup was held back since it was made.

    Attributes:
        took_ns: For how long.
        n_periods: In how many periods.
    """

    took_ns: int
    n_periods: int


@dataclass(frozen=True, slots=True)
class Quota:
    """The processor time that a cgroup may have, and what became of it.

    Attributes:
        n_processors: What it may use, in processors.
        cgroup: Inode of its folder.
        others_ns: Processor time of its other members so far; those that are children of the process are not among
            them, and of many not all are.
    """

    n_processors: float
    cgroup: int = 0
    others_ns: Mapping[QuotaMember, int] = field(default_factory=dict)


class ProcessorTimes(NamedTuple):
    """Of one processor, or of several together, since the machine began.

    Attributes:
        worked_ns: For how long it did something.
        stolen_ns: For how long it had something to do, and a hypervisor gave it to others.
        which: Bit N of it stands for processor N: what is known of others at another time cannot be compared.
    """

    worked_ns: int
    stolen_ns: int
    which: int


@dataclass(frozen=True, slots=True)
class ProcessCounters:
    """One reading.

    Attributes:
        mono_ns: When, on the monotonic clock.
        threads: Its threads by their number; of many not all.
        quotas: Those that it is under, the innermost first.
        n_processors_allowed: Processors that it may run on.
        nice: Of the main thread.
        children: As ``threads``, of the first thread of each child process: a loader's workers.
        boot_ticks: When, in clock ticks since boot; no later than anything was read.
        throttled: Each cgroup above it that can be held back, limited or not, by the inode of its folder.
        kernel_ns: Processor time of all its threads in the kernel so far, by the kernel's own samples.
        n_minor_faults: Page faults of all its threads that waited for no disk.
        processors: All those together that it may run on and that are online; None where that is not known.
    """

    mono_ns: int
    threads: Mapping[int, TaskTimes]
    quotas: tuple[Quota, ...] = ()
    n_processors_allowed: int = 0
    nice: int = 0
    children: Mapping[int, TaskTimes] = field(default_factory=dict)
    boot_ticks: int = 0
    throttled: Mapping[int, ThrottledTotals] = field(default_factory=dict)
    kernel_ns: int = 0
    n_minor_faults: int = 0
    processors: ProcessorTimes | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What a process did between two readings.

    Attributes:
        first: The reading at the beginning.
        last: That at the end.
        n_ops: Collectives that it entered in between.
        own_ns: Its own time before these.
        cuda_ns: Time that its threads spent in calls of CUDA's runtime and driver; None where that is not known.
    """

    first: ProcessCounters
    last: ProcessCounters
    n_ops: int
    own_ns: int
    cuda_ns: float | None = None


@dataclass(frozen=True, slots=True)
class WorkRates:
    """What a process did for one operation, on average.

    Of the same process at another time, or of its peers, it is what the process is compared with.

    Attributes:
        n_ops: Operations that these are the average of.
        period_ns: From one to the next.
        own_ns: Own time before one.
        computing_ns: On a processor, of the process's busiest thread, or of a child process that wanted one longer.
        ready_ns: Ready to run and not running, of the same thread.
        throttled_ns: Held back by the quota of a cgroup.
        n_processors: The quota, or the smallest that was seen; None without one.
        others: Processors that others of the quota use, as far as that is known; of several peers under one name.
        n_processors_allowed: Processors that it may run on.
        nice: Of the main thread.
        child_pid: The child process of which computing and ready are; 0 for the process itself.
        is_of_peers: Whether these are its peers', and not its own.
        end_ticks: When that ended, in clock ticks since boot; 0 for peers.
        n_unknown_others: Others of the quota of which it is unknown what they use.
        n_unknown_threads: Threads and children of which it is unknown what they did.
        device_ns: Of own time, spent in calls of CUDA, at least: the host waits for its GPU there, spinning or asleep.
            None where calls are not probed.
        cgroup: Inode of the cgroup's folder whose quota this is about; 0 for none, and for peers.
        parallel: Time on a processor of all its threads and children, by that of the one that computing is of.
        kernel_ns: In the kernel, of all threads of the process; None where that is not known.
        minor_faults: Page faults of all threads of the process that waited for no disk; None where that is not known.
        stolen_ns: For how long a hypervisor had the processor on which the thread of ``computing_ns`` was; None where
            that is not known.
    """

    n_ops: int
    period_ns: float
    own_ns: float
    computing_ns: float
    ready_ns: float
    throttled_ns: float = 0.0
    n_processors: float | None = None
    others: Mapping[QuotaMember, float] = field(default_factory=dict)
    n_processors_allowed: int = 0
    nice: int = 0
    child_pid: int = 0
    is_of_peers: bool = False
    end_ticks: int = 0
    n_unknown_others: int = 0
    n_unknown_threads: int = 0
    device_ns: float | None = None
    cgroup: int = 0
    parallel: float = 1.0
    kernel_ns: float | None = None
    minor_faults: float | None = None
    stolen_ns: float | None = None


class CudaWait(NamedTuple):
    """A call of CUDA that a thread has not returned from.

    Attributes:
        op: Its operation, as in a recording.
        since_ns: When it was entered, on the monotonic clock.
    """

    op: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class CodeLines:
    """Which lines of a program its first thread was at, in many looks.

    Attributes:
        n_looks: Looks that saw a line.
        running: Looks at which it was on a processor or ready, by line: ``train.py:7 main → pad``.
        waiting: Looks at which it was neither, likewise.
        reason: Why no line could be seen; empty otherwise.
        states: All looks, by the letter with which the kernel names the thread's state; also where no line is seen.
    """

    n_looks: int = 0
    running: Mapping[str, int] = field(default_factory=dict)
    waiting: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    states: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OffCpuTimes:
    """Where one thread's time off the processor went while every switch was seen, in nanoseconds.

    Attributes:
        n_ops: Collectives that the process entered meanwhile.
        stopped_ns: Stopped by a signal, a tracer or the freezer of its cgroup.
        io_ns: In an uninterruptible wait, page faults and reclaim not included.
        faults_ns: In page faults that waited for a disk.
        reclaim_ns: In memory reclaim.
        worker_io_ns: Asleep while the processes that read for it were never idle: the part in which these waited for
            a disk.
        by_others_ns: Ready, and another task had its processor, by that task's name.
        n_lost: Switches that were not seen.
    """

    n_ops: int
    stopped_ns: int = 0
    io_ns: int = 0
    faults_ns: int = 0
    reclaim_ns: int = 0
    worker_io_ns: int = 0
    by_others_ns: Mapping[str, int] = field(default_factory=dict)
    n_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTraffic:
    """What a process sent to one host over TCP: over a connection since it began, or over several in some seconds.

    Attributes:
        n_connections: How many.
        rtt_ns: Round trip, smoothed.
        rtt_var_ns: Its mean deviation.
        min_rtt_ns: The least of the last five minutes.
        n_segments: Segments with data.
        n_again: Of these, sent again.
        n_bytes: Acknowledged by the other end.
        rate: Bytes a second at which it acknowledged them of late.
        busy_ns: With data that it had not acknowledged.
        window_ns: Of that, with the receiver's window full.
        buffer_ns: Of that, with the send buffer full.
        timeout_ns: In which nothing came back until a timer ran out.
    """

    n_connections: int
    rtt_ns: int
    rtt_var_ns: int
    min_rtt_ns: int
    n_segments: int
    n_again: int
    n_bytes: int
    rate: int
    busy_ns: int
    window_ns: int = 0
    buffer_ns: int = 0
    timeout_ns: int = 0

    def since(self, then: HostTraffic) -> HostTraffic:
        """What came after an earlier reading of the same connection."""
        return replace(
            self, **{name: getattr(self, name) - getattr(then, name) for name in _TRAFFIC_TOTALS}
        )

    @classmethod
    def join(cls, several: Sequence[HostTraffic]) -> HostTraffic:
        """All connections to a host: sums, and of round trips the mean weighted by segments."""
        n_segments = max(sum(one.n_segments for one in several), 1)
        return cls(
            n_connections=len(several),
            rtt_ns=sum(one.rtt_ns * one.n_segments for one in several) // n_segments,
            rtt_var_ns=sum(one.rtt_var_ns * one.n_segments for one in several) // n_segments,
            min_rtt_ns=min(one.min_rtt_ns for one in several),
            rate=sum(one.rate for one in several),
            **{name: sum(getattr(one, name) for one in several) for name in _TRAFFIC_TOTALS},
        )


_TRAFFIC_TOTALS: Final = (
    "n_segments", "n_again", "n_bytes", "busy_ns", "window_ns", "buffer_ns", "timeout_ns",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Traffic:
    """A process's connections in some seconds.

    Attributes:
        hosts: What it sent, by the address at the other end; hosts to which it sent nothing are left out.
        errors: What its interfaces counted of errors and drops meanwhile: ``eth0 receive errors``.
        reason: Why nothing could be read; empty otherwise.
    """

    hosts: Mapping[str, HostTraffic] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
