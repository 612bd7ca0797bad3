"""Verdicts, hangs and caps as lines of the service's own log, when they begin and when they end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from ingero.fleet.processors.collectives.engine import CapChange, VerdictChange
from ingero.model.hang import HangRoot
from ingero.model.verdicts import VerdictKind, describe_rank
from ingero.telemetry.limited import FieldValue, RateLimitedLog
from ingero.units import NS_PER_S

QUIET: Final = frozenset({VerdictKind.ORDINARY, VerdictKind.UNKNOWN})


def write_verdicts(
    log: RateLimitedLog, victims_log: RateLimitedLog, changes: Iterable[VerdictChange]
) -> None:
    """A line for each worker of which something else is said than before.

    Args:
        log: For who is at fault.
        victims_log: For victims, limited apart: one culprit may have a thousand.
        changes: What changed.
    """
    for change in changes:
        verdict, before = change.verdict, change.before
        was_quiet = before is None or before in QUIET
        if verdict.kind in QUIET and was_quiet:
            continue
        rank = verdict.rank
        fields: dict[str, FieldValue] = {
            "cluster": rank.cluster_id,
            "node": rank.node_id,
            "rank": rank.rank if rank.rank >= 0 else None,
            "job": rank.job or None,
            "worker": describe_rank(rank),
            "verdict": verdict.kind.value,
            "before": before.value if before else None,
        }
        is_over = verdict.kind in QUIET
        if not is_over:
            slowdown = verdict.slowdown
            fields["slowdown"] = None if slowdown is None else round(slowdown.median, 3)
            fields["lost_gpu_s"] = round(verdict.lost_gpu_ns / NS_PER_S, 3)
            fields["victims"] = len(verdict.victims)
        level = logging.WARNING if verdict.is_alarm else logging.INFO
        says = "verdict ended" if is_over else "verdict began"
        is_victim = VerdictKind.VICTIM in {verdict.kind, before if is_over else None}
        chosen = victims_log if is_victim else log
        chosen.write(("verdict", rank.cluster_id, rank.worker), level, says, **fields)


def write_hangs(
    log: RateLimitedLog,
    cluster_id: str,
    began: Sequence[HangRoot],
    ended: Sequence[HangRoot],
    standing_s: float,
) -> None:
    """A line for each rank that others wait for, and for each that nobody waits for any more."""
    for roots, level, says in (
        (began, logging.WARNING, "hang began: a rank never arrived"),
        (ended, logging.INFO, "hang ended"),
    ):
        for root in roots:
            is_new = roots is began
            log.write(
                ("hang", cluster_id, root.rank, root.job),
                level,
                says,
                cluster=cluster_id,
                node=root.node_id or None,
                rank=root.rank,
                job=root.job or None,
                comm=root.group.name,
                missing_seq=root.missing_seq,
                cause=root.cause.value if is_new else None,
                blocks=len(root.blocks) if is_new else None,
                standing_s=round(standing_s, 3) if is_new else None,
            )


def write_caps(log: RateLimitedLog, changes: Iterable[CapChange]) -> None:
    """A line for each cap that begins or ceases to refuse."""
    for change in changes:
        log.write(
            ("cap", change.reason, change.cluster_id),
            logging.WARNING if change.is_on else logging.INFO,
            "cap reached: collective records are refused"
            if change.is_on
            else "cap refuses nothing any more",
            cap=change.reason,
            cluster=change.cluster_id or None,
            refused=change.n_refused or None,
        )
