"""Recordings of single faults, beside those of ``ingero demo``: one per rule that has no real recording yet.

Every fault stands on a healthy training loop (`ingero.recording.scenarios.loop`) and is built from what probes see, not
from what a rule looks for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Final

from tests.recording.scenarios.ranks import RANK_FAULTS
from tests.recording.scenarios.serving import SERVING_FAULTS

from ingero.model.events import (
    CudaOp,
    DriverOp,
    EventFlag,
    GpuOp,
    GraphOp,
    HostOp,
    IoOp,
    NetOp,
    OffCpuReason,
    Source,
)
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import (
    FREE,
    FUNCTION,
    LAUNCH,
    MALLOC,
    SYNC,
    Loop,
    LoopStep,
    on_a_loop,
)
from ingero.units import NS_PER_MS, NS_PER_S, NS_PER_US

PID: Final = 4821
_SHORT: Final = LoopStep(n_launches=4, copy_ns=0, sync_ns=4 * NS_PER_MS)


def _stalled(stall: Callable[[Loop], None]) -> Callable[[], RecordingBuilder]:
    """A scenario of a healthy loop, then forty steps with one stall each between launches and waiting."""

    @functools.wraps(stall)
    @on_a_loop
    def fill(loop: Loop) -> None:
        loop.steps(50)
        for _ in range(40):
            loop.step(LoopStep(sync_ns=0))
            stall(loop)
            loop.wait(4 * NS_PER_MS)

    return fill


def input_starvation_by_worker() -> RecordingBuilder:
    """The training thread sleeps until a child process hands over a batch."""
    built = RecordingBuilder().name(4900, "pt_data_worker")
    built.call((Source.HOST, HostOp.FORK), 0, 0, PID, arg1=4900)
    loop = Loop(built, at_ns=NS_PER_MS)
    for _ in range(30):
        loop.step()
        loop.sleep(120 * NS_PER_MS, other_pid=4900)
    return built


@on_a_loop
def one_off_stall(loop: Loop) -> None:
    """Between two steps the host evaluates the model for seconds."""
    loop.steps(60)
    loop.sleep(NS_PER_MS)
    loop.rest(4_000 * NS_PER_MS)
    loop.steps(300)


def compile_for(loop: Loop, seconds: float, pid: int, *, n_programs: int = 1) -> None:
    """A pause in which the host computes, programs run one after the other, and code is loaded at the end."""
    loop.sleep(NS_PER_MS)
    life = loop.recording
    ran_ns = round(seconds * NS_PER_S / 2)
    for i in range(n_programs):
        at_ns = loop.at_ns + (i * ran_ns) // n_programs
        life.call((Source.HOST, HostOp.FORK), at_ns, 0, PID, arg1=pid + i)
        life.call((Source.HOST, HostOp.EXEC), at_ns + NS_PER_MS, 0, pid + i)
        life.call((Source.HOST, HostOp.EXIT), at_ns + ran_ns // n_programs, 0, pid + i)
    loop.rest(round(seconds * NS_PER_S))
    loop.call((Source.DRIVER, DriverOp.MODULE_LOAD), NS_PER_MS)


@on_a_loop
def repeated_compiling(loop: Loop) -> None:
    """A job that was running already meets a new shape every ten steps, and a compiler runs for each."""
    for i in range(5):
        loop.steps(10)
        compile_for(loop, 2.0, 6000 + 10 * i, n_programs=2)
    loop.steps(10)


@on_a_loop
def cpu_contention(loop: Loop) -> None:
    """Launches lose their CPU in a recording whose probe did not read the reason."""
    loop.steps(50)
    for _ in range(40):
        loop.step(LoopStep(sync_ns=0))
        start_ns, _ = loop.call(LAUNCH, 5 * NS_PER_MS, arg0=FUNCTION)
        loop.recording.off_cpu(start_ns + 10_000, 4 * NS_PER_MS, PID, OffCpuReason.UNKNOWN)
        loop.wait(4 * NS_PER_MS)


@_stalled
def cgroup_throttling(loop: Loop) -> None:
    """The container's quota ends in every period."""
    loop.at_ns = loop.recording.off_cpu(loop.at_ns, 30 * NS_PER_MS, PID, OffCpuReason.THROTTLED)


