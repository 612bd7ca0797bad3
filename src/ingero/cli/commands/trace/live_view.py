"""What ``ingero trace`` shows in a terminal: what is traced, the machine, and each layer's operations.

Pure: text and tables from facts; `ingero.cli.commands.trace.output` draws them once a second. Made for 80 columns and
up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ingero.agent.capture.gpu.readings import GpuReading, find_throttles
from ingero.agent.capture.probes.targets import ProbeTarget
from ingero.agent.capture.totals import Totals, count_coverage
from ingero.agent.metrics.machine import MachineState
from ingero.model.arrays import Records
from ingero.model.events import Source, op_name
from ingero.model.latency import quantiles_ns
from ingero.units import format_duration, format_size

LAYERS: Final = (
    ("CUDA runtime", (Source.CUDA,)),
    ("CUDA driver", (Source.DRIVER,)),
    ("CUDA graphs", (Source.CUDA_GRAPH,)),
    ("NCCL", (Source.NCCL,)),
    ("host", (Source.HOST,)),
    ("disk", (Source.IO,)),
    ("TCP", (Source.TCP,)),
    ("network", (Source.NET,)),
)
_COVERED: Final = (
    ("GPU calls", (Source.CUDA, Source.DRIVER, Source.CUDA_GRAPH)),
    ("NCCL", (Source.NCCL,)),
    ("host", (Source.HOST, Source.IO, Source.TCP, Source.NET)),
)
_QUANTILES: Final = (0.5, 0.95, 0.99)
_COLUMNS: Final = (("calls", 9), ("p50", 7), ("p95", 7), ("p99", 7), ("max", 7), ("wall", 6))
_NAME_WIDTH: Final = 23
_BYTES_FROM: Final = 96
"""Terminals at least so wide have a column of bytes."""
_TAIL_RATIO: Final = 10
_TAIL_CALLS: Final = 100
"""A p99 of fewer calls is one call's."""
_BAR: Final = 10
_WARN_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True)
class TraceState:
    """What is shown beside the counts.

    Attributes:
        target: What is traced, for people.
        libraries: Files that are probed.
        n_host_probes: Probes of the kernel that run.
        machine: The last sample of it; None before the first.
        gpus: The last sample of the devices.
    """

    target: str = ""
    libraries: Sequence[ProbeTarget] = ()
    n_host_probes: int = 0
    machine: MachineState | None = None
    gpus: Sequence[GpuReading] = ()


@dataclass(slots=True)
class Row:
    """One operation of every process.

    Attributes:
        source: Which part of the system.
        cells: Name, calls, p50, p95, p99, max and wall, as `_COLUMNS` has them.
        moved: Bytes, or a dash.
        flags: What stands out.
        total_ns: For the order.
        n_calls: As counted.
    """

    source: int
    cells: Sequence[str]
    moved: str
    flags: str
    total_ns: int
    n_calls: int


