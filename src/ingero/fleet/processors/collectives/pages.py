"""The admin pages of the processor: verdicts, communicators and their lags, hangs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from ingero.fleet.component import AdminRoute, Host
from ingero.fleet.helpers.admin_pages import ADMIN_ROOT, get_cluster_id, parse_slice
from ingero.fleet.processors.collectives.conclusions import QUIET, Conclusion
from ingero.fleet.processors.collectives.costs import price_culprits
from ingero.fleet.processors.collectives.levels import name_row
from ingero.fleet.processors.collectives.rates import Rates
from ingero.fleet.processors.collectives.reports import find_hardware
from ingero.fleet.processors.collectives.state import CollectivesState
from ingero.model.collectives import Worker
from ingero.model.diagnosis import Diagnosis, describe_diagnosis
from ingero.model.hang import HangReport
from ingero.model.verdicts import Judgement, Verdict, VerdictKind, judgement_json
from ingero.units import NS_PER_S
from ingero.wire.diagnosis import diagnosis_json

_NO_FINDING: Final = QUIET | {VerdictKind.VICTIM}


class CollectivesPages:
    """Verdicts, lags and hangs as JSON."""

    def __init__(self, state: CollectivesState, host: Host) -> None:
        self._engine = state.engine
        self._progress = state.progress
        self._diagnoses = state.diagnoses
        self._rates = Rates(state.engine.config.rates)
        self._find_hardware = partial(find_hardware, host)
        self._clock = host.clock

    def admin_routes(self) -> Sequence[AdminRoute]:
        """Verdicts of a cluster, lags of a communicator."""
        return (
            AdminRoute(
                f"{ADMIN_ROOT}/verdicts",
                "Verdicts of ?cluster_id= (all clusters without it), worst first; ?history=true names also"
                " whose alarm has cleared; ?offset= ?limit=.",
                self._verdicts,
            ),
            AdminRoute(
                f"{ADMIN_ROOT}/findings",
                "Ranks of ?cluster_id= that something is said against, costliest first, with cause and cost.",
                self._findings,
            ),
            AdminRoute(
                f"{ADMIN_ROOT}/collectives",
                "Communicators of ?cluster_id=, or with ?comm= the lag of each of its ranks.",
                self._collectives,
            ),
            AdminRoute(
                f"{ADMIN_ROOT}/hang",
                "Ranks of ?cluster_id= that a job which stands still waits for.",
                self._hang,
            ),
        )

    def _verdicts(self, query: Mapping[str, str]) -> dict[str, Any]:
        conclusions = self._engine.conclusions()
        if "cluster_id" in query:
            conclusions = {query["cluster_id"]: conclusions[query["cluster_id"]]}
        wanted = parse_slice(query)
        clusters = []
        for conclusion in conclusions.values():
            is_history = query.get("history") == "true"
            page = self._build_judgement(conclusion, is_history=is_history)
            page["verdicts"].sort(key=lambda verdict: -float(verdict["evidence"]))
            page["total"] = len(page["verdicts"])
            page["verdicts"] = page["verdicts"][wanted]
            page["age_s"] = round((self._clock.mono_ns() - conclusion.judged_ns) / NS_PER_S, 3)
            page["alpha"] = conclusion.alpha
            clusters.append(page)
        return {"clusters": clusters}

    def _findings(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The verdicts of a large job in a short answer: no peers, and of victims the number."""
        cluster_id = get_cluster_id(query)
        conclusion = self._engine.conclusions()[cluster_id]
        found = [v for v in conclusion.judgement.verdicts if v.kind not in _NO_FINDING]
        found.sort(key=lambda verdict: (-verdict.lost_gpu_ns, -verdict.evidence))
        known = self._diagnoses.find_of(found)
        amounts = price_culprits(conclusion.judgement, self._rates, self._find_hardware)
        n_waited = Counter(
            culprit.worker for v in conclusion.judgement.verdicts for culprit in v.charged_to
        )
        return {
            "total": len(found),
            "age_s": round((self._clock.mono_ns() - conclusion.judged_ns) / NS_PER_S, 3),
            "findings": [
                _build_finding(verdict, known.get(verdict.rank.worker))
                | self._build_price(amounts.get(verdict.rank.worker))
                | {"n_victims": n_waited[verdict.rank.worker]}
                for verdict in found[parse_slice(query)]
            ],
        }

    def _build_price(self, amount: float | None) -> dict[str, Any]:
        return {"amount": amount, "currency": None if amount is None else self._rates.currency}

    def _build_judgement(self, conclusion: Conclusion, *, is_history: bool) -> dict[str, Any]:
        """A judgement, each verdict with its diagnosis where there is one."""
        judgement: Judgement = conclusion.history if is_history else conclusion.judgement
        page = judgement_json(judgement)
        known = self._diagnoses.find_of(judgement.verdicts)
        for verdict, shown in zip(judgement.verdicts, page["verdicts"], strict=True):
            diagnosis = known.get(verdict.rank.worker)
            shown["diagnosis"] = None if diagnosis is None else diagnosis_json(diagnosis)
        return page

    def _hang(self, query: Mapping[str, str]) -> dict[str, Any]:
        cluster_id = get_cluster_id(query)
        if self._engine.is_replaying(cluster_id):  # judged by another Fleet
            raise KeyError(cluster_id)
        report, standing_s = self._progress.read_hang(cluster_id, self._clock.mono_ns())
        known = self._diagnoses.find_in_hang(cluster_id)
        return hang_json(report, standing_s, known)

    def _collectives(self, query: Mapping[str, str]) -> dict[str, Any]:
        cluster_id = get_cluster_id(query)
        if "comm" not in query:
            comms = self._engine.comms_of(cluster_id)
            return {"total": len(comms), "comms": comms[parse_slice(query)]}
        lags = self._engine.lags_of(cluster_id, query["comm"])
        return {
            "comm": query["comm"],
            "ranks": [
                {
                    "node_id": lag.rank.node_id,
                    "rank": lag.rank.rank if lag.rank.rank >= 0 else None,
                    "comm_rank": lag.comm_rank,
                    "peer_lag_ms": lag.lag_ms,
                    "ops": lag.n_ops,
                    "approximate": lag.is_approximate,
                }
                for lag in lags
            ],
        }