@_stalled
def blocking_io(loop: Loop) -> None:
    """The training thread reads its next batch from the disk itself."""
    for _ in range(4):
        start_ns = loop.at_ns
        loop.recording.call((Source.IO, IoOp.READ), start_ns + 10_000, 3 * NS_PER_MS, PID, arg0=256)
        loop.at_ns = loop.recording.off_cpu(
            start_ns, 3 * NS_PER_MS + 20_000, PID, OffCpuReason.BLOCKED_IO
        )


@_stalled
def blocking_writes(loop: Loop) -> None:
    """The training thread writes its checkpoint itself and waits for the disk."""
    start_ns = loop.at_ns
    loop.recording.call((Source.IO, IoOp.WRITE), start_ns + 10_000, 9 * NS_PER_MS, PID, arg0=2048)
    loop.at_ns = loop.recording.off_cpu(
        start_ns, 9 * NS_PER_MS + 20_000, PID, OffCpuReason.BLOCKED_IO
    )


@on_a_loop
def noisy_neighbour(loop: Loop) -> None:
    """A build in another container starts task after task on the training thread's CPU."""
    loop.steps(50)
    loop.recording.call((Source.HOST, HostOp.EXEC), 0, 0, PID, cgroup_id=70)
    for i in range(40):
        pid = 9000 + i % 8
        loop.recording.name(pid, ("cc1", "ld", "make")[i % 3])
        loop.recording.call((Source.HOST, HostOp.EXEC), loop.at_ns, 0, pid, cgroup_id=90)
        loop.step(LoopStep(sync_ns=0))
        loop.preempted_call(SYNC, 16 * NS_PER_MS, (6 * NS_PER_MS, 6 * NS_PER_MS), pid)


def managed_memory() -> RecordingBuilder:
    """Managed arrays grow past the device's 15 GiB, and from then on every step waits for pages."""
    built = RecordingBuilder(gpu_model="Tesla T4, 15360 MiB")
    loop = Loop(built)
    for i in range(24):
        loop.call(
            (Source.CUDA, CudaOp.MALLOC_MANAGED), 200 * NS_PER_US,
            arg0=1 << 30, arg1=0x7E00_0000_0000 + (i << 32),
        )  # fmt: skip
        loop.steps(6, LoopStep(sync_ns=(60 if i >= 15 else 12) * NS_PER_MS))
    return built


@on_a_loop
def graph_contended(loop: Loop) -> None:
    """Shapes are captured one after the other while a backup has the same CPU."""
    loop.recording.name(8821, "backup")
    loop.steps(50)
    for i in range(8):
        loop.call((Source.CUDA_GRAPH, GraphOp.BEGIN_CAPTURE), 20 * NS_PER_US, arg1=1)
        for k in range(20):
            loop.call(LAUNCH, 12 * NS_PER_US, arg0=FUNCTION + k * 64)
            loop.preempt(loop.at_ns, NS_PER_MS, 8821)
            loop.rest(NS_PER_MS + 20 * NS_PER_US)
        loop.call((Source.CUDA_GRAPH, GraphOp.END_CAPTURE), 100 * NS_PER_US, arg0=0x4000 + i)
        loop.call((Source.CUDA_GRAPH, GraphOp.INSTANTIATE), 2 * NS_PER_MS, arg0=0x5000 + i)
    for i in range(160):
        loop.call((Source.CUDA_GRAPH, GraphOp.LAUNCH), 30 * NS_PER_US, arg0=0x5000 + i % 8)
        loop.wait(8 * NS_PER_MS)


@_stalled
def page_fault_stall(loop: Loop) -> None:
    """Major faults on the training thread."""
    loop.at_ns = loop.recording.call(
        (Source.HOST, HostOp.PAGE_FAULT), loop.at_ns, 6 * NS_PER_MS, PID
    )


@_stalled
def reclaim_stall(loop: Loop) -> None:
    """Direct reclaim on the training thread."""
    loop.at_ns = loop.recording.call(
        (Source.HOST, HostOp.DIRECT_RECLAIM), loop.at_ns, 6 * NS_PER_MS, PID
    )


