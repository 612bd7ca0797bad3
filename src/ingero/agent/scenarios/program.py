"""What `ingero demo --sim` runs and traces: small programs that really have the fault they are named after.

Usage: ``python -m ingero.agent.scenarios.program NAME LIBCUDART``. It prepares itself, prints ``ready`` and begins when a
line comes: whoever watches is attached by then. Nothing here writes a recording or knows of a rule.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_HOST_TO_DEVICE: Final = 1
_BATCH_BYTES: Final = 64 << 20
_UNIT_BYTES: Final = 512
"""The simulator's allocator deals in these."""
_LARGER_BYTES: Final = 912
"""Two units, and still of the same power of two."""
_N_BLOCKS: Final = 600_000
_N_SPIKES: Final = 24
_SPIKE_STEP_S: Final = 0.0017
_PRIORITY: Final = 1
_N_WEIGHTS: Final = 40
_CALM_S: Final = 1.0
_DISTURBED_S: Final = 2.5
_WARM_S: Final = 1.3
_BURST_S: Final = 0.3
_SHARED_S: Final = 2.4

_LIBC: Final = ctypes.CDLL(None)


class _Dim3(ctypes.Structure):
    _fields_ = (("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint))


class Device:
    """The calls of the CUDA runtime that the programs make.

    Args:
        path: The library.
    """

    def __init__(self, path: str) -> None:
        cudart = ctypes.CDLL(path)
        self._launch = cudart.cudaLaunchKernel
        self._launch.argtypes = (
            ctypes.c_void_p, _Dim3, _Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p,
        )  # fmt: skip
        self._malloc = cudart.cudaMalloc
        self._malloc.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t)
        self._free = cudart.cudaFree
        self._free.argtypes = (ctypes.c_void_p,)
        self._copy = cudart.cudaMemcpy
        self._copy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self.synchronise: Callable[[], int] = cudart.cudaDeviceSynchronize
        self._host = ctypes.create_string_buffer(64)  # nothing is read from it
        self._shape = _Dim3(128, 1, 1), _Dim3(256, 1, 1)

    def launch(self, n_kernels: int) -> None:
        """Put kernels on the default stream."""
        for i in range(n_kernels):
            self._launch(0x401000 + 64 * i, *self._shape, None, 0, None)

    def allocate(self, n_bytes: int) -> int:
        """Address of new device memory."""
        address = ctypes.c_void_p()
        if self._malloc(ctypes.byref(address), n_bytes) or address.value is None:
            raise MemoryError
        return address.value

    def release(self, address: int) -> None:
        """Give device memory back."""
        self._free(address)

    def copy_in(self, address: int, n_bytes: int) -> None:
        """A copy from the host's ordinary memory, which returns when it is done."""
        self._copy(address, self._host, n_bytes, _HOST_TO_DEVICE)


def _name(name: str) -> None:
    _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _start(name: str, run: Callable[[], None], *, above: int = 0) -> int:
    """A child that runs until it is ended; returns its pid.

    Args:
        name: What it is called.
        run: What it does; must not return.
        above: How much higher its priority is.
    """
    own = Path("/proc/self/comm").read_text(encoding="ascii").rstrip()
    _name(name)  # before it is there: whoever watches may ask for its name at once
    pid = os.fork()
    if not pid:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _rise(above)
        run()
    _name(own)
    return pid


def _start_busy(name: str, busy_s: float, *, above: int = 0) -> int:
    """A child on this process's CPU that computes and sleeps in turns, each for so long; returns its pid."""

    def run() -> None:
        while True:
            _spin(busy_s)
            time.sleep(busy_s)

    return _start(name, run, above=above)


def _time(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _rise(above: int = 0) -> None:
    """Above the rest of the machine where that is allowed: what happens next is then the program's own doing."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY + above))


def _share_one_cpu() -> None:
    """Stay on one CPU, with every child: what competes has to be there."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _run_for(seconds: float, step: Callable[[], None]) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        step()


def _incident(device: Device) -> None:
    """The GPU is fed from a thread that computes between launches; for a while another task wants its CPU."""

    def step() -> None:
        for _ in range(4):
            device.launch(5)
            _spin(0.003)
        device.synchronise()

    _run_for(_CALM_S, step)
    rotating = [_start_busy("logrotate", 0.008, above=1)]
    _run_for(_DISTURBED_S, step)
    _end(rotating)
    _run_for(_CALM_S, step)


def _cpu_contention(device: Device) -> None:
    """Short steps that sleep for the GPU, on a CPU on which a build keeps three compilers busy."""

    def step() -> None:
        device.launch(10)
        device.synchronise()

    _run_for(_CALM_S, step)
    compilers = [_start_busy("cc1plus", 0.004) for _ in range(3)]
    _run_for(_DISTURBED_S, step)
    _end(compilers)
    _run_for(_CALM_S, step)


def _memcpy_bottleneck(device: Device) -> None:
    """Each step copies its batch in, from ordinary memory, and computes little on it."""
    batch = device.allocate(_BATCH_BYTES)
    for _ in range(150):
        device.copy_in(batch, _BATCH_BYTES)
        device.launch(20)
        device.synchronise()
    device.release(batch)


def _periodic_spike(device: Device) -> Callable[[], None]:
    """Each step takes a small block; now and then it is a little larger, fits no hole, and all of the heap is searched."""
    hole = _fill_heap(device)
    searched_s = min(_time(lambda: device.allocate(_LARGER_BYTES)) for _ in range(3))
    # One search in fifty times its own length: far from nothing, and far from all there is.
    every = max(round(searched_s * 50 / _SPIKE_STEP_S), 20)

    def run() -> None:
        device.release(hole)
        for i in range(_N_SPIKES * every):
            is_larger = i % every == every // 2
            block = device.allocate(_LARGER_BYTES if is_larger else _UNIT_BYTES)
            device.launch(6)
            device.synchronise()
            if not is_larger:  # a release at the far end would search as long
                device.release(block)

    return run


def _fill_heap(device: Device) -> int:
    """Very many small blocks without a hole between them, from the top down, which takes the allocator no search.

    Returns:
        The lowest but one, which may be released for a hole near the start.
    """
    lowest = [0, 0]
    for i in range(_N_BLOCKS, 0, -1):
        below = device.allocate(i * _UNIT_BYTES)
        lowest = [device.allocate(_UNIT_BYTES), lowest[0]]
        device.release(below)
    device.allocate(_UNIT_BYTES)
    return lowest[1]


def _cold_start(device: Device) -> None:
    """The first allocation makes the context and each first launch loads a module; after that every step is the same."""
    for _ in range(_N_WEIGHTS):
        device.allocate(_BATCH_BYTES)
    _run_for(_WARM_S, lambda: _compute(device, 8))


def _gpu_steal(device: Device) -> None:
    """A service answers requests; for a while, again and again, a notebook computes on the same GPU."""

    def steal() -> None:
        while True:
            time.sleep(_BURST_S)
            _run_for(_BURST_S, lambda: _compute(device, 20))

    notebook = _start("notebook", steal)
    _run_for(_SHARED_S, lambda: _compute(device, 10))
    _end([notebook])


def _compute(device: Device, n_kernels: int) -> None:
    device.launch(n_kernels)
    device.synchronise()


@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
        prepare: Gets the device; returns what to run once somebody watches.
        settings: Of the simulated device, by name without ``GPUSIM_``.
        has_one_cpu: It and its children share one CPU.
        has_one_device: It and its children share one device; otherwise each has its own.
        comm: What the process is called.
    """

    prepare: Callable[[Device], Callable[[], None]]
    settings: Mapping[str, int]
    has_one_cpu: bool = False
    has_one_device: bool = False
    comm: str = "train"


def _at_once(run: Callable[[Device], None]) -> Callable[[Device], Callable[[], None]]:
    """A program that has nothing to prepare."""
    return lambda device: lambda: run(device)


PROGRAMS: Final[Mapping[str, Program]] = {
    "incident": Program(_at_once(_incident), {"KERNEL_NS": 600_000}, has_one_cpu=True),
    "cold-start": Program(
        _at_once(_cold_start),
        {"CONTEXT_NS": 400_000_000, "FIRST_LAUNCH_NS": 70_000_000, "KERNEL_NS": 500_000},
    ),
    "cpu-contention": Program(_at_once(_cpu_contention), {"KERNEL_NS": 200_000}, has_one_cpu=True),
    "gpu-steal": Program(
        _at_once(_gpu_steal), {"KERNEL_NS": 600_000}, has_one_device=True, comm="serve"
    ),
    "memcpy-bottleneck": Program(_at_once(_memcpy_bottleneck), {"COPY_MB_PER_S": 6000}),
    "periodic-spike": Program(_periodic_spike, {"KERNEL_NS": 250_000}),
}
"""By scenario."""


def _main() -> None:
    name, library = sys.argv[1:]
    program = PROGRAMS[name]
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _name(program.comm)
    _rise()
    if program.has_one_cpu:
        _share_one_cpu()
    run = program.prepare(Device(library))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if sys.stdin.readline():
        run()


if __name__ == "__main__":
    _main()