def _build_finding(verdict: Verdict, diagnosis: Diagnosis | None) -> dict[str, Any]:
    rank, slowdown = verdict.rank, verdict.slowdown
    return {
        "row": name_row(verdict),
        "node_id": rank.node_id,
        "rank": rank.rank if rank.rank >= 0 else None,
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "slowdown": None if slowdown is None else slowdown.median,
        "evidence": verdict.evidence,
        "lost_gpu_s": verdict.lost_gpu_ns / NS_PER_S,
        "cause": None if diagnosis is None else describe_diagnosis(diagnosis),
    }


def hang_json(
    report: HangReport, standing_s: float, known: Mapping[Worker, Diagnosis]
) -> dict[str, Any]:
    """The answer as JSON-able values.

    Args:
        report: Whom ranks wait for.
        standing_s: For how long.
        known: What agents answered of those.
    """
    return {
        "missing_ranks": list(report.missing_ranks),
        "standing_s": round(standing_s, 3),
        "roots": [
            {
                "rank": root.rank,
                "node_id": root.node_id,
                "job": root.job,
                "cause": root.cause.value,
                "comm": root.group.name,
                "missing_seq": root.missing_seq,
                "last_finished_seq": root.last_left,
                "blocks": list(root.blocks),
                "diagnosis": _explain(known.get(Worker(root.node_id, root.job, root.rank))),
            }
            for root in report.roots
        ],
        "deadlocks": [list(circle) for circle in report.deadlocks],
        "waits": [
            {
                "rank": wait.rank,
                "op": wait.op.op,
                "comm": wait.op.group,
                "seq": wait.op.seq,
                "waits_for": list(wait.waits_for),
            }
            for wait in report.waits
        ],
        "ranks_read": list(report.ranks_read),
        "ranks_known": list(report.ranks_known),
    }


def _explain(diagnosis: Diagnosis | None) -> dict[str, Any] | None:
    return None if diagnosis is None else diagnosis_json(diagnosis)
