"""Who a standing job waits for, as log records: one when a rank is first named, one when nobody waits for it any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ingero.model.hang import HangReport, HangRoot
from ingero.otlp.codec import Export, build_attributes, structs
from ingero.otlp.names import Signal
from ingero.wire.names import Attribute

HANG_EVENT: Final = "ingero.hang"
_INFO, _WARN = 9, 13  # OTLP severity numbers
_SCOPE: Final = structs.InstrumentationScope("ingero.fleet", "")
_Key = tuple[int, str, int]


class HangNews:
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
    """The records of what `HangNews` found.

    Args:
        cluster_id: The cluster.
        began: Whom others wait for.
        ended: Whom they wait for no more.
        standing_s: How long the longest has waited.
        wall_ns: Time of the records.
    """
    records = [_build(cluster_id, root, standing_s, wall_ns) for root in began]
    records += [_build(cluster_id, root, None, wall_ns) for root in ended]
    return _export(cluster_id, records)


def _key(root: HangRoot) -> _Key:
    return root.rank, root.group.name, root.missing_seq


def _build(
    cluster_id: str, root: HangRoot, standing_s: float | None, wall_ns: int
) -> structs.LogRecord:
    """One record; without ``standing_s`` nobody waits any more."""
    is_over = standing_s is None
    attributes: dict[str, Any] = {
        Attribute.CLUSTER_ID: cluster_id,
        Attribute.RANK: root.rank,
        Attribute.COLLECTIVE_COMM: root.group.name,
        "ingero.hang.state": "ended" if is_over else "began",
        "ingero.hang.cause": root.cause.value,
        "ingero.hang.missing_seq": root.missing_seq,
        "ingero.hang.blocks": [str(rank) for rank in root.blocks],
    }
    if root.node_id:
        attributes[Attribute.NODE_ID] = root.node_id
    if root.job:
        attributes[Attribute.RANK_JOB] = root.job
    if root.last_left is not None:
        attributes["ingero.hang.last_finished_seq"] = root.last_left
    if standing_s is not None:
        attributes["ingero.hang.standing_s"] = standing_s
    what = f"operation {root.missing_seq} of {root.group.name}"
    says = (
        f"nobody waits for rank {root.rank} at {what} any more"
        if is_over
        else f"rank {root.rank} never arrived at {what} ({root.cause.value}); {len(root.blocks)} wait for it"
    )
    return structs.LogRecord(
        time_unix_nano=wall_ns,
        observed_time_unix_nano=wall_ns,
        severity_number=_INFO if is_over else _WARN,
        severity_text="INFO" if is_over else "WARN",
        event_name=HANG_EVENT,
        body=structs.AnyValue(string_value=says),
        attributes=build_attributes(attributes),
    )


def _export(cluster_id: str, records: Sequence[structs.LogRecord]) -> Export:
    resource = build_attributes({
        Attribute.SERVICE_NAME: "ingero-fleet",
        Attribute.CLUSTER_ID: cluster_id,
    })
    entry = structs.ResourceLogs(
        resource=structs.Resource(resource),
        scope_logs=[structs.ScopeLogs(scope=_SCOPE, log_records=list(records))],
    )
    return Export.from_tree(Signal.LOGS, structs.LogsRequest([entry]))
