"""Percentiles of the calls of the last minute, under the existing agent's name for them."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

from ingero.agent.capture.totals import Totals
from ingero.agent.metrics.series import Kind, Labels, Series
from ingero.model.events import op_name, source_name
from ingero.model.latency import quantiles_ns
from ingero.units import NS_PER_S

WINDOW_NS: Final = 60 * NS_PER_S
_N_SLICES: Final = 12
_QUANTILES: Final = (0.5, 0.95, 0.99)
_PERCENTILES: Final = ("p50", "p95", "p99")
_NS_PER_US: Final = 1e3

_Key = tuple[int, int]
_Histogram = npt.NDArray[np.uint64]


class RecentDurations:
    """Exact histograms of the last minute by operation, in slices of five seconds.

    The existing agent's percentiles are those of its last thousand samples of an operation, so rules expect a number
    that follows what happens now; one over the whole trace would not come back after a slow hour.
    """

    def __init__(self) -> None:
        self._slices: deque[dict[_Key, _Histogram]] = deque([{}], _N_SLICES)
        self._slice_began_ns: int | None = None

    def take(self, totals: Totals) -> Series:
        """Add the calls since the last totals.

        Returns:
            Gauges in microseconds by source, operation and percentile; none where no call ended for a minute.
        """
        self._turn(totals.mono_ns)
        newest = self._slices[-1]
        for row in np.flatnonzero(totals.changes["hist"].any(axis=1)):
            key = int(totals.keys["source"][row]), int(totals.keys["op"][row])
            histogram = totals.changes["hist"][row].astype(np.uint64)
            newest[key] = newest[key] + histogram if key in newest else histogram
        return Series(
            "gpu.cuda.operation.duration", Kind.GAUGE, "us",
            "Percentiles of the time from entry to return, of the calls of the last minute.",
            tuple(self._points()), "gpu_cuda_operation_duration_microseconds",
        )  # fmt: skip

    def _turn(self, mono_ns: int) -> None:
        began_ns = self._slice_began_ns
        if began_ns is None:
            self._slice_began_ns = mono_ns
        elif (n_slices := (mono_ns - began_ns) * _N_SLICES // WINDOW_NS) > 0:
            self._slices.extend({} for _ in range(min(n_slices, _N_SLICES)))
            self._slice_began_ns = mono_ns

    def _points(self) -> list[tuple[Labels, float]]:
        sums: dict[_Key, _Histogram] = {}
        for part in self._slices:
            for key, histogram in part.items():
                sums[key] = sums[key] + histogram if key in sums else histogram
        return [
            (
                (("source", source_name(source)), ("operation", op_name(source, op)), ("percentile", name)),
                float(took_ns) / _NS_PER_US,
            )
            for (source, op), histogram in sorted(sums.items())
            for name, took_ns in zip(_PERCENTILES, quantiles_ns(histogram, _QUANTILES), strict=True)
        ]  # fmt: skip
