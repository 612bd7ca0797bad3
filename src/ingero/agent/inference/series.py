"""Servers as series for Prometheus and OTLP, under the existing agent's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from ingero.agent.inference.scrape import EngineScraper
from ingero.agent.inference.stream import BOUNDS_NS
from ingero.agent.inference.watch import AGE_BOUNDS_MS, InferenceWatch
from ingero.agent.metrics.series import Distribution, Kind, Labels, Series
from ingero.detect.inference.baseline import BUCKETS
from ingero.model.arrays import IntArray
from ingero.wire.names import Attribute

_STREAM: Final = "ingero.infer.stream_handle"
_PHASE: Final = "ingero.infer.phase"
_BUCKET: Final = "ingero.infer.outlier_bucket"
_UINT64: Final = (1 << 64) - 1


def iter_inference_series(
    watch: InferenceWatch, engines: EngineScraper | None = None
) -> Iterator[Series]:
    """What was seen of servers so far; nothing of a stream before its first step.

    Args:
        watch: What watches them.
        engines: What reads the metrics of engines, for what it left out; its own series are not in here.
    """
    durations: list[tuple[Labels, Distribution]] = []
    means: list[tuple[Labels, float]] = []
    p95s: list[tuple[Labels, float]] = []
    for pid, stream, phase, workload in watch.iter_phases():
        labels: Labels = (
            (Attribute.CGROUP_PATH_HASH.value, watch.find_cgroup_hash(pid)),
            ("pid", pid),
            (_STREAM, str(stream & _UINT64)),
            (_PHASE, phase),
        )
        record = workload.phases[phase]
        buckets = tuple(record.counts.tolist())
        durations.append((labels, Distribution(BOUNDS_NS, buckets, float(record.total_ns))))
        means.append((labels, record.baseline.mean_ns))
        p95s.append((labels, record.baseline.p95_ns))
    yield Series(
        "ingero.infer.step_duration_ns", Kind.HISTOGRAM, "ns",
        "Steps of programs that serve, by stream and phase.", tuple(durations),
    )  # fmt: skip
    yield Series(
        "ingero.infer.baseline_mean_ns", Kind.GAUGE, "ns", "Mean of usual steps.", tuple(means)
    )
    yield Series(
        "ingero.infer.baseline_p95_ns", Kind.GAUGE, "ns", "95th percentile of usual steps.",
        tuple(p95s),
    )  # fmt: skip
    counts = watch.counts
    for name, description, values in (
        ("outlier", "Steps far over the 95th percentile of their like.", counts.outliers),
        ("throttle_active", "Those while power or heat held a device down.", counts.throttled),
    ):
        yield Series(f"ingero.infer.{name}_total", Kind.SUM, "1", description, _by_bucket(values))
    yield Series(
        "ingero.infer.workloads_tracked", Kind.GAUGE, "1", "Streams of which steps were seen.",
        (((), float(len(watch.workloads))),),
    )  # fmt: skip
    yield from _iter_memory(watch)
    yield Series(
        "ingero.infer.lost", Kind.SUM, "1", "What inference mode did not follow, by what it is.",
        tuple(((("what", what),), float(n)) for what, n in read_losses(watch, engines).items()),
        "ingero_infer_lost_total",
    )  # fmt: skip


def read_losses(watch: InferenceWatch, engines: EngineScraper | None = None) -> dict[str, int]:
    """What was not followed or reported, by what it is; 0 for nothing."""
    return {
        "outliers_not_reported": watch.counts.n_unreported,
        "streams_forgotten": watch.counts.n_forgotten,
        "calls_without_step": watch.finder.n_dropped,
        "steps_over_a_minute": watch.finder.n_long,
        "allocations_not_followed": watch.allocations.n_untracked,
        "engines_not_read": engines.left_out.n_engines if engines is not None else 0,
        "metrics_not_read": engines.left_out.n_metrics if engines is not None else 0,
        "models_not_read": engines.left_out.n_models if engines is not None else 0,
    }


def _by_bucket(counts: IntArray) -> tuple[tuple[Labels, float], ...]:
    return tuple(
        (((_BUCKET, name),), float(n))
        for name, n in zip(BUCKETS[1:], counts[1:].tolist(), strict=True)
    )


def _iter_memory(watch: InferenceWatch) -> Iterator[Series]:
    counts = watch.counts
    ages = Distribution(AGE_BOUNDS_MS, tuple(counts.ages.tolist()), counts.ages_total_ms)
    yield Series(
        "ingero.infer.kvcache.alloc_age_ms", Kind.HISTOGRAM, "ms",
        "Age of device memory when it was released.", (((), ages),),
    )  # fmt: skip
    held = watch.allocations.held
    pids, which = np.unique(held["pid"], return_inverse=True)
    sums = np.bincount(which, held["bytes"], len(pids)).tolist()
    numbers = np.bincount(which, minlength=len(pids)).tolist()
    for name, unit, description, values in (
        ("held_bytes", "By", "Device memory that was allocated while tracing and is held.", sums),
        ("held_allocations", "1", "How many allocations it is.", numbers),
    ):
        points = tuple(
            ((("pid", pid),), float(value))
            for pid, value in zip(pids.tolist(), values, strict=True)
        )
        yield Series(f"ingero.infer.kvcache.{name}", Kind.GAUGE, unit, description, points)
