"""What a trace counted as named series, once for Prometheus and OTLP.

Names and attributes are the documented ones; latencies are histograms from the kernel's exact buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from ingero.agent.capture.totals import Totals, count_coverage
from ingero.model.arrays import Records
from ingero.model.events import Source, op_name, source_name
from ingero.model.latency import HIST_FIRST_LOG2, fold_octaves
from ingero.model.operations import OpKind, find_kinds
from ingero.units import NS_PER_S
from ingero.wire.names import Attribute, MemcpyDirection

Labels = tuple[tuple[str, str | int], ...]

_LAST_LOG2: Final = 36
"""68 seconds: what is longer falls into the last bucket."""
_NS_PER_MS: Final = 1e6


class Kind(Enum):
    """What a series' numbers are."""

    GAUGE = auto()
    SUM = auto()
    UP_DOWN = auto()
    """A sum that also falls, as OpenTelemetry's UpDownCounter; a gauge to Prometheus."""
    HISTOGRAM = auto()


@dataclass(frozen=True, slots=True)
class Distribution:
    """An exact histogram.

    Attributes:
        bounds: Upper bounds, ascending, in the series' unit.
        counts: Observations per bucket, not cumulative; one more than ``bounds``.
        total: Sum of all observations.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True, slots=True)
class Series:
    """One metric and its points.

    Attributes:
        name: As OTLP has it; with underscores, as Prometheus has it unless ``prometheus`` says otherwise.
        kind: What its numbers are.
        unit: UCUM.
        description: For people.
        points: A value per set of labels.
        prometheus: Name for Prometheus where the documented one differs.
        starts: Since when points count that do not count since tracing began, by their labels: Unix time, 0 where it
            is not known.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    points: tuple[tuple[Labels, float | Distribution], ...]
    prometheus: str = ""
    starts: Mapping[Labels, int] = field(default_factory=dict)

    @property
    def prometheus_name(self) -> str:
        """The name that a scraper sees."""
        return self.prometheus or self.name.replace(".", "_")


def build_counter(
    name: str,
    unit: str,
    description: str,
    points: Iterable[tuple[Labels, float]],
    prometheus: str,
) -> Series:
    """A sum that a device counts itself, and began before tracing did: nobody knows when."""
    known = tuple(points)
    starts = dict.fromkeys((labels for labels, _ in known), 0)
    return Series(name, Kind.SUM, unit, description, known, prometheus, starts)


def build_distribution(histogram: Records, total_ns: int, ns_per_unit: float) -> Distribution:
    """An exact histogram by octaves: bounds are powers of two nanoseconds in the wanted unit."""
    octaves = fold_octaves(histogram)
    counts = octaves[HIST_FIRST_LOG2 - 1 : _LAST_LOG2]
    bounds = 2.0 ** np.arange(HIST_FIRST_LOG2, _LAST_LOG2 + 1) / ns_per_unit
    rest = int(octaves[_LAST_LOG2:].sum())
    return Distribution(
        tuple(bounds.tolist()), (*map(int, counts), rest), float(total_ns) / ns_per_unit
    )


def iter_call_series(totals: Totals, ranks: Mapping[int, int]) -> Iterator[Series]:
    """Series of library calls, collectives and coverage.

    Args:
        totals: Exact counts since tracing began.
        ranks: Rank by process, where it is known.
    """
    keys, counts = totals.all_keys, totals.all_counts
    is_nccl = keys["source"] == Source.NCCL
    yield from _iter_operations(keys, counts)
    yield from _iter_collectives(keys[is_nccl], counts[is_nccl], ranks)
    yield from _iter_copies(totals.copies)
    yield Series(
        "gpu.kernel.launch.count", Kind.SUM, "1", "Kernel launches, by process.",
        tuple(_launches(keys, counts)), "gpu_kernel_launch_count",
    )  # fmt: skip
    coverage = count_coverage(counts)
    yield Series(
        "ingero.trace.calls", Kind.SUM, "1", "Calls by what became of them; all of them are counted.",
        tuple((((("outcome", name),), float(coverage[name]))) for name in ("emitted", "sampled", "lost")),
        "ingero_trace_calls_total",
    )  # fmt: skip
    yield Series(
        "ingero.trace.losses", Kind.SUM, "1",
        "What the kernel's side could not keep or follow and is of no operation, by what it was.",
        tuple(((("what", name),), float(n)) for name, n in totals.losses.items()),
        "ingero_trace_losses_total",
    )  # fmt: skip
    lost = coverage["lost"] + sum(totals.losses.values())
    yield Series(
        "ingero.ringbuf.overflows", Kind.SUM, "1", "Records that did not fit their ring.",
        (((), float(lost)),), "ingero_ringbuf_overflows_total",
    )  # fmt: skip