@_stalled
def network_wait(loop: Loop) -> None:
    """The training thread fetches its batch over a socket."""
    loop.recording.call((Source.NET, NetOp.RECV), loop.at_ns, 9 * NS_PER_MS, PID, arg1=1 << 20)
    loop.at_ns = loop.recording.off_cpu(loop.at_ns, 9 * NS_PER_MS, PID, OffCpuReason.SLEEP)


def sync_bound() -> RecordingBuilder:
    """``.item()`` after every kernel."""
    built = RecordingBuilder()
    Loop(built).steps(600, LoopStep(n_launches=1, copy_ns=0, sync_ns=400 * NS_PER_US))
    return built


def launch_bound() -> RecordingBuilder:
    """Hundreds of tiny kernels a step, and a GPU that is always done."""
    built = RecordingBuilder()
    step = LoopStep(400, 8 * NS_PER_US, 5 * NS_PER_US, copy_ns=0, sync_ns=20 * NS_PER_US)
    Loop(built).steps(40, step)
    return built


PIN: Final = (Source.CUDA, CudaOp.HOST_ALLOC)


@on_a_loop
def memory_leak(loop: Loop) -> None:
    """A tensor of every step is kept for ever; a scratch buffer is freed."""
    for i in range(120):
        loop.call(MALLOC, 100 * NS_PER_US, arg0=8 << 20, arg1=0x7E00_0000_0000 + (i << 24))
        loop.step(_SHORT)
        if not i % 10:
            loop.call(MALLOC, 100 * NS_PER_US, arg0=8 << 20, arg1=0x7D00_0000_0000)
            loop.call(FREE, 50 * NS_PER_US, arg0=0x7D00_0000_0000)


@on_a_loop
def pinned_memory_leak(loop: Loop) -> None:
    """A pinned batch of every step is kept for ever."""
    for i in range(120):
        loop.call(PIN, 100 * NS_PER_US, arg0=8 << 20, arg1=0x7F00_0000_0000 + (i << 24))
        loop.step(_SHORT)


@on_a_loop
def allocation_churn(loop: Loop) -> None:
    """Buffers are allocated and freed in every step."""
    for _ in range(200):
        loop.call(MALLOC, 400 * NS_PER_US, arg0=8 << 20, arg1=0x7D00_0000_0000)
        loop.step(_SHORT)
        loop.call(FREE, 900 * NS_PER_US, arg0=0x7D00_0000_0000)


@on_a_loop
def device_memory(loop: Loop) -> None:
    """Every second block is freed, then a block is wanted that fits in no hole though it would in all together."""
    base, size = 0x7E00_0000_0000, 64 << 20
    for i in range(40):
        loop.call(MALLOC, 100 * NS_PER_US, arg0=size, arg1=base + i * size)
    for i in range(0, 40, 2):
        loop.call(FREE, 50 * NS_PER_US, arg0=base + i * size)
    loop.steps(20)
    loop.call(MALLOC, 200 * NS_PER_US, arg0=8 * size, ret_code=2)


@on_a_loop
def device_full(loop: Loop) -> None:
    """A block is wanted when the device is simply full."""
    for i in range(8):
        loop.call(MALLOC, 100 * NS_PER_US, arg0=1 << 30, arg1=0x7E00_0000_0000 + (i << 30))
    loop.steps(20)
    loop.call(MALLOC, 200 * NS_PER_US, arg0=1 << 30, ret_code=2)


@on_a_loop
def oom_kill(loop: Loop) -> None:
    """The kernel kills the job's worker."""
    loop.recording.name(4900, "pt_data_worker")
    loop.steps(50)
    loop.recording.call((Source.HOST, HostOp.OOM_KILL), loop.at_ns, 0, 1, arg1=4900)


def _fact(source: Source, op: int, value: int = 0) -> RecordingBuilder:
    """A healthy loop, then one event that somebody else reported."""
    built = RecordingBuilder()
    loop = Loop(built)
    loop.steps(50)
    built.call((source, op), loop.at_ns, 0, 0, arg0=value)
    return built


@on_a_loop
def gpu_throttling(loop: Loop) -> None:
    """Heat holds the clocks down for half of the run."""
    loop.steps(60)
    start_ns = loop.at_ns
    loop.steps(60, LoopStep(sync_ns=20 * NS_PER_MS))
    loop.recording.call((Source.GPU, GpuOp.THROTTLE_THERMAL), start_ns, loop.at_ns - start_ns, 0)


