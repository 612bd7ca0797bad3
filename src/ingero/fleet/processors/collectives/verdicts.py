"""Conclusions as OTLP: verdict and lag series for metrics pipelines, changed verdicts as records for logs pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ingero.fleet.component import Hardware
from ingero.fleet.processors.collectives.conclusions import QUIET, Conclusion, VerdictChange
from ingero.fleet.processors.collectives.gauges import GaugeLag
from ingero.model.diagnosis import Diagnosis
from ingero.model.verdicts import Verdict, describe_rank
from ingero.otlp.codec import (
    Export,
    build_gauge,
    build_metrics,
    build_number,
    build_sum,
    structs,
)
from ingero.units import NS_PER_MS, NS_PER_S
from ingero.wire.log_records import FLEET_SCOPE, build_fleet_resource
from ingero.wire.names import Attribute, MetricName
from ingero.wire.verdicts import VerdictRecord, build_verdict_records

VERDICT: Final = "ingero_fleet_verdict"
WAIT: Final = "ingero_fleet_wait_seconds"
LOST: Final = "ingero_fleet_lost_gpu_seconds"
SLOWDOWN: Final = "ingero_fleet_slowdown"
EVIDENCE: Final = "ingero_fleet_evidence_log10"
CAUSE_SHARE: Final = "ingero_fleet_cause_share"
GPU_SECONDS: Final = "ingero_fleet_waiting_gpu_seconds_total"
GPU_SECONDS_BACK: Final = "ingero_fleet_waiting_gpu_seconds_taken_back_total"
COST: Final = "ingero_fleet_waiting_cost_total"
COST_BACK: Final = "ingero_fleet_waiting_cost_taken_back_total"
FindHardware = Callable[[str, str], Hardware]
"""Cluster, node → hardware; empty where it is not known."""
_MAX_RECORDS: Final = 1000

SAYS: Final = {
    VERDICT: "1 for what was concluded about a worker, 0 once for what no longer is.",
    WAIT: "Time a worker lost waiting for others.",
    LOST: "GPU time that a culprit, drag or slow link cost its victims, since onset.",
    SLOWDOWN: "How many times as long as its median peer a worker takes.",
    EVIDENCE: "Strength of evidence, as log10 of the e-value.",
    CAUSE_SHARE: "Part that a cause explains, of a culprit's excess, a slow link's time or uneven work. By an agent.",
    MetricName.COLLECTIVE_PEER_LAG_MS: "How much later than its peers a rank enters; negative is earlier.",
    GPU_SECONDS: "GPU time lost waiting, by who is charged and by the hardware that waited.",
    GPU_SECONDS_BACK: "Of that, what was taken back because later operations showed nobody at fault.",
    COST: "What the waiting of GPUs with a known price has cost.",
    COST_BACK: "Of that, what was taken back.",
}
_OF_VERDICTS: Final = (VERDICT, WAIT, LOST, SLOWDOWN, EVIDENCE, MetricName.COLLECTIVE_PEER_LAG_MS)


def build_verdicts(
    conclusion: Conclusion, wall_ns: int, find_hardware: FindHardware | None = None
) -> Export:
    """Every verdict of one cluster that says something, and the lags of this round, as metrics.

    Args:
        conclusion: What was concluded.
        wall_ns: Time of the points.
        find_hardware: Adds what each worker's node computes with, where that is known.
    """
    series: dict[str, list[structs.NumberDataPoint]] = {name: [] for name in _OF_VERDICTS}

    def hardware_of(node_id: str) -> dict[str, str]:
        return hardware_labels(find_hardware, conclusion.judgement.cluster_id, node_id)

    for verdict in conclusion.judgement.verdicts:
        _add_verdict(series, verdict, wall_ns, hardware_of(verdict.rank.node_id))
    for change in conclusion.changes:
        if change.before is not None and change.before not in QUIET:
            labels = worker_labels(change.verdict) | hardware_of(change.verdict.rank.node_id)
            labels["verdict"] = change.before.value
            series[VERDICT].append(build_number(0.0, wall_ns, labels))
    for lag in conclusion.lags:
        point: dict[str, Any] = {
            "cluster_id": lag.rank.cluster_id,
            "node_id": lag.rank.node_id,
            "rank": str(lag.rank.rank) if lag.rank.rank >= 0 else "",
            Attribute.NCCL_COMM_ID_HASH: lag.comm,
            Attribute.NCCL_RANK: lag.comm_rank,
            "approximate": lag.is_approximate,
            **hardware_of(lag.rank.node_id),
        }
        series[MetricName.COLLECTIVE_PEER_LAG_MS].append(build_number(lag.lag_ms, wall_ns, point))
    return build_series(series, conclusion.judgement.cluster_id)


def build_diagnoses(
    explained: Sequence[tuple[Verdict, Diagnosis]], wall_ns: int
) -> Iterator[Export]:
    """Why culprits and links are slow, as metrics: one export per worker."""
    for verdict, diagnosis in explained:
        points = [
            build_number(cause.share, wall_ns, worker_labels(verdict) | {"cause": str(cause.kind)})
            for cause in diagnosis.causes
        ]
        if points:
            yield build_series({CAUSE_SHARE: points}, verdict.rank.cluster_id)


def build_gauge_lags(
    lags: Sequence[GaugeLag], wall_ns: int, find_hardware: FindHardware | None = None
) -> list[Export]:
    """Approximate lags as metrics, one export per cluster."""
    by_cluster: dict[str, list[structs.NumberDataPoint]] = {}
    for lag in lags:
        labels = {
            "cluster_id": lag.group.cluster_id,
            "node_id": lag.member.node_id,
            Attribute.NCCL_COMM_ID_HASH: lag.group.comm,
            Attribute.NCCL_OP_TYPE: lag.group.op,
            Attribute.NCCL_RANK: lag.member.rank,
            "approximate": True,
            **hardware_labels(find_hardware, lag.group.cluster_id, lag.member.node_id),
        }
        point = build_number(lag.lag_ms, wall_ns, labels)
        by_cluster.setdefault(lag.group.cluster_id, []).append(point)
    return [
        build_series({MetricName.COLLECTIVE_PEER_LAG_MS: points}, cluster_id)
        for cluster_id, points in by_cluster.items()
    ]


def build_changes(conclusion: Conclusion, wall_ns: int) -> Export | None:
    """The changes worth a record, as logs; None when there are none."""
    records = [_build_record(change) for change in conclusion.changes if not change.is_quiet]
    cluster_id = conclusion.judgement.cluster_id
    return build_verdict_records(cluster_id, records[:_MAX_RECORDS], wall_ns) if records else None


def worker_labels(verdict: Verdict) -> dict[str, str]:
    """Labels of a series about a worker: the job is empty unless it tells ranks apart, an unknown rank is empty."""
    rank = verdict.rank
    return {
        "cluster_id": rank.cluster_id,
        "node_id": rank.node_id,
        "rank": str(rank.rank) if rank.rank >= 0 else "",
        "job_id": rank.job,
        "worker": describe_rank(rank),
    }


def describe(change: VerdictChange) -> str:
    """One line for a person."""
    verdict = change.verdict
    line = f"{describe_rank(verdict.rank)} on {verdict.rank.node_id}: {verdict.kind.value}"
    if change.before is not None:
        line += f" (was {change.before.value})"
    if verdict.slowdown is not None and verdict.kind not in QUIET:
        line += f", {verdict.slowdown.median:.2f} times its peers"
    return f"{line}; {verdict.reason}" if verdict.reason else line


def hardware_labels(
    find_hardware: FindHardware | None, cluster_id: str, node_id: str
) -> dict[str, str]:
    """Labels ``provider`` and ``gpu_model`` of a node, as far as they are known."""
    if find_hardware is None:
        return {}
    named = find_hardware(cluster_id, node_id)._asdict()
    return {name: value for name, value in named.items() if value}


def _add_verdict(
    series: dict[str, list[structs.NumberDataPoint]],
    verdict: Verdict,
    wall_ns: int,
    hardware: Mapping[str, str],
) -> None:
    labels = worker_labels(verdict) | dict(hardware)

    def put(name: str, value: float, more: Mapping[str, str] | None = None) -> None:
        series[name].append(build_number(float(value), wall_ns, {**labels, **(more or {})}))

    put(WAIT, verdict.wait_ns / NS_PER_S)
    if verdict.kind in QUIET:
        return
    put(VERDICT, 1.0, {"verdict": verdict.kind.value})
    put(EVIDENCE, verdict.evidence)
    if verdict.lost_gpu_ns:
        put(LOST, verdict.lost_gpu_ns / NS_PER_S)
    if verdict.slowdown is not None:
        put(SLOWDOWN, verdict.slowdown.median)


def _build_record(change: VerdictChange) -> VerdictRecord:
    verdict = change.verdict
    return VerdictRecord(
        kind=verdict.kind.value,
        before=change.before.value if change.before else "",
        node_id=verdict.rank.node_id,
        rank=verdict.rank.rank if verdict.rank.rank >= 0 else None,
        job=verdict.rank.job,
        resource=verdict.rank.resource,
        worker=describe_rank(verdict.rank),
        reason=verdict.reason,
        evidence_log10=verdict.evidence,
        lost_gpu_ms=verdict.lost_gpu_ns / NS_PER_MS,
        slowdown=None if verdict.slowdown is None else verdict.slowdown.median,
        victims=tuple(map(describe_rank, verdict.victims)),
        summary=describe(change),
        is_alarm=verdict.is_alarm,
    )


def build_series(series: Mapping[str, list[structs.NumberDataPoint]], cluster_id: str) -> Export:
    """Series by name, each in `SAYS`, as the export of one cluster."""
    metrics = []
    for name, points in series.items():
        if not points:
            continue
        if name == WAIT or name.endswith("_total"):
            metrics.append(build_sum(name, points, unit="", description=SAYS[name]))
        else:
            unit = "ms" if name == MetricName.COLLECTIVE_PEER_LAG_MS else ""
            metrics.append(build_gauge(name, points, unit=unit, description=SAYS[name]))
    return build_metrics(build_fleet_resource(cluster_id), metrics, FLEET_SCOPE)
