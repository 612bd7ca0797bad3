"""What an operation takes a worker that is not slow, for its peer's diagnosis: in Fleet's question, and in an answer.

``docs/specs/diagnosis.md`` is the specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.errors import BadDataError
from ingero.model.counters import OTHERS, WorkRates
from ingero.model.diagnosis import PeerWork
from ingero.otlp.codec import Export, structs
from ingero.units import format_duration
from ingero.wire.answers import MAX_RECORDS, build_answer, read_about
from ingero.wire.log_records import LogSeverity, RecordsRead
from ingero.wire.typed import read_text

WORK_EVENT: Final = "ingero.work"
_RATES: Final = "ingero.work.rates"
_MAX_VALUE: Final = float(1 << 62)
_MAX_NICE: Final = 20
_N_FIELDS: Final = 11


def write_rates(rates: WorkRates) -> str:
    """Eleven numbers with commas between them; the quota and the last are empty where there is none."""
    quota = "" if rates.n_processors is None else f"{rates.n_processors:.6g}"
    used = sum(rates.others.values())
    times = (rates.period_ns, rates.own_ns, rates.computing_ns, rates.ready_ns, rates.throttled_ns)
    numbers = [str(rates.n_ops), *(f"{ns:.0f}" for ns in times), quota, f"{used:.6g}"]
    device = "" if rates.device_ns is None else f"{rates.device_ns:.0f}"
    return ",".join((*numbers, str(rates.n_processors_allowed), str(rates.nice), device))


def parse_rates(text: str) -> WorkRates:
    """What `write_rates` wrote, as its peers'.

    Raises:
        ValueError: These are no eleven numbers, or one of them cannot be.
    """
    fields = text.split(",")
    if len(fields) == _N_FIELDS - 1:  # version 1 of the specification has no time in calls of CUDA
        fields.append("")
    if len(fields) != _N_FIELDS:
        raise ValueError(f"{len(fields)} numbers, {_N_FIELDS} make the work of a peer")
    times = [float(field) for field in fields[1:6]]
    quota, used = float(fields[6]) if fields[6] else None, float(fields[7])
    device_ns = float(fields[10]) if fields[10] else None
    n_ops, n_allowed, nice = int(fields[0]), int(fields[8]), int(fields[9])
    for number in (*times, used, quota or 0.0, n_ops, n_allowed, device_ns or 0.0):
        if not 0 <= number < _MAX_VALUE:  # no NaN either
            raise ValueError(f"{number} is no amount")
    if not n_ops or quota == 0.0 or abs(nice) > _MAX_NICE:
        raise ValueError("no operations, no processor or no nice value")
    period_ns, own_ns, computing_ns, ready_ns, throttled_ns = times
    others = {OTHERS: used} if used else {}
    return WorkRates(
        n_ops, period_ns, own_ns, computing_ns, ready_ns, throttled_ns, quota, others, n_allowed, nice,
        is_of_peers=True, device_ns=device_ns,
    )  # fmt: skip


def build_peer_work(work: PeerWork, wall_ns: int) -> Export:
    """The answer as a logs export of the worker's node."""
    computing, ready = (
        format_duration(round(ns)) for ns in (work.rates.computing_ns, work.rates.ready_ns)
    )
    summary = f"an operation: {computing} on a processor, {ready} ready to run and not running"
    found = {_RATES: write_rates(work.rates)}
    return build_answer(
        WORK_EVENT, (work.id, work.rank), found, LogSeverity.DEBUG, summary, wall_ns
    )


def build_peer_work_read() -> RecordsRead[PeerWork]:
    """Reads the answers about work of one logs export."""
    return RecordsRead(_read_record, "answers about work", MAX_RECORDS)


def _read_record(
    attributes: Mapping[str, structs.Value], resource: Mapping[str, structs.Value]
) -> PeerWork:
    episode_id, rank = read_about(attributes, resource, "work")
    text = read_text(attributes.get(_RATES)) or ""
    try:
        rates = parse_rates(text)
    except ValueError as error:
        raise BadDataError(f"{_RATES} is {text!r:.60}: {error}") from error
    return PeerWork(episode_id, rank, rates)
