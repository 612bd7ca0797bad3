"""Every instrument of the ``nccl`` processor, declared once."""

from __future__ import annotations

from typing import Final

from ingero.telemetry.declare import MetricDeclaration, counter, gauge, histogram

OPS: Final = counter("ingero_fleet_nccl_ops_total", "Collective operations taken.")
LATE_OPS: Final = counter(
    "ingero_fleet_nccl_late_ops_total",
    "Operations that their agents kept for a minute and more because no Fleet took them.",
)
LATE: Final = gauge(
    "ingero_fleet_nccl_late_seconds",
    "How late the evidence is that most ranks of a cluster deliver; while above 0 its verdicts stay as they were.",
    "cluster_id",
)
REFUSED: Final = counter(
    "ingero_fleet_nccl_refused_total",
    "Batches of operations that were not taken: bad_record, cluster_cap, communicator_cap, pending_cap,"
    " communicator_ops_cap; a rank's gauges, gauge_cap; or what a rank's record says of where it stands, standing_cap.",
    "reason",
)
EVICTED: Final = counter(
    "ingero_fleet_nccl_evicted_total",
    "What was forgotten: cluster (silent); or the evidence of a cluster that started over: at its cap of communicators,"
    " near that of workers (most were silent), or because its evidence could not be judged (see the log).",
    "what",
)
JUDGE_LOST: Final = counter(
    "ingero_fleet_nccl_judge_lost_total",
    "What the Judge could not use: stale_ops, unpaired_ops and dropped_ops count operations, refused_workers and"
    " late_members reports.",
    "reason",
)
JUDGE_FAULTS: Final = counter(
    "ingero_fleet_nccl_judge_faults_total",
    "Rounds of judging that a defect of this program ended; the log has its traceback, and the next round runs.",
)
GAUGE_POINTS: Final = counter(
    "ingero_fleet_nccl_event_points_total", "Per-event gauge points of older agents that were read."
)
JUDGE_SECONDS: Final = histogram(
    "ingero_fleet_nccl_judge_duration_seconds",
    "Time of one round of judging, on its own thread.",
    (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0),
)
VERDICTS: Final = gauge("ingero_fleet_nccl_workers", "Workers by verdict.", "cluster_id", "verdict")
AGE: Final = gauge(
    "ingero_fleet_nccl_verdict_age_seconds",
    "Time since a cluster's verdicts were made.",
    "cluster_id",
)
MISSING: Final = gauge(
    "ingero_fleet_nccl_missing_ranks",
    "Ranks that a job which stands still waits for; 0 while it moves.",
    "cluster_id",
)
DEADLOCKED: Final = gauge(
    "ingero_fleet_nccl_deadlocked_ranks",
    "Ranks that stand still and wait for each other in a circle; 0 while there is no such circle.",
    "cluster_id",
)
REPORTS_LOST: Final = counter(
    "ingero_fleet_nccl_reports_lost_total",
    "Reports of verdicts or lags that the rest of a pipeline did not take.",
)
DIAGNOSES: Final = counter(
    "ingero_fleet_nccl_diagnoses_total",
    "Questions why a culprit is slow or a rank hangs: asked; then answered or declined by its agent, or unanswered."
    " repeated and refused count answers that came twice or that nobody asked for; over_cap workers that were not"
    " asked about.",
    "outcome",
)
METRICS: Final[tuple[MetricDeclaration, ...]] = (
    OPS,
    LATE_OPS,
    LATE,
    REFUSED,
    EVICTED,
    JUDGE_LOST,
    JUDGE_FAULTS,
    GAUGE_POINTS,
    JUDGE_SECONDS,
    VERDICTS,
    AGE,
    MISSING,
    DEADLOCKED,
    REPORTS_LOST,
    DIAGNOSES,
)
