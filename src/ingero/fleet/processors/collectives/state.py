"""What is known of all clusters' collectives, and where it is reported to."""

from __future__ import annotations

from collections.abc import Mapping

from ingero.fleet.component import Host
from ingero.fleet.helpers.downstream import Downstream
from ingero.fleet.processors.collectives import telemetry
from ingero.fleet.processors.collectives.config import NcclConfig
from ingero.fleet.processors.collectives.cost_totals import CostTotals
from ingero.fleet.processors.collectives.costs import CostDeltas
from ingero.fleet.processors.collectives.diagnoses import DiagnosisTracker
from ingero.fleet.processors.collectives.engine import DetectionEngine
from ingero.fleet.processors.collectives.gauges import GaugeTracker
from ingero.fleet.processors.collectives.hangs import HangTracker
from ingero.fleet.processors.collectives.progress import ProgressTracker
from ingero.fleet.processors.collectives.reported import (
    read_cost_mark,
    read_hangs,
    read_reported,
)


class CollectivesState:
    """What the processor's instances in several pipelines share.

    Attributes:
        engine: What waits to be judged and what was concluded.
        gauges: Per-event gauges of older agents.
        diagnoses: What agents were asked about culprits, and their answers.
        progress: Where ranks of jobs that make no progress stopped.
        hangs: Whom ranks wait for, as far as that was reported.
        costs: What was reported of each cluster's costs, and their sums; the evaluation thread's.
        downstream: Where reports go.
        host: Under which service the timers run; a reload brings another.
        adopted: Clusters that were taken over and not evaluated since, with the last cut of their costs that was
            reported; 0 where that is not known.
    """

    def __init__(self, config: NcclConfig, host: Host) -> None:
        meter = host.meter
        self.engine = DetectionEngine(config, meter)
        self.gauges = GaugeTracker(
            config.gauge_window,
            config.max_gauge_groups,
            count_point=meter.counter(telemetry.GAUGE_POINTS).bound(),
            count_refused=self.engine.refuse["gauge_cap"],
        )
        self.progress = ProgressTracker(config.idle_timeout)
        self.hangs = HangTracker()
        self.diagnoses = DiagnosisTracker(meter)
        self.costs: dict[str, tuple[CostDeltas, CostTotals]] = {}
        lost = meter.counter(telemetry.REPORTS_LOST).bound()
        self.downstream = Downstream(host.clock, lost)
        self.host: object = None
        self.adopted: dict[str, int] = {}
        self._clock = host.clock

    def begin_replay(self, cluster_id: str, reported: Mapping[str, str]) -> None:
        """See `Learner`."""
        self.adopted.pop(cluster_id, None)
        self.engine.begin_replay(cluster_id, read_cost_mark(reported))
        self.progress.forget(cluster_id)
        self.hangs.forget(cluster_id)

    def note_stored(self, cluster_id: str, stored_wall_ns: int, now_ns: int) -> None:
        """See `Learner`."""
        self.engine.note_stored(cluster_id, stored_wall_ns, now_ns)

    def is_behind(self, cluster_id: str) -> bool:
        """See `Learner`."""
        return self.engine.is_behind(cluster_id)

    def end_replay(self, cluster_id: str, reported: Mapping[str, str]) -> None:
        """See `Learner`."""
        now_ns = self._clock.mono_ns()
        self.adopted[cluster_id] = read_cost_mark(reported)
        self.hangs.restore(cluster_id, read_hangs(reported), now_ns)
        self.engine.end_replay(cluster_id, read_reported(reported), now_ns)

    def accepts(self, settings: object) -> bool:
        """Whether it can go on with other settings: prices, caps and timers do not change what was judged."""
        return isinstance(settings, NcclConfig) and self.engine.config.accepts(settings)
