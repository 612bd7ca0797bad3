"""What `ingero demo --gpu` and `--sim` run and trace: small programs that really have the fault they are named after.

Usage: ``python -m ingero.sim.programs.program NAME LIBCUDART``. It prepares itself, says that it is ready and begins
when it is asked to (``handshake``): an observer is attached by then. Nothing here writes a recording, knows of a
rule, or asks whose library it is given.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ingero.errors import IngeroError, UnsupportedError
from ingero.sim.programs.device import Device, Pool
from ingero.sim.programs.handshake import (
    begin,
    check_end,
    read_ready,
    report_error,
    report_ready,
    start_program,
)

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_BATCH_BYTES: Final = 64 << 20
_WEIGHT_BYTES: Final = 16 << 20
_N_WEIGHTS: Final = 40
_N_MODULES: Final = 8
_MIN_SPIKES: Final = 10
_SPIKES_S: Final = 0.025
_SPIKE_S: Final = 0.002
_MIN_SPIKE_S: Final = 0.0002
_PRIORITY: Final = 1
_CALM_S: Final = 1.0
_DISTURBED_S: Final = 2.5
_COPIED_S: Final = 1.7
_WARM_S: Final = 1.3
_BURST_S: Final = 0.3
_SHARED_S: Final = 2.4

_LIBC: Final = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Ready:
    """A program that is prepared.

    Attributes:
        run: What to run once somebody watches.
        pids: Other processes that belong to it and are there already.
    """

    run: Callable[[], None]
    pids: tuple[int, ...] = ()


def _spin(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def _time(call: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _start(names: Sequence[str], library: str) -> list[subprocess.Popen[str]]:
    """Other programs, each with a context of its own if it wants one: CUDA does not survive a fork. They are ready."""
    programs = [start_program(name, library) for name in names]
    for program in programs:
        read_ready(program)
    return programs


def _end(programs: Iterable[subprocess.Popen[str]]) -> None:
    """End programs that would run for ever.

    Raises:
        UnsupportedError: One has ended by itself, and said why.
        IngeroError: One has, without a word.
    """
    for program in programs:
        if program.poll() is not None:
            check_end(program)
        program.kill()
        program.wait()


def _rise(above: int) -> None:
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


def _incident(device: Device) -> Ready:
    """The GPU is fed from a thread that computes between launches; for a while another task wants its CPU."""

    def step() -> None:
        for _ in range(4):
            device.launch(5, 0.0006)
            _spin(0.003)
        device.synchronise()

    return _disturb(device, ["logrotate"], step)


def _cpu_contention(device: Device) -> Ready:
    """Short steps that sleep for the GPU, on a CPU on which a build keeps three compilers busy."""
    return _disturb(device, ["cc1plus"] * 3, lambda: _compute(device, 10, 0.0002))


def _disturb(device: Device, names: Sequence[str], step: Callable[[], None]) -> Ready:
    """Steps that other programs on the same CPU disturb for a while."""
    device.prepare()
    others = _start(names, device.path)

    def run() -> None:
        _run_for(_CALM_S, step)
        for other in others:
            begin(other)
        _run_for(_DISTURBED_S, step)
        _end(others)
        _run_for(_CALM_S, step)

    return Ready(run, tuple(other.pid for other in others))


def _alternate(busy_s: float) -> Callable[[Device], Ready]:
    """A task that computes and sleeps in turns, each for so many seconds, and leaves the device alone."""

    def run() -> None:
        while True:
            _spin(busy_s)
            time.sleep(busy_s)

    return lambda _: Ready(run)


def _memcpy_bottleneck(device: Device) -> Ready:
    """Each step copies its batch in, from ordinary memory, and computes a tenth as long on it."""
    device.prepare()
    host = ctypes.create_string_buffer(_BATCH_BYTES)
    ctypes.memset(host, 1, _BATCH_BYTES)  # untouched, it would have no pages
    batch = device.allocate(_BATCH_BYTES)
    copy_s = min(_time(lambda: device.copy_in(batch, host)) for _ in range(3))

    def step() -> None:
        device.copy_in(batch, host)
        _compute(device, 20, copy_s / 10 / 20)

    return Ready(lambda: _run_for(_COPIED_S, step))


def _periodic_spike(device: Device) -> Ready:
    """Each step takes a block from the pool.

    Now and then the pool was emptied, and its memory has to be mapped anew.
    """
    device.prepare()
    pool = device.open_pool()
    n_bytes, mapped_s = _find_slow_block(device, pool)

    def step() -> None:
        block = pool.allocate(n_bytes)
        device.launch(6, 0.00025)
        pool.release(block)
        device.synchronise()

    step_s = min(_time(step) for _ in range(3))
    # One mapping in fifty times its own length: far from nothing, and far from all there is.
    every = max(round(mapped_s * 50 / step_s), 20)
    n_spikes = max(round(_SPIKES_S / mapped_s), _MIN_SPIKES)

    def run() -> None:
        for i in range(n_spikes * every):
            if (
                not i % every
            ):  # from the first step on, which is the slower for being watched from there
                pool.trim()
            step()

    return Ready(run)


def _find_slow_block(device: Device, pool: Pool) -> tuple[int, float]:
    """How large a block takes two milliseconds to map, a quarter of the free memory at most; and how long, in seconds.

    Raises:
        UnsupportedError: Even that takes next to no time.
    """
    n_bytes, most = _BATCH_BYTES, device.count_free_bytes() // 4

    def take_and_leave() -> float:
        pool.trim()
        began = time.perf_counter()
        block = pool.allocate(n_bytes)
        took_s = time.perf_counter() - began
        pool.release(block)
        device.synchronise()
        return took_s

    while True:
        mapped_s = min(take_and_leave() for _ in range(3))
        if mapped_s >= _SPIKE_S or n_bytes * 2 > most:
            break
        n_bytes *= 2
    if mapped_s < _MIN_SPIKE_S:
        raise UnsupportedError(
            f"to map {n_bytes >> 20} MiB takes {mapped_s * 1e6:.0f} us here, too little to be a spike",
            hint="free some of the device's memory: a quarter of what is free is the most that is used",
        )
    return n_bytes, mapped_s


def _cold_start(device: Device) -> Ready:
    """The first allocation makes the context and each first launch loads a module.

    After that every step is the same.
    """

    def run() -> None:
        for _ in range(_N_WEIGHTS):
            device.allocate(_WEIGHT_BYTES)
        device.load(_N_MODULES)
        _run_for(_WARM_S, lambda: _compute(device, _N_MODULES, 0.0005))

    return Ready(run)


def _gpu_steal(device: Device) -> Ready:
    """A service answers requests; for a while, again and again, a notebook computes on the same GPU."""
    device.prepare()
    (notebook,) = _start(["notebook"], device.path)

    def run() -> None:
        begin(notebook)
        _run_for(_SHARED_S, lambda: _compute(device, 10, 0.0006))
        _end([notebook])

    return Ready(run, (notebook.pid,))


def _notebook(device: Device) -> Ready:
    """Computes now and then, on requests of nobody."""
    device.prepare()

    def run() -> None:
        while True:
            time.sleep(_BURST_S)
            _run_for(_BURST_S, lambda: _compute(device, 20, 0.0006))

    return Ready(run)


def _compute(device: Device, n_kernels: int, seconds: float) -> None:
    """One step: kernels that take so long each, and the wait for them."""
    device.launch(n_kernels, seconds)
    device.synchronise()


@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
        prepare: Gets the device; makes all ready.
        settings: Of the simulated device, by name without ``GPUSIM_``. A real one brings its own.
        above: How much higher its priority is than the others'.
        has_one_cpu: It and its children share one CPU.
        has_one_device: It and its children share one device; otherwise each has its own. A real device is always
            shared.
        comm: What the process is called.
    """

    prepare: Callable[[Device], Ready]
    settings: Mapping[str, int]
    above: int = 0
    has_one_cpu: bool = False
    has_one_device: bool = False
    comm: str = "train"


