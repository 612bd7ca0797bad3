"""Whom a job that makes no progress waits for, as log records: one when a rank is first named, one at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ingero.model.hang import HangCause, HangReport, HangRoot
from ingero.otlp.codec import Export
from ingero.wire.hangs import HangRecord, build_hang_records

_Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class HangChanges:
    """What changed in one cluster.

    Attributes:
        cluster_id: The cluster.
        began: Ranks that others now wait for.
        ended: Ranks that no rank waits for any more.
        waiting_s: How long the longest has waited, in seconds.
    """

    cluster_id: str
    began: tuple[HangRoot, ...]
    ended: tuple[HangRoot, ...]
    waiting_s: float

    def split(self) -> Iterator[HangChanges]:
        """The same, one by one."""
        for root in self.began:
            yield replace(self, began=(root,), ended=())
        for root in self.ended:
            yield replace(self, began=(), ended=(root,))


class HangTracker:
    """The open hangs of each cluster; one thread. Lossy: a record that a consumer refuses is not sent again."""

    def __init__(self) -> None:
        self._open: dict[str, dict[_Key, HangRoot]] = {}

    def find_changes(self, hangs: Mapping[str, tuple[HangReport, float]]) -> Iterator[HangChanges]:
        """What changed since the last call.

        Args:
            hangs: By cluster, whom its ranks wait for and for how many seconds; a cluster that is forgotten is absent.
        """
        before, self._open = self._open, {}
        for cluster_id in sorted(before.keys() | hangs.keys()):
            report, waiting_s = hangs.get(cluster_id, (None, 0.0))
            roots = report.roots if report else ()
            was = before.get(cluster_id, {})
            now = {(root.rank, root.group.name, root.missing_seq): root for root in roots}
            if now:
                self._open[cluster_id] = now
            if now.keys() != was.keys():
                began = tuple(root for key, root in now.items() if key not in was)
                ended = tuple(root for key, root in was.items() if key not in now)
                yield HangChanges(cluster_id, began, ended, waiting_s)


def build_hangs(changes: HangChanges, wall_ns: int) -> Export:
    """The records of what changed; all have this time."""
    records = [_build_record(root, changes.waiting_s) for root in changes.began]
    records += [_build_record(root, None) for root in changes.ended]
    return build_hang_records(changes.cluster_id, records, wall_ns)


def _build_record(root: HangRoot, waiting_s: float | None) -> HangRecord:
    """One record; without ``waiting_s`` the hang is over."""
    what = f"operation {root.missing_seq} of {root.group.name}"
    return HangRecord(
        rank=root.rank,
        comm=root.group.name,
        missing_seq=root.missing_seq,
        cause=root.cause.value,
        blocks=root.blocks,
        last_finished_seq=root.last_left,
        standing_s=waiting_s,
        node_id=root.node_id,
        job=root.job,
        summary=_summarise(root, what, is_over=waiting_s is None),
    )


def _summarise(root: HangRoot, what: str, *, is_over: bool) -> str:
    if is_over:
        return f"nobody waits for rank {root.rank} at {what} any more"
    if root.cause is HangCause.ENDED:
        n_others = len(root.blocks)
        return (
            f"rank {root.rank} ended before {what}, and before {n_others} others that ended or wait"
        )
    if root.cause is HangCause.STOPPED:
        return f"rank {root.rank} is stopped by a signal at {what}; {len(root.blocks)} wait for it"
    return f"rank {root.rank} never arrived at {what} ({root.cause.value}); {len(root.blocks)} wait for it"
