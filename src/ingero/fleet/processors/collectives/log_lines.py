"""Verdicts, hangs and caps as lines of the service's own log, when they begin and when they end."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from ingero.fleet.processors.collectives.conclusions import QUIET, VerdictChange
from ingero.fleet.processors.collectives.engine import CapChange
from ingero.fleet.processors.collectives.hangs import HangChanges
from ingero.model.diagnosis import Diagnosis, describe_diagnosis
from ingero.model.hang import HangReport, HangRoot
from ingero.model.verdicts import Verdict, VerdictKind, describe_rank
from ingero.telemetry.clock import Clock
from ingero.telemetry.limited import FieldValue, RateLimitedLog
from ingero.units import NS_PER_S

_MAX_LISTED: Final = 16
"""Ranks of one circle that a line lists."""
_log: Final = logging.getLogger("ingero.fleet.processors.nccl")


class EventLog:
    """Writes the lines. Those about victims are limited apart: one culprit may have a thousand."""

    def __init__(self, clock: Clock) -> None:
        self._lines = RateLimitedLog(_log, clock, burst=2)
        self._victims = RateLimitedLog(_log, clock, burst=2, total_burst=20)
        self._catching_up: set[str] = set()
        self._circles: set[tuple[str, tuple[int, ...]]] = set()

    def flush(self) -> None:
        """Write lines that were held and are allowed now."""
        self._lines.flush()
        self._victims.flush()

    def write_late(self, late_ns: Mapping[str, int]) -> None:
        """A line for each cluster of which nothing begins, or ceases, to be concluded because its evidence is late."""
        for cluster_id in late_ns.keys() ^ self._catching_up:
            is_late = cluster_id in late_ns
            self._lines.write(
                ("late", cluster_id),
                logging.WARNING if is_late else logging.INFO,
                "evidence is late: verdicts stay as they were until it is of now"
                if is_late
                else "evidence is of now again",
                cluster=cluster_id,
                late_s=round(late_ns[cluster_id] / NS_PER_S) if is_late else None,
            )
        self._catching_up = set(late_ns)

    def write_verdicts(self, changes: Iterable[VerdictChange]) -> None:
        """A line for each worker whose verdict began or ended."""
        for change in changes:
            if change.is_quiet:
                continue
            verdict, before = change.verdict, change.before
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
            is_victim = VerdictKind.VICTIM in {verdict.kind, before if is_over else None}
            (self._victims if is_victim else self._lines).write(
                ("verdict", rank.cluster_id, rank.worker),
                logging.WARNING if verdict.is_alarm else logging.INFO,
                "verdict ended" if is_over else "verdict began",
                **fields,
            )

    def write_diagnoses(self, explained: Iterable[tuple[Verdict | HangRoot, Diagnosis]]) -> None:
        """A line for each named worker whose agent answered."""
        for named, diagnosis in explained:
            rank = diagnosis.rank
            what, is_alarm = (
                ("hang", True) if isinstance(named, HangRoot) else ("verdict", named.is_alarm)
            )
            self._lines.write(
                ("diagnosis", rank.cluster_id, rank.worker),
                logging.WARNING if is_alarm else logging.INFO,
                f"{what} not explained" if diagnosis.declined else f"{what} explained",
                cluster=rank.cluster_id,
                node=rank.node_id,
                rank=rank.rank if rank.rank >= 0 else None,
                job=rank.job or None,
                worker=describe_rank(rank),
                cause=diagnosis.cause or None,
                why=describe_diagnosis(diagnosis),
            )

    def write_hangs(self, changes: HangChanges) -> None:
        """A line for each rank that others wait for, and for each hang that ended."""
        for root in (*changes.began, *changes.ended):
            is_new = root in changes.began
            self._lines.write(
                ("hang", changes.cluster_id, root.rank, root.job),
                logging.WARNING if is_new else logging.INFO,
                "hang began: a rank never arrived" if is_new else "hang ended",
                cluster=changes.cluster_id,
                node=root.node_id or None,
                rank=root.rank,
                job=root.job or None,
                comm=root.group.name,
                missing_seq=root.missing_seq,
                cause=root.cause.value if is_new else None,
                blocks=len(root.blocks) if is_new else None,
                standing_s=round(changes.waiting_s, 3) if is_new else None,
            )

    def write_deadlocks(self, hangs: Mapping[str, tuple[HangReport, float]]) -> None:
        """A line for each circle of ranks that wait for each other, and for each that ended."""
        now = {
            (cluster_id, circle)
            for cluster_id, (report, _) in hangs.items()
            for circle in report.deadlocks
        }
        for cluster_id, circle in sorted(now ^ self._circles):
            is_new = (cluster_id, circle) in now
            more = ",..." if len(circle) > _MAX_LISTED else ""
            self._lines.write(
                ("deadlock", cluster_id, circle),
                logging.WARNING if is_new else logging.INFO,
                "deadlock began: ranks wait for each other" if is_new else "deadlock ended",
                cluster=cluster_id,
                ranks=",".join(map(str, circle[:_MAX_LISTED])) + more,
                n_ranks=len(circle),
                standing_s=round(hangs[cluster_id][1], 3) if is_new else None,
            )
        self._circles = now

    def write_caps(self, changes: Iterable[CapChange]) -> None:
        """A line for each cap that begins or ceases to refuse."""
        for change in changes:
            self._lines.write(
                ("cap", change.reason, change.cluster_id),
                logging.WARNING if change.is_on else logging.INFO,
                "cap reached: collective records are refused"
                if change.is_on
                else "cap refuses nothing any more",
                cap=change.reason,
                cluster=change.cluster_id or None,
                refused=change.n_refused or None,
            )