@on_a_loop
def graph_failed(loop: Loop) -> None:
    """A capture ends with cudaErrorStreamCaptureInvalidated (901)."""
    loop.steps(20)
    loop.call((Source.CUDA_GRAPH, GraphOp.BEGIN_CAPTURE), 20 * NS_PER_US, arg1=1)
    loop.call((Source.CUDA_GRAPH, GraphOp.END_CAPTURE), 40 * NS_PER_US, ret_code=901)
    loop.steps(20)


@on_a_loop
def graph_recaptured(loop: Loop) -> None:
    """Every step captures and instantiates a new graph and launches it once."""
    for i in range(40):
        loop.call((Source.CUDA_GRAPH, GraphOp.BEGIN_CAPTURE), 20 * NS_PER_US)
        loop.step(LoopStep(n_launches=10, copy_ns=0, sync_ns=0))
        loop.call((Source.CUDA_GRAPH, GraphOp.END_CAPTURE), 100 * NS_PER_US)
        loop.call((Source.CUDA_GRAPH, GraphOp.INSTANTIATE), 2 * NS_PER_MS, arg0=0x5000 + i)
        loop.call((Source.CUDA_GRAPH, GraphOp.LAUNCH), 30 * NS_PER_US, arg0=0x5000 + i)
        loop.wait(4 * NS_PER_MS)


@on_a_loop
def graph_unused(loop: Loop) -> None:
    """A graph is made at the start and forgotten; another is launched in every step."""
    for handle in (0x5000, 0x6000):
        loop.call((Source.CUDA_GRAPH, GraphOp.INSTANTIATE), 2 * NS_PER_MS, arg0=handle)
    for _ in range(160):
        loop.call((Source.CUDA_GRAPH, GraphOp.LAUNCH), 30 * NS_PER_US, arg0=0x6000)
        loop.wait(200 * NS_PER_MS)


@on_a_loop
def step_time_changed(loop: Loop) -> None:
    """From the two-hundredth step on the host needs six milliseconds more for each."""
    loop.steps(200, _SHORT)
    for _ in range(200):
        loop.rest(6 * NS_PER_MS)
        loop.step(_SHORT)


@on_a_loop
def call_in_flight(loop: Loop) -> None:
    """A synchronisation has not returned when recording ends."""
    loop.steps(60)
    loop.call(SYNC, 30_000 * NS_PER_MS, flags=EventFlag.IN_FLIGHT)


FAULTS: Final[dict[str, Callable[[], RecordingBuilder]]] = {
    "input_starvation": input_starvation_by_worker,
    "one_off_stall": one_off_stall,
    "repeated_compiling": repeated_compiling,
    "cpu_contention": cpu_contention,
    "cgroup_throttling": cgroup_throttling,
    "blocking_io": blocking_io,
    "blocking_writes": blocking_writes,
    "noisy_neighbour": noisy_neighbour,
    "managed_memory": managed_memory,
    "graph_contended": graph_contended,
    "page_fault_stall": page_fault_stall,
    "reclaim_stall": reclaim_stall,
    "network_wait": network_wait,
    "sync_bound": sync_bound,
    "launch_bound": launch_bound,
    "device_memory": device_memory,
    "memory_leak": memory_leak,
    "pinned_memory_leak": pinned_memory_leak,
    "allocation_churn": allocation_churn,
    "oom_kill": oom_kill,
    "pod_restart": partial(_fact, Source.HOST, HostOp.POD_RESTART),
    "pod_eviction": partial(_fact, Source.HOST, HostOp.POD_EVICTION),
    "pod_oom_kill": partial(_fact, Source.HOST, HostOp.POD_OOM_KILL),
    "gpu_xid": partial(_fact, Source.GPU, GpuOp.XID, value=79),  # the GPU fell off the bus
    "gpu_ecc": partial(_fact, Source.GPU, GpuOp.ECC_UNCORRECTED, value=2),
    "gpu_throttling": gpu_throttling,
    "graph_failed": graph_failed,
    "graph_recaptured": graph_recaptured,
    "graph_unused": graph_unused,
    "step_time_changed": step_time_changed,
    "call_in_flight": call_in_flight,
    **RANK_FAULTS,
    **SERVING_FAULTS,
}
"""A firing recording for each rule that the demos do not show."""
