"""Where ranks of a job that stopped moving stand: one OTLP log record per rank and communicator.

``docs/specs/collective-standing.md`` is the specification.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ingero.errors import BadDataError
from ingero.model.collectives import MAX_SEQ, CollectiveOp, Rank
from ingero.model.progress import Ending, RankProgress
from ingero.otlp.codec import Export, build_attributes, read_log_entries, structs
from ingero.wire.collectives import build_rank_logs, read_job
from ingero.wire.log_records import RecordsRead, read_sender
from ingero.wire.names import PROGRESS_EVENT, Attribute
from ingero.wire.process_resource import read_process_resource
from ingero.wire.push import UNKNOWN_RANK

MAX_RECORDS: Final = 16_384
"""Records of one export that are read; those beyond are refused."""
_COMM: Final = re.compile(r"[0-9a-f]{16}")
_MAX_VALUE: Final = 1 << 62
_MAX_RANKS: Final = 1 << 24
_MAX_SIGNAL: Final = 127
_MAX_STATUS: Final = 255


def build_progress_read() -> RecordsRead[RankProgress]:
    """Reads the standings of one logs export."""
    return RecordsRead(_read_record, "standings", MAX_RECORDS)


def build_progress(records: Iterable[RankProgress], wall_ns: int) -> Export:
    """One logs export: a resource per node and place of a process, a record per rank and communicator."""
    return build_rank_logs(((one.rank, _build_record(one, wall_ns)) for one in records), "1")


def _build_record(progress: RankProgress, wall_ns: int) -> structs.LogRecord:
    attributes: dict[str, Any] = {
        Attribute.COLLECTIVE_COMM: progress.comm,
        Attribute.COLLECTIVE_COMM_RANK: progress.comm_rank,
        Attribute.COLLECTIVE_N_RANKS: progress.n_ranks,
        Attribute.PROGRESS_ENTERED: progress.entered,
        Attribute.PROGRESS_OP: progress.op.name.lower(),
        Attribute.PROGRESS_STILL_NS: progress.still_ns,
    }
    if progress.rank.rank != UNKNOWN_RANK:
        attributes[Attribute.RANK] = progress.rank.rank
    if progress.rank.job:
        attributes[Attribute.RANK_JOB] = progress.rank.job
    if progress.left is not None:
        attributes[Attribute.PROGRESS_LEFT] = progress.left
    if progress.is_gone:
        attributes[Attribute.PROGRESS_GONE] = True
    if progress.ending is not None:
        attributes[Attribute.PROGRESS_GONE_NS] = progress.ending.at_ns
        attributes[Attribute.PROGRESS_EXIT_SIGNAL] = progress.ending.signal
        attributes[Attribute.PROGRESS_EXIT_STATUS] = progress.ending.status
    if progress.is_stopped:
        attributes[Attribute.PROGRESS_STOPPED] = True
    return structs.LogRecord(
        observed_time_unix_nano=wall_ns,
        event_name=PROGRESS_EVENT,
        attributes=build_attributes(attributes),
    )


def read_progress(export: Export) -> RecordsRead[RankProgress]:
    """Every standing of a logs export; other log records are passed over."""
    read = build_progress_read()
    read_log_entries(export, {PROGRESS_EVENT: read})
    return read


def _read_record(
    attributes: Mapping[str, structs.Value], resource: Mapping[str, structs.Value]
) -> RankProgress:
    cluster_id, node_id = read_sender(resource, "a standing")
    comm = attributes.get(Attribute.COLLECTIVE_COMM)
    if not isinstance(comm, str) or _COMM.fullmatch(comm) is None:
        raise BadDataError(f"{Attribute.COLLECTIVE_COMM} is {comm!r:.60}; 16 hexadecimal digits")
    n_ranks = _read_int(attributes, Attribute.COLLECTIVE_N_RANKS, (1, _MAX_RANKS))
    entered = _read_int(attributes, Attribute.PROGRESS_ENTERED, (0, MAX_SEQ))
    has_left = Attribute.PROGRESS_LEFT in attributes
    name = str(attributes.get(Attribute.PROGRESS_OP, "")).upper()
    return RankProgress(
        rank=Rank(
            cluster_id,
            node_id,
            _read_int(attributes, Attribute.RANK, (UNKNOWN_RANK, _MAX_RANKS)),
            job=read_job(attributes),
            resource=read_process_resource(resource),
        ),
        comm=comm,
        comm_rank=_read_int(attributes, Attribute.COLLECTIVE_COMM_RANK, (0, n_ranks - 1)),
        n_ranks=n_ranks,
        entered=entered,
        left=_read_int(attributes, Attribute.PROGRESS_LEFT, (0, entered)) if has_left else None,
        op=CollectiveOp.__members__.get(name, CollectiveOp.UNKNOWN),
        still_ns=_read_int(attributes, Attribute.PROGRESS_STILL_NS, (0, _MAX_VALUE)),
        is_gone=attributes.get(Attribute.PROGRESS_GONE) is True,
        ending=_read_ending(attributes),
        is_stopped=attributes.get(Attribute.PROGRESS_STOPPED) is True,
    )


def _read_ending(attributes: Mapping[str, structs.Value]) -> Ending | None:
    if Attribute.PROGRESS_GONE_NS not in attributes:
        return None
    signal_bounds, status_bounds = (0, _MAX_SIGNAL), (0, _MAX_STATUS)
    return Ending(
        _read_int(attributes, Attribute.PROGRESS_GONE_NS, (0, _MAX_VALUE)),
        _read_int(attributes, Attribute.PROGRESS_EXIT_SIGNAL, signal_bounds),
        _read_int(attributes, Attribute.PROGRESS_EXIT_STATUS, status_bounds),
    )


def _read_int(
    attributes: Mapping[str, structs.Value], key: Attribute, bounds: tuple[int, int]
) -> int:
    least, most = bounds
    value = attributes.get(key, UNKNOWN_RANK if key is Attribute.RANK else None)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise BadDataError(f"{key} is {value!r:.60}; an integer from {least} to {most}")
    return value
