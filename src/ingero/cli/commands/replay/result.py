"""What a replay concluded, in the recording's own terms: steps, (dp rank, stage), seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingero.job_traces.model import JobTrace
from ingero.model.collectives import Rank
from ingero.model.verdicts import Judgement, Verdict, VerdictKind
from ingero.units import NS_PER_S


def worker_json(rank: Rank) -> dict[str, Any]:
    """A worker by its coordinates, ``{"dp_rank": 0, "stage": 3}``; by its rank and node where it has none."""
    labels = dict(rank.labels)
    if not labels.keys() & {"dp", "stage"}:
        return {"rank": rank.rank, "node": rank.node_id}
    return {
        "dp_rank": int(labels["dp"]) if "dp" in labels else None,
        "stage": int(labels["stage"]) if "stage" in labels else None,
    }


def _seconds(duration_ns: int) -> float:
    return round(duration_ns / NS_PER_S, 3)


def _verdict_json(trace: JobTrace, verdict: Verdict) -> dict[str, Any]:
    onset, slowdown, found_ns = verdict.onset, verdict.slowdown, verdict.detected_entry_ns
    return {
        "worker": worker_json(verdict.rank),
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "onset_step": None if onset is None else trace.find_step(onset.entry_ns),
        "onset_op": None if onset is None else onset.op_index,
        "noticed_step": None
        if verdict.noticed_entry_ns is None
        else trace.find_step(verdict.noticed_entry_ns),
        "detected_step": None if found_ns is None else trace.find_step(found_ns),
        "time_to_detection_s": None
        if onset is None or found_ns is None
        else _seconds(found_ns - onset.entry_ns),
        "ops_to_detection": verdict.n_ops_to_detect,
        "slowdown": None if slowdown is None else round(slowdown.median, 4),
        "slowdown_spread": None
        if slowdown is None
        else [round(slowdown.low, 4), round(slowdown.high, 4)],
        "evidence": round(verdict.evidence, 3),
        "bet": None if verdict.bet is None else verdict.bet.value,
        "n_ops": verdict.n_ops,
        "own_s": _seconds(verdict.own_ns),
        "wait_s": _seconds(verdict.wait_ns),
        "excess_s": _seconds(verdict.excess_ns),
        "victims": [worker_json(victim) for victim in verdict.victims],
        "charged_to": [
            {"worker": worker_json(rank), "wait_s": _seconds(wait_ns)}
            for rank, wait_ns in verdict.charged_to.items()
        ],
        "lost_gpu_s": _seconds(verdict.lost_gpu_ns),
    }


def build_result(trace: JobTrace, judgements: Sequence[Judgement]) -> dict[str, Any]:
    """Everything a replay says, as JSON-able values.

    Args:
        trace: What was replayed.
        judgements: The Judge's, from here or from a Fleet.
    """
    verdicts = [verdict for judgement in judgements for verdict in judgement.verdicts]
    counts: dict[str, int] = dict(judgements[0].counts) if judgements else {}
    return {
        "trace": trace.name,
        "steps": int(trace.steps.size),
        "duration_s": _seconds(int(trace.steps["end_ns"][-1])),
        "workers": len(trace.workers),
        "gpus": sum(worker.n_gpus for worker in trace.workers),
        "ops": trace.n_ops,
        "verdicts": [_verdict_json(trace, verdict) for verdict in verdicts],
        "culprits": [
            worker_json(verdict.rank) for verdict in verdicts if verdict.kind is VerdictKind.CULPRIT
        ],
        "cost": {
            "waited_gpu_s": _seconds(sum(j.total_wait_gpu_ns for j in judgements)),
            "charged_gpu_s": _seconds(sum(j.charged_gpu_ns for j in judgements)),
            "unattributed_gpu_s": _seconds(sum(j.unattributed_gpu_ns for j in judgements)),
        },
        "counts": {**counts, "unknown_rows": trace.n_unknown_rows},
    }
