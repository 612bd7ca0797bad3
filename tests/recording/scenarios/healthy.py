"""Recordings that look busy and have nothing wrong: what no rule may fire on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.recording.scenarios.faults import PID, PIN
from tests.recording.scenarios.ranks import (
    balanced_ranks,
    collective_hang,
    tcp_retransmits,
)
from tests.recording.scenarios.serving import (
    one_request_at_a_time,
    prompts_in_chunks,
    steady_server,
)

from ingero.model.events import CudaOp, GraphOp, HostOp, IoOp, NcclOp, NetOp, OffCpuReason, Source
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import FUNCTION, LAUNCH, MALLOC, Loop, LoopStep, on_a_loop
from ingero.units import NS_PER_MS, NS_PER_S, NS_PER_US

_SHORT: Final = LoopStep(n_launches=4, copy_ns=0, sync_ns=4 * NS_PER_MS)


@on_a_loop
def sleeping_loop(loop: Loop) -> None:
    """An idle service: a call, then a sleep, for a long time."""
    for _ in range(60):
        loop.step(_SHORT)
        loop.sleep(50 * NS_PER_MS)


@on_a_loop
def waiting_for_requests(loop: Loop) -> None:
    """A service that sleeps in ``epoll`` until a stranger's packet wakes it."""
    loop.recording.name(12, "ksoftirqd/0")
    for _ in range(60):
        loop.step(_SHORT)
        loop.sleep(90 * NS_PER_MS, other_pid=12)


@on_a_loop
def waiting_in_recv(loop: Loop) -> None:
    """A service that blocks in ``recv`` for its next small request."""
    for _ in range(60):
        loop.step(_SHORT)
        loop.recording.call((Source.NET, NetOp.RECV), loop.at_ns, 60 * NS_PER_MS, PID, arg1=700)
        loop.sleep(60 * NS_PER_MS)


def two_ranks_on_two_gpus() -> RecordingBuilder:
    """Two processes wait for long and short kernels side by side, each on its own GPU."""
    built = RecordingBuilder()
    loops = [Loop(built, 6000 + i, f"rank{i}", seed=i, gpu_id=i) for i in range(2)]
    for i in range(80):
        for loop in loops:
            loop.step(LoopStep(sync_ns=(4 + 30 * (i % 3 == 0)) * NS_PER_MS))
    return built


@on_a_loop
def gpu_backlog(loop: Loop) -> None:
    """The host runs ahead: every fiftieth launch waits for a place in the GPU's queue, copies back wait for the GPU."""
    for i in range(400):
        loop.call(LAUNCH, 4 * NS_PER_MS if i % 50 == 49 else 12 * NS_PER_US, arg0=FUNCTION)
        if i % 20 == 19:
            loop.call((Source.CUDA, 7), 5 * NS_PER_MS, arg0=4, arg1=2)
            loop.wait(8 * NS_PER_MS)


@on_a_loop
def pauses_without_reason(loop: Loop) -> None:
    """A loop that sleeps, in a recording whose probe did not read why."""
    for _ in range(60):
        loop.step(_SHORT)
        loop.at_ns = loop.recording.off_cpu(loop.at_ns, 50 * NS_PER_MS, PID, OffCpuReason.UNKNOWN)


def warm_up_only() -> RecordingBuilder:
    """A handful of ordinary first calls and nothing else."""
    built = RecordingBuilder()
    Loop(built).steps(3)
    return built


@on_a_loop
def busy_agent(loop: Loop) -> None:
    """The agent and the journal write all the time beside a healthy job."""
    loop.recording.name(900, "ingero")
    loop.recording.name(96, "jbd2/nvme0n1p1-8")
    while loop.at_ns < NS_PER_S:
        loop.step()
        for pid in (900, 96):
            loop.recording.call((Source.IO, IoOp.WRITE), loop.at_ns, NS_PER_MS, pid, arg0=64)
            loop.recording.call((Source.IO, IoOp.READ), loop.at_ns, NS_PER_MS, pid, arg0=64)
            loop.recording.off_cpu(loop.at_ns, NS_PER_MS, pid, OffCpuReason.BLOCKED_IO)


@on_a_loop
def read_ahead(loop: Loop) -> None:
    """The job's reads go on beside its computation and block nothing."""
    for _ in range(100):
        loop.recording.call((Source.IO, IoOp.READ), loop.at_ns, 2 * NS_PER_MS, PID, arg0=512)
        loop.step()


@on_a_loop
def warm_up_allocations(loop: Loop) -> None:
    """A caching allocator fills in the first steps and is quiet afterwards."""
    for i in range(200):
        if i < 30:
            loop.call(MALLOC, 200 * NS_PER_US, arg0=64 << 20, arg1=0x7E00_0000_0000 + (i << 28))
        loop.step()


@on_a_loop
def pinned_buffers(loop: Loop) -> None:
    """A loader pins its buffers in the first steps, keeps them, and pins and frees small ones now and then."""
    for i in range(200):
        if i < 30:
            loop.call(PIN, 200 * NS_PER_US, arg0=64 << 20, arg1=0x7F00_0000_0000 + (i << 28))
        if not i % 10:
            loop.call(PIN, 100 * NS_PER_US, arg0=1 << 20, arg1=0x7D00_0000_0000)
            loop.call((Source.CUDA, CudaOp.FREE_HOST), 50 * NS_PER_US, arg0=0x7D00_0000_0000)
        loop.step()


@on_a_loop
def brief_preemption(loop: Loop) -> None:
    """Kernel threads take the CPU for microseconds, as on any machine."""
    loop.recording.name(66, "kworker/3:1H")
    for _ in range(200):
        loop.step()
        loop.preempt(loop.at_ns - 5 * NS_PER_MS, 30 * NS_PER_US, 66)


