"""Whom a job that makes no progress waits for, as log records: one when a rank is first named, one at the end."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ingero.fleet.processors.collectives.progress import FRESH_NS
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
    """The open hangs of each cluster; any thread. Lossy: a record that a consumer refuses is not sent again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, dict[_Key, HangRoot]] = {}
        self._kept_until_ns: dict[str, int] = {}

    def forget(self, cluster_id: str) -> None:
        """Know no hang of a cluster any more: another Fleet judges it."""
        with self._lock:
            self._open.pop(cluster_id, None)

    def restore(self, cluster_id: str, roots: Iterable[HangRoot], now_ns: int) -> None:
        """Go on from what another Fleet said last; a rank that is not met within `FRESH_NS` nobody waits for."""
        known = {_key_of(root): root for root in roots}
        with self._lock:
            self._open[cluster_id] = known
            self._kept_until_ns[cluster_id] = now_ns + FRESH_NS

    def find_changes(
        self, hangs: Mapping[str, tuple[HangReport, float]], now_ns: int
    ) -> list[HangChanges]:
        """What changed since the last call.

        Args:
            hangs: By cluster, whom its ranks wait for and for how many seconds; a cluster that is forgotten is absent.
            now_ns: Monotonic time.
        """
        found = []
        with self._lock:
            before, self._open = self._open, {}
            self._kept_until_ns = {
                cluster_id: ns for cluster_id, ns in self._kept_until_ns.items() if now_ns < ns
            }
            for cluster_id in sorted(before.keys() | hangs.keys()):
                report, waiting_s = hangs.get(cluster_id, (None, 0.0))
                was = before.get(cluster_id, {})
                now = {_key_of(root): root for root in (report.roots if report else ())}
                if cluster_id in self._kept_until_ns:
                    now = was | now
                if now:
                    self._open[cluster_id] = now
                if now.keys() != was.keys():
                    began = tuple(root for key, root in now.items() if key not in was)
                    ended = tuple(root for key, root in was.items() if key not in now)
                    found.append(HangChanges(cluster_id, began, ended, waiting_s))
        return found


def _key_of(root: HangRoot) -> _Key:
    return root.rank, root.group.name, root.missing_seq


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
        return f"rank {root.rank} is stopped or frozen at {what}; {len(root.blocks)} wait for it"
    return f"rank {root.rank} never arrived at {what} ({root.cause.value}); {len(root.blocks)} wait for it"
