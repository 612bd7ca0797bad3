"""The six faults that ``ingero demo`` shows, as recordings. None of them names its cause: the engine has to find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ingero.model.events import CopyKind, HostMemory, OffCpuReason
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.recording.scenarios.loop import COPY, FUNCTION, LAUNCH, MALLOC, SYNC, Loop, LoopStep
from ingero.units import NS_PER_MS, NS_PER_US


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault.

    Attributes:
        name: What ``ingero demo`` is given.
        aliases: Other names for it.
        description: The story, without the diagnosis.
        build: Makes the recording.
    """

    name: str
    aliases: tuple[str, ...]
    description: str
    build: Callable[[], RecordingBuilder]


def _incident() -> RecordingBuilder:
    built = RecordingBuilder().name(8821, "logrotate")
    loop = Loop(built)
    loop.steps(100)
    for _ in range(50):
        loop.preempted_call(
            COPY, 3 * NS_PER_MS, (2_100_000,), 8821, arg0=4 << 20, arg1=CopyKind.HOST_TO_DEVICE,
            arg3=HostMemory.PINNED,
        )  # fmt: skip
        for i in range(20):
            loop.rest(25 * NS_PER_US)
            loop.call(LAUNCH, 12 * NS_PER_US, arg0=FUNCTION + i * 64)
        loop.preempted_call(SYNC, 142 * NS_PER_MS, (6 * NS_PER_MS,) * 17, 8821)
    loop.steps(50)
    return built


def _cold_start() -> RecordingBuilder:
    built = RecordingBuilder()
    loop = Loop(built)
    for ms in (340, 210, 150, 120, 100):
        loop.call(MALLOC, ms * NS_PER_MS, arg0=256 << 20)
    for i, ms in enumerate((150, 80, 50)):
        loop.call(LAUNCH, ms * NS_PER_MS, arg0=FUNCTION + i * 64)
    for i in range(200):
        loop.step()
        if not i % 5:
            loop.call(MALLOC, 120 * NS_PER_US, arg0=2 << 20)
    return built


def _memcpy_bottleneck() -> RecordingBuilder:
    built = RecordingBuilder()
    slow_copy = LoopStep(
        copy_ns=10 * NS_PER_MS,
        copy_bytes=64 << 20,
        copy_memory=HostMemory.PAGEABLE,
        sync_ns=8 * NS_PER_MS,
    )
    Loop(built).steps(200, slow_copy)
    return built


def _periodic_spike() -> RecordingBuilder:
    built = RecordingBuilder()
    loop = Loop(built)
    short = LoopStep(n_launches=4, copy_ns=0, sync_ns=0)
    for i in range(1600):
        is_spike = i % 200 >= 196
        loop.call(MALLOC, 2500 * NS_PER_US if is_spike else 50 * NS_PER_US, arg0=2 << 20)
        loop.step(short)
        if not i % 10:
            loop.wait(4 * NS_PER_MS)
    return built


def _cpu_contention() -> RecordingBuilder:
    built = RecordingBuilder(n_cpus=4).name(7001, "stress-ng")
    loop = Loop(built)
    loop.steps(50)
    for _ in range(100):
        loop.step(LoopStep(sync_ns=0))
        start_ns, _ = loop.call(SYNC, 17 * NS_PER_MS)
        # The GPU is done after 12 ms; the woken thread then waits 5 ms for a CPU.
        built.off_cpu(
            start_ns,
            17 * NS_PER_MS,
            4821,
            OffCpuReason.SLEEP,
            wait_ns=5 * NS_PER_MS,
            other_pid=7001,
        )
        built.snapshot(loop.at_ns, cpu_pct=100.0, load1=12.0)
    loop.steps(50)
    return built


def _gpu_steal() -> RecordingBuilder:
    built = RecordingBuilder()
    victim = Loop(built, 4821, "serve")
    thief = Loop(built, 5100, "notebook", seed=8)
    for i in range(80):
        thief.at_ns = max(victim.at_ns, thief.at_ns)
        if i % 2:
            victim.step(LoopStep(sync_ns=12 * NS_PER_MS))
        else:
            thief.step(LoopStep(sync_ns=20 * NS_PER_MS))
            victim.step(LoopStep(sync_ns=24 * NS_PER_MS))
    return built


SCENARIOS: Final[tuple[Scenario, ...]] = (
    Scenario("incident", (), "Training is fine, then steps take ten times as long for seven seconds, then it "
                             "is fine again.", _incident),
    Scenario("cold-start", (), "The first second of a job is slow, the rest is not.", _cold_start),
    Scenario("cpu-contention", (), "A build job starts on the training node.", _cpu_contention),
    Scenario("gpu-steal", ("gpu-contention", "contention"), "A service's latency doubles every now and "
                                                            "then.", _gpu_steal),
    Scenario("memcpy-bottleneck", (), "The GPU looks busy, the steps are slow, nothing stands "
                                      "out.", _memcpy_bottleneck),
    Scenario("periodic-spike", (), "Every now and then one step takes longer.", _periodic_spike),
)  # fmt: skip
"""In the order in which ``ingero demo all`` plays them."""


def healthy(n_steps: int = 300) -> RecordingBuilder:
    """A training loop with nothing wrong."""
    built = RecordingBuilder()
    Loop(built).steps(n_steps)
    return built
