"""Whom a job without progress waits for: one OTLP log record when a rank is first named, one when no rank waits.

``docs/specs/hang.md`` is the specification. This module is the only place that knows the names on the wire: Fleet
builds with it and Echo reads with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.otlp.codec import Export, LogRow, structs
from ingero.wire.log_records import LogSeverity, build_fleet_logs, build_record
from ingero.wire.names import Attribute
from ingero.wire.record_uids import RECORD_UID, build_record_uid
from ingero.wire.typed import read_large, read_number, read_small, read_text, read_texts

HANG_EVENT: Final = "ingero.hang"
_STATE: Final = "ingero.hang.state"
_CAUSE: Final = "ingero.hang.cause"
_MISSING_SEQ: Final = "ingero.hang.missing_seq"
_LAST_FINISHED_SEQ: Final = "ingero.hang.last_finished_seq"
_BLOCKS: Final = "ingero.hang.blocks"
_STANDING_S: Final = "ingero.hang.standing_s"
BEGAN: Final = "began"
ENDED: Final = "ended"
_RANK: Final = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangRecord:
    """What one record says. Its cluster is the resource's.

    Attributes:
        rank: Global rank that others wait for.
        comm: The communicator where it is missed.
        missing_seq: The operation there that it did not enter, or did not leave.
        cause: A value of `ingero.model.hang.HangCause`.
        blocks: Global ranks that wait for it, ascending.
        last_finished_seq: The last operation there that it left; None when unknown.
        standing_s: How long the longest has waited, in seconds; None when nobody waits any more.
        node_id: The rank's node; empty when unknown.
        job: The rank's job, where ranks of several have the same numbers; otherwise empty.
        summary: The body: one line for a person.
    """

    rank: int
    comm: str
    missing_seq: int
    cause: str
    blocks: tuple[int, ...] = ()
    last_finished_seq: int | None = None
    standing_s: float | None = None
    node_id: str = ""
    job: str = ""
    summary: str = ""

    @property
    def is_over(self) -> bool:
        """Whether no rank waits for it any more."""
        return self.standing_s is None


def build_hang_records(cluster_id: str, hangs: Sequence[HangRecord], wall_ns: int) -> Export:
    """The records of one cluster as a logs export, all of one time."""
    return build_fleet_logs({
        cluster_id: [_build_record(cluster_id, hang, wall_ns) for hang in hangs]
    })


def _build_record(cluster_id: str, hang: HangRecord, wall_ns: int) -> structs.LogRecord:
    named: dict[str, Any] = {
        Attribute.CLUSTER_ID: cluster_id,
        Attribute.RANK: hang.rank,
        Attribute.COLLECTIVE_COMM: hang.comm,
        _STATE: ENDED if hang.is_over else BEGAN,
        _CAUSE: hang.cause,
        _MISSING_SEQ: hang.missing_seq,
        _BLOCKS: [str(rank) for rank in hang.blocks],
        Attribute.NODE_ID: hang.node_id or None,
        Attribute.RANK_JOB: hang.job or None,
        _LAST_FINISHED_SEQ: hang.last_finished_seq,
        _STANDING_S: hang.standing_s,
    }
    attributes = {name: value for name, value in named.items() if value is not None}
    attributes[RECORD_UID] = build_record_uid(
        HANG_EVENT,
        cluster_id,
        hang.job,
        hang.rank,
        hang.comm,
        hang.missing_seq,
        named[_STATE],
        wall_ns,
    )
    severity = LogSeverity.INFO if hang.is_over else LogSeverity.WARN
    return build_record(HANG_EVENT, attributes, severity, hang.summary, wall_ns)


def is_hang(event_name: str) -> bool:
    """Whether a record of this event name is a hang; only Fleet sends them."""
    return event_name == HANG_EVENT


def read_hang(record: LogRow) -> HangRecord:
    """Read a record of which `is_hang` is true.

    Raises:
        BadDataError: It names no rank or operation, or its state is neither `BEGAN` nor `ENDED`.
    """
    attributes = record.attributes
    rank = read_small(attributes.get(Attribute.RANK))
    missing_seq = _read_seq(attributes.get(_MISSING_SEQ))
    comm, cause = read_text(attributes.get(Attribute.COLLECTIVE_COMM)), attributes.get(_CAUSE)
    if rank is None or missing_seq is None or comm is None:
        raise BadDataError(
            f"a hang without {Attribute.RANK}, {Attribute.COLLECTIVE_COMM} and {_MISSING_SEQ}"
        )
    state, standing_s = attributes.get(_STATE), read_number(attributes.get(_STANDING_S))
    if state not in {BEGAN, ENDED} or (state == BEGAN) is (standing_s is None):
        raise BadDataError(f"{_STATE} is {state!r:.60} and {_STANDING_S} {standing_s!r:.60}")
    blocks = read_texts(attributes.get(_BLOCKS)) or ()
    return HangRecord(
        rank=rank,
        comm=comm,
        missing_seq=missing_seq,
        cause=read_text(cause) or "",
        blocks=tuple(int(one) for one in blocks if _RANK.fullmatch(one)),
        last_finished_seq=_read_seq(attributes.get(_LAST_FINISHED_SEQ)),
        standing_s=standing_s,
        node_id=read_text(attributes.get(Attribute.NODE_ID)) or "",
        job=read_text(attributes.get(Attribute.RANK_JOB)) or "",
        summary=read_text(record.body) or "",
    )


def _read_seq(value: object) -> int | None:
    seq = read_large(value)
    return None if seq is None or seq < 0 else seq
