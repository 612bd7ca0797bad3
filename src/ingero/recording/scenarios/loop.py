"""A healthy training loop on one thread, step by step: the ground on which faults stand out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ingero.model.events import CopyKind, CudaOp, HostMemory, OffCpuReason, Source
from ingero.recording.scenarios.builder import RecordingBuilder
from ingero.units import NS_PER_MS, NS_PER_US

LAUNCH: Final = (Source.CUDA, CudaOp.LAUNCH_KERNEL)
COPY: Final = (Source.CUDA, CudaOp.MEMCPY_ASYNC)
SYNC: Final = (Source.CUDA, CudaOp.STREAM_SYNC)
MALLOC: Final = (Source.CUDA, CudaOp.MALLOC)
FREE: Final = (Source.CUDA, CudaOp.FREE)
FUNCTION: Final = 0x7F00_0000_1000
_JITTER: Final = 0.05


@dataclass(frozen=True, slots=True)
class LoopStep:
    """What one step costs.

    Attributes:
        n_launches: Kernels.
        launch_ns: One launch.
        gap_ns: Host time between two launches.
        copy_ns: The batch's copy to the device; 0 for none.
        copy_bytes: Its size.
        copy_memory: Host side of the copy.
        sync_ns: Waiting for the GPU at the end; 0 for none.
    """

    n_launches: int = 20
    launch_ns: int = 12 * NS_PER_US
    gap_ns: int = 25 * NS_PER_US
    copy_ns: int = 400 * NS_PER_US
    copy_bytes: int = 4 * 1024 * 1024
    copy_memory: HostMemory = HostMemory.PINNED
    sync_ns: int = 12 * NS_PER_MS


class Loop:
    """A thread that trains, with a cursor in time.

    Attributes:
        recording: What it writes to.
        at_ns: Where it is now.

    Args:
        built: The recording it writes to.
        pid: Process and thread.
        name: Its name.
        seed: Of the jitter, so that a scenario is the same every time.
        gpu_id: Its device.
        at_ns: Where it starts.
    """

    def __init__(
        self, built: RecordingBuilder, pid: int = 4821, name: str = "train", *, seed: int = 7,
        gpu_id: int = 0, at_ns: int = 0,
    ) -> None:  # fmt: skip
        self.at_ns = at_ns
        self.recording = built.name(pid, name)
        self._pid = pid
        self._gpu_id = gpu_id
        self._random = np.random.default_rng(seed)

    def call(self, op: tuple[Source, int], duration_ns: int, **fields: int) -> tuple[int, int]:
        """One call at the cursor; returns its start and end, and moves the cursor to the end."""
        start_ns = self.at_ns
        self.at_ns = self.recording.call(
            op, start_ns, duration_ns, self._pid, gpu_id=self._gpu_id, **fields
        )
        return start_ns, self.at_ns

    def rest(self, duration_ns: int) -> None:
        """Let time pass without a call, on the CPU."""
        self.at_ns += duration_ns

    def sleep(self, duration_ns: int, **fields: int) -> None:
        """Leave the CPU of its own will."""
        self.at_ns = self.recording.off_cpu(
            self.at_ns, duration_ns, self._pid, OffCpuReason.SLEEP, **fields
        )

    def step(self, step: LoopStep | None = None) -> None:
        """One training step: copy, launches, wait."""
        step = step or LoopStep()
        if step.copy_ns:
            self.call(
                COPY, self._near(step.copy_ns), arg0=step.copy_bytes,
                arg1=CopyKind.HOST_TO_DEVICE, arg3=step.copy_memory,
            )  # fmt: skip
        for i in range(step.n_launches):
            self.rest(self._near(step.gap_ns))
            self.call(
                LAUNCH, self._near(step.launch_ns), arg0=FUNCTION + i * 64, arg2=128, arg3=256
            )
        if step.sync_ns:
            self.wait(self._near(step.sync_ns))

    def steps(self, n: int, step: LoopStep | None = None) -> None:
        """Several steps."""
        for _ in range(n):
            self.step(step)

    def wait(self, duration_ns: int) -> tuple[int, int]:
        """Synchronise: the thread sleeps for most of it, as a blocking wait does."""
        start_ns, end_ns = self.call(SYNC, duration_ns)
        asleep_ns = duration_ns * 9 // 10
        self.recording.off_cpu(
            start_ns + duration_ns // 20, asleep_ns, self._pid, OffCpuReason.SLEEP
        )
        return start_ns, end_ns

    def preempt(self, at_ns: int, duration_ns: int, by: int) -> None:
        """Another task takes the CPU."""
        self.recording.off_cpu(at_ns, duration_ns, self._pid, OffCpuReason.PREEMPTED, other_pid=by)

    def preempted_call(
        self,
        op: tuple[Source, int],
        duration_ns: int,
        stolen: Sequence[int],
        by: int,
        **fields: int,
    ) -> None:
        """A call during which another task takes the CPU for each of these lengths, evenly spread."""
        start_ns, _ = self.call(op, duration_ns, **fields)
        pause_ns = (duration_ns - sum(stolen)) // (len(stolen) + 1)
        at_ns = start_ns
        for stolen_ns in stolen:
            at_ns += pause_ns
            self.preempt(at_ns, stolen_ns, by)
            at_ns += stolen_ns

    def _near(self, duration_ns: int) -> int:
        """A duration within five per cent."""
        return max(round(duration_ns * self._random.uniform(1 - _JITTER, 1 + _JITTER)), 1)


def on_a_loop(fill: Callable[[Loop], None]) -> Callable[[], RecordingBuilder]:
    """A scenario from what happens to one training loop in a recording of its own."""

    @functools.wraps(fill)
    def build() -> RecordingBuilder:
        loop = Loop(RecordingBuilder())
        fill(loop)
        return loop.recording

    return build
