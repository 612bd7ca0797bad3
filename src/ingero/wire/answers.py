"""What agents' answers to Fleet's questions share: the episode and the worker that they are about.

``docs/specs/diagnosis.md`` is the specification.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.model.collectives import Rank
from ingero.otlp.codec import Export, build_logs, structs
from ingero.wire.log_records import LogSeverity, build_record, read_sender
from ingero.wire.names import MAX_ID_LENGTH, Attribute, Scope
from ingero.wire.typed import read_small, read_text

MAX_RECORDS: Final = 64
"""Records of one export that are read; those beyond are refused."""
MAX_RANK: Final = 1 << 24
EPISODE_ID: Final = re.compile(r"[0-9a-f]{16}")
_ID: Final = "ingero.diagnosis.id"


def build_answer(
    event_name: str,
    about: tuple[str, Rank],
    attributes: Mapping[str, Any],
    severity: LogSeverity,
    summary: str,
    wall_ns: int,
) -> Export:
    """An answer as a logs export of the worker's node.

    Args:
        event_name: Of the record.
        about: The episode's id and the worker.
        attributes: What else it says; None is left out.
        severity: As `build_record` has it, and so the rest.
        summary: One line for a person.
        wall_ns: Time of the answer.
    """
    episode_id, rank = about
    resource: dict[str, str] = {
        Attribute.NODE_ID: rank.node_id,
        Attribute.CLUSTER_ID: rank.cluster_id,
        **dict(rank.resource),
    }
    everything = {
        _ID: episode_id,
        **attributes,
        Attribute.RANK: rank.rank if rank.rank >= 0 else None,
        Attribute.RANK_JOB: rank.job or None,
    }
    known = {name: value for name, value in everything.items() if value is not None}
    record = build_record(event_name, known, severity, summary, wall_ns)
    return build_logs(resource, [record], str(Scope.COLLECTIVES))


def read_about(
    attributes: Mapping[str, structs.Value], resource: Mapping[str, structs.Value], what: str
) -> tuple[str, Rank]:
    """The episode's id and the worker.

    Args:
        attributes: The record's.
        resource: That of the sender.
        what: What the record is, for messages.

    Raises:
        BadDataError: One of them is missing or makes no sense.
    """
    cluster_id, node_id = read_sender(resource, what)
    episode_id = attributes.get(_ID)
    if not isinstance(episode_id, str) or EPISODE_ID.fullmatch(episode_id) is None:
        raise BadDataError(f"{_ID} is {episode_id!r:.60}; 16 hexadecimal digits")
    rank = read_small(attributes.get(Attribute.RANK, -1))
    job = read_text(attributes.get(Attribute.RANK_JOB)) or ""
    if rank is None or not -1 <= rank < MAX_RANK or len(job) > MAX_ID_LENGTH:
        raise BadDataError(f"{Attribute.RANK} is {attributes.get(Attribute.RANK)!r:.60}")
    return episode_id, Rank(cluster_id, node_id, rank, job=job)