def _iter_operations(keys: Records, counts: Records) -> Iterator[Series]:
    seen, durations = [], []
    for (source, op), rows in _by(keys, "source", "op"):
        labels: Labels = (("source", source_name(source)), ("operation", op_name(source, op)))
        seen.append((labels, float(counts["seen"][rows].sum())))
        histogram = counts["hist"][rows].sum(axis=0)
        if histogram.sum():
            total_ns = int(counts["total_ns"][rows].sum())
            durations.append((labels, build_distribution(histogram, total_ns, NS_PER_S)))
    yield Series(
        "gpu.cuda.operation.count", Kind.SUM, "1", "Calls, exact whatever is sampled.", tuple(seen)
    )
    yield Series(
        "ingero.cuda.operation.duration", Kind.HISTOGRAM, "s",
        "Time from entry to return, exact whatever is sampled.", tuple(durations),
        "ingero_cuda_operation_duration_seconds",
    )  # fmt: skip


def _iter_collectives(keys: Records, counts: Records, ranks: Mapping[int, int]) -> Iterator[Series]:
    yield from _iter_all_collectives(keys, counts)
    seen, moved, durations = [], [], []
    for (op, pid), rows in _by(keys, "op", "pid"):
        labels: Labels = (("nccl.op_type", op_name(Source.NCCL, op)), ("pid", pid))
        if pid in ranks:
            labels = (*labels, ("rank", ranks[pid]))
        seen.append((labels, float(counts["seen"][rows].sum())))
        moved.append((labels, float(counts["bytes"][rows].sum())))
        total_ns = int(counts["total_ns"][rows].sum())
        histogram = counts["hist"][rows].sum(axis=0)
        durations.append((labels, build_distribution(histogram, total_ns, _NS_PER_MS)))
    yield Series(
        "ingero.nccl.calls", Kind.SUM, "1", "NCCL calls of a process.", tuple(seen),
        "ingero_nccl_calls_total",
    )  # fmt: skip
    yield Series(
        "ingero.nccl.bytes", Kind.SUM, "By", "Bytes that NCCL calls of a process were given.",
        tuple(moved), "ingero_nccl_bytes_total",
    )  # fmt: skip
    yield Series(
        "nccl.collective.duration_ms", Kind.HISTOGRAM, "ms",
        "Time inside NCCL calls, which is enqueue time where they are asynchronous.", tuple(durations),
    )  # fmt: skip


def _iter_all_collectives(keys: Records, counts: Records) -> Iterator[Series]:
    """Under the existing agent's names, with its one label."""
    seen, moved = [], []
    for (op,), rows in _by(keys, "op"):
        labels: Labels = (("nccl.op_type", op_name(Source.NCCL, op)),)
        seen.append((labels, float(counts["seen"][rows].sum())))
        moved.append((labels, float(counts["bytes"][rows].sum())))
    yield Series(
        "nccl.collective.count", Kind.SUM, "1", "NCCL calls.", tuple(seen), "gpu_nccl_collective_count"
    )  # fmt: skip
    yield Series(
        "nccl.collective.bytes", Kind.SUM, "By", "Bytes that NCCL calls were given.", tuple(moved),
        "gpu_nccl_collective_bytes_total",
    )  # fmt: skip


def _iter_copies(copies: Records) -> Iterator[Series]:
    """The directions are in the order of `CopyKind`."""
    moved, durations = [], []
    for direction, count in zip(MemcpyDirection, copies, strict=True):
        if count["seen"]:
            labels: Labels = ((Attribute.MEMCPY_DIRECTION.value, direction.value),)
            moved.append((labels, float(count["bytes"])))
            took = build_distribution(count["hist"], int(count["total_ns"]), _NS_PER_MS)
            durations.append((labels, took))
    yield Series(
        "gpu.memcpy.bytes_total", Kind.SUM, "By", "Bytes copied, exact whatever is sampled.", tuple(moved)
    )  # fmt: skip
    yield Series(
        "gpu.memcpy.duration_ms", Kind.HISTOGRAM, "ms",
        "Time inside copy calls, which is enqueue time where they are asynchronous.", tuple(durations),
    )  # fmt: skip


def _launches(keys: Records, counts: Records) -> Iterator[tuple[Labels, float]]:
    is_launch = find_kinds(keys["source"], keys["op"]) == OpKind.LAUNCH
    own = counts["seen"].astype(np.int64) - counts["nested"].astype(np.int64)
    for pid in np.unique(keys["pid"][is_launch]):
        yield (("pid", int(pid)),), float(own[is_launch & (keys["pid"] == pid)].sum())


def _by(keys: Records, *names: str) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Row numbers by the values of some fields, in their order."""
    values = list(zip(*(keys[name].tolist() for name in names), strict=True))
    order = sorted(range(len(values)), key=values.__getitem__)
    for value, rows in itertools.groupby(order, key=values.__getitem__):
        yield value, list(rows)