PROGRAMS: Final[Mapping[str, Program]] = {
    "incident": Program(_incident, {}, has_one_cpu=True),
    "cold-start": Program(_cold_start, {"CONTEXT_NS": 400_000_000, "FIRST_LAUNCH_NS": 70_000_000}),
    "cpu-contention": Program(_cpu_contention, {}, has_one_cpu=True),
    "gpu-steal": Program(_gpu_steal, {}, has_one_device=True, comm="serve"),
    "memcpy-bottleneck": Program(_memcpy_bottleneck, {"COPY_MB_PER_S": 6000}),
    "periodic-spike": Program(_periodic_spike, {"MAP_MB_PER_S": 100_000}),
}
"""By scenario."""

_COMPANIONS: Final[Mapping[str, Program]] = {
    "logrotate": Program(_alternate(0.008), {}, above=1, comm="logrotate"),
    "cc1plus": Program(_alternate(0.004), {}, comm="cc1plus"),
    "notebook": Program(_notebook, {}, comm="notebook"),
}
"""Programs that one of them starts, by name."""


def _main() -> None:
    name, library = sys.argv[1:]
    program = {**PROGRAMS, **_COMPANIONS}[name]
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _LIBC.prctl(_PR_SET_NAME, program.comm.encode(), 0, 0, 0)
    _rise(program.above)
    if program.has_one_cpu:
        _share_one_cpu()
    try:
        ready = program.prepare(Device(library))
        report_ready(ready.pids)
        if sys.stdin.readline():
            ready.run()
    except IngeroError as error:
        report_error(error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    _main()
