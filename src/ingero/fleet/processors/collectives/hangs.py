"""Who a standing job waits for, as log records: one when a rank is first named, one when nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Sequence

from ingero.model.hang import HangReport, HangRoot
from ingero.otlp.codec import Export
from ingero.wire.hangs import HangRecord, build_hang_records

_Key = tuple[int, str, int]


class HangChanges:
    """What was told of each cluster; one thread at a time. Lossy: what following consumers refuse is not told again."""

    def __init__(self) -> None:
        self._told: dict[str, dict[_Key, HangRoot]] = {}

    def find_changes(
        self, cluster_id: str, report: HangReport | None
    ) -> tuple[list[HangRoot], list[HangRoot]]:
        """Whom others began to wait for since the last call, and for whom nobody waits any more.

        Args:
            cluster_id: The cluster.
            report: Whom its ranks wait for; None when nothing is known of it any more.
        """
        before = self._told.get(cluster_id, {})
        now = {_key(root): root for root in report.roots} if report else {}
        self._told[cluster_id] = now
        if not now:
            del self._told[cluster_id]
        began = [root for key, root in now.items() if key not in before]
        ended = [root for key, root in before.items() if key not in now]
        return began, ended


def build_hangs(
    cluster_id: str,
    began: Sequence[HangRoot],
    ended: Sequence[HangRoot],
    standing_s: float,
    wall_ns: int,
) -> Export:
    """The records of what `HangChanges` found.

    Args:
        cluster_id: The cluster.
        began: Whom others wait for.
        ended: Whom they wait for no more.
        standing_s: How long the longest has waited.
        wall_ns: Time of the records.
    """
    records = [_tell(root, standing_s) for root in began]
    records += [_tell(root, None) for root in ended]
    return build_hang_records(cluster_id, records, wall_ns)


def _key(root: HangRoot) -> _Key:
    return root.rank, root.group.name, root.missing_seq


def _tell(root: HangRoot, standing_s: float | None) -> HangRecord:
    """What a record says; without ``standing_s`` nobody waits any more."""
    what = f"operation {root.missing_seq} of {root.group.name}"
    says = (
        f"nobody waits for rank {root.rank} at {what} any more"
        if standing_s is None
        else f"rank {root.rank} never arrived at {what} ({root.cause.value}); {len(root.blocks)} wait for it"
    )
    return HangRecord(
        rank=root.rank,
        comm=root.group.name,
        missing_seq=root.missing_seq,
        cause=root.cause.value,
        blocks=root.blocks,
        last_finished_seq=root.last_left,
        standing_s=standing_s,
        node_id=root.node_id,
        job=root.job,
        summary=says,
    )
