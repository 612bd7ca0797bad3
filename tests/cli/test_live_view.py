"""What ``ingero trace`` draws: every layer with its numbers, within the terminal's width and height."""

import io

import numpy as np
import pytest
from rich.console import Console, Group

from ingero.agent.capture.discover.processes import FileId
from ingero.agent.capture.gpu.readings import GpuReading
from ingero.agent.capture.kernel.abi import get_dtype
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.machine import MachineState
from ingero.cli.commands.trace.live_view import (
    TraceState,
    count_layers,
    count_shown,
    draw,
    write_coverage,
)
from ingero.cli.commands.trace.output import LiveTable
from ingero.model.events import CudaOp, DriverOp, HostOp, NcclOp, Source

LIBRARIES = [
    ProbeTarget(FileId((0, 1), n), f"/very/long/{'folder/' * 14}libcudart.so.{n}", ("cudart",), ((1, 2),))
    for n in range(5)
]  # fmt: skip
CALLED = (
    # source, op, seen, recorded, sampled out, lost
    (Source.CUDA, CudaOp.LAUNCH_KERNEL, 11_009, 1000, 10_009, 0),
    (Source.CUDA, CudaOp.MALLOC, 12, 12, 0, 0),
    (Source.CUDA, CudaOp.FREE, 3, 3, 0, 0),
    (Source.DRIVER, DriverOp.LAUNCH_KERNEL, 17_509, 500, 17_009, 0),
    (Source.NCCL, NcclOp.ALL_REDUCE, 82, 80, 0, 2),
    (Source.HOST, HostOp.PAGE_ALLOC, 467_311, 0, 467_311, 0),
)
STATE = TraceState(
    target="python train.py",
    libraries=LIBRARIES,
    n_host_probes=8,
    machine=MachineState(1.0, 0.72, 11 << 30, 3 << 20, 13.2),
    gpus=[GpuReading(0, name="H100", gpu_pct=97, memory_used=7 << 30, memory_total=80 << 30,
                     temperature_c=61, power_mw=399_000, reasons=4)],
)  # fmt: skip


def totals_of(called=CALLED, **more):
    keys = np.zeros(len(called), get_dtype("count_key"))
    counts = np.zeros(len(called), get_dtype("count"))
    for row, (source, op, seen, emitted, sampled, lost) in enumerate(called):
        keys["pid"][row], keys["source"][row], keys["op"][row] = 7, source, op
        counts["seen"][row], counts["emitted"][row] = seen, emitted
        counts["sampled"][row], counts["lost"][row] = sampled, lost
        if source != Source.HOST:
            counts["hist"][row][40] = seen
            counts["max_ns"][row], counts["total_ns"][row] = 10**6, seen * 10**5
    counts["errors"][1] = 2
    return Totals(
        mono_ns=5, wall_ns=1, elapsed_ns=10**10, keys=keys, counts=counts, changes=counts, losses={},
        in_flight=np.zeros(0, get_dtype("count_key")), keep_one_in=1, **more,
    )  # fmt: skip


def text_of(parts, width):
    out = io.StringIO()
    Console(file=out, width=width).print(Group(*parts))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_every_layer_has_its_section_and_stands_out_where_it_should():
    lines = text_of(draw(totals_of(), STATE, 110, None), 110)
    text = "\n".join(lines)
    assert lines[0] == "target    python train.py, for 10 s"
    assert "kernel    8 probes" in lines
    assert "(cudart, 1 probes)" in text
    order = [
        text.index(head)
        for head in ("CUDA runtime 11,024", "CUDA driver 17,509", "NCCL 82", "host 467,311")
    ]
    assert order == sorted(order)
    (malloc,) = [line for line in lines if line.startswith("cudaMalloc ")]
    assert malloc.endswith("2 failed")
    assert "CPU ██████████ 100%  mem ███████░░░ 72% (11 GiB free)  load 13.2  swap 3 MiB" in lines
    assert (
        lines[-1]
        == "GPU 0     H100, 97 % busy, 7 GiB of 80 GiB, 61 °C, 399 W, throttled: power, sw"
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 16), (100, 30), (200, 60)])
def test_it_fits_the_terminal(width, height):
    lines = text_of(draw(totals_of(), STATE, width, height), width)
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    for name in ("cudaLaunchKernel", "cuLaunchKernel", "ncclAllReduce", "mm_page_alloc"):
        assert sum(line.startswith(name) for line in lines) == 1


def test_what_does_not_fit_is_said_by_number():
    lines = text_of(draw(totals_of(), STATE, 80, 16), 80)
    assert "          +3 more" in lines
    (head,) = [line for line in lines if line.startswith("CUDA runtime")]
    assert head.endswith("+1 more")
    assert count_shown([9, 1, 3], 11) == [4, 1, 3]
    assert count_shown([9, 1, 3], 2) == [1, 1, 1]


def test_coverage_of_gpu_calls_is_not_drowned_by_page_allocations():
    totals = totals_of()
    assert write_coverage(totals.all_keys, totals.all_counts) == [
        ("GPU calls 28,533 seen = 1,515 recorded + 27,018 sampled out + 0 lost", "dim"),
        ("NCCL      82 seen = 80 recorded + 0 sampled out + 2 lost", "bold red"),
        ("host      467,311 seen = 0 recorded + 467,311 sampled out + 0 lost", "dim"),
    ]
    told = count_layers(totals.all_keys, totals.all_counts)
    assert told["NCCL"] == {"entered": 0, "seen": 82, "emitted": 80, "sampled": 0, "lost": 2}


def test_without_a_terminal_only_the_end_is_printed_and_plainly():
    out = io.StringIO()
    table = LiveTable(Console(file=out, width=110), "every process")
    table.on_totals(totals_of())
    assert out.getvalue() == ""
    table.on_totals(totals_of(is_last=True))
    assert out.getvalue().startswith("target    every process, for 10 s\n")
    assert "\x1b" not in out.getvalue()
    assert "cudaFree" in out.getvalue()