@on_a_loop
def replayed_graph(loop: Loop) -> None:
    """One capture, hundreds of launches."""
    loop.call((Source.CUDA_GRAPH, GraphOp.INSTANTIATE), 2 * NS_PER_MS, arg0=0x6000)
    for _ in range(300):
        loop.call((Source.CUDA_GRAPH, GraphOp.LAUNCH), 30 * NS_PER_US, arg0=0x6000)
        loop.wait(8 * NS_PER_MS)


def retransmits_without_effect() -> RecordingBuilder:
    """Segments are sent again, and the collectives take as long as ever."""
    return tcp_retransmits(hits_slow=False)


def recording_cut_off() -> RecordingBuilder:
    """One rank has entered one collective fewer at the moment when the recording ends."""
    return collective_hang(silent_s=1)


def ranks_that_ended() -> RecordingBuilder:
    """Ranks that stopped at different numbers, and whose processes ended."""
    return collective_hang(is_over=True)


def managed_memory_that_fits() -> RecordingBuilder:
    """24 GiB of managed memory on a device of 40 GiB, and steps that are longer towards the end."""
    built = RecordingBuilder(gpu_model="NVIDIA A100, 40960 MiB")
    loop = Loop(built)
    for i in range(24):
        loop.call(
            (Source.CUDA, CudaOp.MALLOC_MANAGED), 200 * NS_PER_US,
            arg0=1 << 30, arg1=0x7E00_0000_0000 + (i << 32),
        )  # fmt: skip
    loop.steps(60)
    loop.steps(60, LoopStep(sync_ns=30 * NS_PER_MS))
    return built


def sent_and_received() -> RecordingBuilder:
    """A pipeline: sends and receives without numbers beside numbered all-reduces."""
    built = balanced_ranks()
    for seq in range(60):
        for rank in range(4):
            op = NcclOp.SEND if rank % 2 else NcclOp.RECV
            built.call(
                (Source.NCCL, op), seq * 40 * NS_PER_MS, NS_PER_MS, 6000 + rank,
                gpu_id=rank, arg0=1 << 20, arg1=0xC0FFEE, arg3=rank << 32 | 4,
            )  # fmt: skip
    return built


@on_a_loop
def undisturbed_capture(loop: Loop) -> None:
    """Graphs are captured on a quiet machine and replayed."""
    for i in range(8):
        loop.call((Source.CUDA_GRAPH, GraphOp.BEGIN_CAPTURE), 20 * NS_PER_US, arg1=1)
        loop.step(LoopStep(copy_ns=0, sync_ns=0))
        loop.call((Source.CUDA_GRAPH, GraphOp.END_CAPTURE), 100 * NS_PER_US, arg0=0x4000 + i)
        loop.call((Source.CUDA_GRAPH, GraphOp.INSTANTIATE), NS_PER_MS, arg0=0x5000 + i)
    for i in range(160):
        loop.call((Source.CUDA_GRAPH, GraphOp.LAUNCH), 30 * NS_PER_US, arg0=0x5000 + i % 8)
        loop.wait(8 * NS_PER_MS)


@on_a_loop
def neighbour_that_leaves_time(loop: Loop) -> None:
    """Tasks of another container run on the same CPU for microseconds at a time."""
    loop.recording.call((Source.HOST, HostOp.EXEC), 0, 0, PID, cgroup_id=70)
    for i in range(200):
        loop.recording.call((Source.HOST, HostOp.EXEC), loop.at_ns, 0, 9000 + i % 8, cgroup_id=90)
        loop.step()
        loop.preempt(loop.at_ns - 5 * NS_PER_MS, 100 * NS_PER_US, 9000 + i % 8)


@on_a_loop
def background_checkpoint(loop: Loop) -> None:
    """Another thread of the job writes checkpoints and waits for the disk; the training thread does not."""
    for _ in range(100):
        loop.recording.call(
            (Source.IO, IoOp.WRITE), loop.at_ns, 9 * NS_PER_MS, PID, tid=PID + 1, arg0=2048
        )
        loop.recording.off_cpu(loop.at_ns, 9 * NS_PER_MS, PID + 1, OffCpuReason.BLOCKED_IO, pid=PID)
        loop.step()


HEALTHY: Final[dict[str, Callable[[], RecordingBuilder]]] = {
    "sleeping loop": sleeping_loop,
    "waiting for requests": waiting_for_requests,
    "waiting in recv": waiting_in_recv,
    "two ranks on two GPUs": two_ranks_on_two_gpus,
    "GPU backlog": gpu_backlog,
    "pauses without a reason": pauses_without_reason,
    "warm-up only": warm_up_only,
    "busy agent": busy_agent,
    "read-ahead": read_ahead,
    "warm-up allocations": warm_up_allocations,
    "pinned buffers": pinned_buffers,
    "brief preemption": brief_preemption,
    "replayed graph": replayed_graph,
    "balanced ranks": balanced_ranks,
    "retransmits without effect": retransmits_without_effect,
    "recording cut off": recording_cut_off,
    "ranks that ended": ranks_that_ended,
    "managed memory that fits": managed_memory_that_fits,
    "sent and received": sent_and_received,
    "undisturbed capture": undisturbed_capture,
    "neighbour that leaves time": neighbour_that_leaves_time,
    "background checkpoint": background_checkpoint,
    "steady server": steady_server,
    "prompts in chunks": prompts_in_chunks,
    "one request at a time": one_request_at_a_time,
}
"""Recordings that look busy and have nothing wrong."""