def draw(totals: Totals, state: TraceState, width: int, height: int | None) -> list[RenderableType]:
    """Header, machine, layers and devices.

    Args:
        totals: Exact counts.
        state: What is shown beside them.
        width: Columns of the terminal.
        height: Lines there are for all of it; None for as many as it takes.
    """
    n_libraries = None if height is None else max(height // 8, 2)
    head: list[RenderableType] = [
        *_header(totals, state, width, n_libraries),
        *_machine(state.machine),
    ]
    devices: list[RenderableType] = list(_devices(state.gpus))
    layers = list(_layers(build_rows(totals)))
    left = None if height is None else height - len(head) - len(devices)
    return [*head, *_tables(layers, width, left), *devices]


def _header(
    totals: Totals, state: TraceState, width: int, n_libraries: int | None
) -> Iterator[Text]:
    spent = f", for {format_duration(totals.elapsed_ns)}"
    target = Text(state.target, style="bold")
    target.truncate(max(width - len(spent) - 10, 8), overflow="ellipsis")
    yield Text.assemble(("target    ", "bold"), target, spent)
    for library in state.libraries[:n_libraries]:
        probes = f"{'+'.join(library.libraries)}, {len(library.probes)} probes"
        room = max(width - len(probes) - 14, 16)
        path = library.path if len(library.path) <= room else f"…{library.path[1 - room :]}"
        yield _line(f"library   {path}  ({probes})")
    n_more = len(state.libraries) - len(state.libraries[:n_libraries])
    if n_more:
        yield Text(f"          +{n_more} more", style="dim")
    if not state.libraries:
        yield Text(
            "library   none is loaded yet; it is probed when a process loads it", style="dim"
        )
    yield Text(f"kernel    {state.n_host_probes} probes")


def _line(text: str, style: str = "") -> Text:
    """One line, cut where the terminal ends."""
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _machine(state: MachineState | None) -> Iterator[Text]:
    if state is None:
        return
    line = _line("")
    if state.cpu_share is not None:
        line.append_text(_bar("CPU", state.cpu_share)).append("  ")
    line.append_text(_bar("mem", state.memory_share))
    line.append(f" ({format_size(state.available_bytes)} free)")
    line.append(f"  load {state.load1:.1f}")
    line.append(f"  swap {format_size(state.swap_bytes)}")
    yield line


def _bar(name: str, share: float) -> Text:
    filled = min(max(round(share * _BAR), 0), _BAR)
    style = "yellow" if share >= _WARN_SHARE else "green"
    return Text.assemble(
        f"{name} ", ("█" * filled, style), ("░" * (_BAR - filled), "dim"), f" {share:3.0%}"
    )


def build_rows(totals: Totals) -> list[Row]:
    """Operations that were called, most time first."""
    keys, every = totals.all_keys, totals.all_counts
    operations = np.stack([keys["source"], keys["op"]], axis=1)
    rows = []
    for source, op in np.unique(operations, axis=0):
        counts = every[(operations[:, 0] == source) & (operations[:, 1] == op)]
        if counts["seen"].sum():
            rows.append(_build_row(int(source), int(op), counts, totals.elapsed_ns))
    return sorted(rows, key=lambda row: (-row.total_ns, -row.n_calls))


def _build_row(source: int, op: int, counts: Records, elapsed_ns: int) -> Row:
    histogram = counts["hist"].sum(axis=0)
    longest = float(counts["max_ns"].max())
    quantiles = [min(float(value), longest) for value in quantiles_ns(histogram, _QUANTILES)]
    has_times = bool(histogram.sum())
    shown = [
        format_duration(value).replace(" ", "") if has_times else "-"
        for value in (*quantiles, longest)
    ]
    total_ns, n_calls = int(counts["total_ns"].sum()), int(counts["seen"].sum())
    own = n_calls - int(counts["nested"].sum())
    n_bytes, n_errors = int(counts["bytes"].sum()), int(counts["errors"].sum())
    flags = [f"{n_errors} failed"] if n_errors else []
    if has_times and n_calls >= _TAIL_CALLS and quantiles[2] >= _TAIL_RATIO * quantiles[0] > 0:
        flags.append("tail")
    if not own:
        flags.append("nested")
    wall = f"{100 * total_ns / max(elapsed_ns, 1):.1f}%" if has_times else "-"
    cells = (op_name(source, op), f"{n_calls:,}", *shown, wall)
    moved = format_size(n_bytes).replace(" ", "") if n_bytes else "-"
    return Row(source, cells, moved, ", ".join(flags), total_ns, n_calls)


def _layers(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for name, sources in LAYERS:
        mine = [row for row in rows if row.source in sources]
        if mine:
            yield name, mine
    known = {source for _, sources in LAYERS for source in sources}
    rest = [row for row in rows if row.source not in known]
    if rest:
        yield "other", rest


def _tables(
    layers: Sequence[tuple[str, list[Row]]], width: int, height: int | None
) -> Iterator[RenderableType]:
    shown = count_shown([len(rows) for _, rows in layers], height)
    has_bytes = width >= _BYTES_FROM
    for number, ((name, rows), n_shown) in enumerate(zip(layers, shown, strict=True)):
        table = Table(
            box=None,
            pad_edge=False,
            padding=(0, 1, 0, 0),
            header_style="bold cyan",
            show_header=True,
        )
        n_calls = sum(row.n_calls for row in rows)
        table.add_column(f"{name} {n_calls:,}", width=_NAME_WIDTH, no_wrap=True)
        for column, size in _COLUMNS:
            head = column if not number else ""
            table.add_column(head, justify="right", width=size, no_wrap=True)
        if has_bytes:
            table.add_column("bytes" if not number else "", justify="right", width=9, no_wrap=True)
        n_more = len(rows) - n_shown
        more = f"+{n_more} more" if n_more else ""
        table.add_column(more, no_wrap=True, style="yellow", header_style="dim")
        for row in rows[:n_shown]:
            table.add_row(*row.cells, *([row.moved] if has_bytes else []), row.flags)
        yield table


def count_shown(n_rows: Sequence[int], height: int | None) -> list[int]:
    """How many operations of each layer fit into so many lines, those of the most time first; at least one each."""
    if height is None:
        return list(n_rows)

    def lines(limit: int) -> int:
        return sum(1 + min(n, limit) for n in n_rows)

    most = max(n_rows, default=0)
    limit = next((limit for limit in range(most, 1, -1) if lines(limit) <= height), 1)
    return [min(n, limit) for n in n_rows]


def _devices(gpus: Sequence[GpuReading]) -> Iterator[Text]:
    for gpu in gpus:
        facts = [f"{gpu.name or 'GPU'}"]
        if gpu.gpu_pct is not None:
            facts.append(f"{gpu.gpu_pct} % busy")
        if gpu.memory_used is not None and gpu.memory_total:
            facts.append(f"{format_size(gpu.memory_used)} of {format_size(gpu.memory_total)}")
        if gpu.temperature_c is not None:
            facts.append(f"{gpu.temperature_c} °C")
        if gpu.power_mw is not None:
            facts.append(f"{gpu.power_mw / 1000:.0f} W")
        held = sorted(find_throttles(gpu.reasons)) if gpu.reasons is not None else []
        if held:
            facts.append(f"throttled: {', '.join(held)}")
        yield _line(f"GPU {gpu.index}     {', '.join(facts)}", "yellow" if held else "")


def count_layers(keys: Records, counts: Records) -> dict[str, dict[str, int]]:
    """What became of the calls of each layer, as `count_coverage` tells it of all.

    Layers without calls are left out.
    """
    coverage = {}
    for name, sources in _COVERED:
        mine = count_coverage(counts[np.isin(keys["source"], sources)])
        if mine["seen"]:
            coverage[name] = mine
    return coverage


def write_coverage(keys: Records, counts: Records) -> list[tuple[str, str]]:
    """A line per layer, each with its style: what was counted, and what of it has a row."""
    return [
        (_write_layer(name, coverage), "bold red" if coverage["lost"] else "dim")
        for name, coverage in count_layers(keys, counts).items()
    ]


def _write_layer(name: str, coverage: dict[str, int]) -> str:
    kept = f"{coverage['emitted']:,} recorded + {coverage['sampled']:,} sampled out + {coverage['lost']:,} lost"
    return f"{name:<9} {coverage['seen']:,} seen = {kept}"
