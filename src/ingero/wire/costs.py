"""What waiting cost since the last report: one OTLP log record per charge.

``docs/specs/cost.md`` is the specification. This module is the only place that knows the names on the wire: Fleet
builds with it and Echo reads with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingero.otlp.codec import Export, LogRow, structs
from ingero.wire.log_records import LogFacts, LogSeverity, build_fleet_logs, build_record, last_word
from ingero.wire.names import Attribute
from ingero.wire.record_uids import RECORD_UID, build_record_uid
from ingero.wire.typed import read_number, read_small, read_text

COST_EVENT: Final = "ingero.cost"
_GPU_SECONDS: Final = "ingero.cost.gpu_seconds"
_ATTRIBUTED: Final = "ingero.cost.attributed"
_VICTIM_NODE_ID: Final = "ingero.cost.victim_node_id"
_AMOUNT: Final = "ingero.cost.amount"
_CURRENCY: Final = "ingero.cost.currency"
MAX_CHARGE: Final = 1e15
"""Largest amount of a charge, in GPU-seconds or in money, either sign; a sum of any number of them is finite."""
CHARGED: Final = "charged"
UNATTRIBUTED: Final = "unattributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRecord:
    """What one record says. Its cluster is the resource's.

    A record of another sender may leave out anything; empty and None are "not known".

    Attributes:
        gpu_seconds: Growth of the waiting times the GPUs that waited; negative for a charge that is taken back.
        attributed: `CHARGED` to a node, or `UNATTRIBUTED`.
        node_id: Who is charged; empty where no node is.
        rank: The charged global rank; None when unknown.
        victim_node_id: Who waited; empty for several nodes of one hardware.
        provider: Of the GPUs that waited.
        gpu_model: Of the GPUs that waited.
        amount: The same in money, in ``currency``; None where no price is known.
        currency: Of ``amount``.
        summary: The body: one line for a person.
    """

    gpu_seconds: float | None = None
    attributed: str = ""
    node_id: str = ""
    rank: int | None = None
    victim_node_id: str = ""
    provider: str = ""
    gpu_model: str = ""
    amount: float | None = None
    currency: str = ""
    summary: str = ""


def build_cost_records(cluster_id: str, costs: Sequence[CostRecord], wall_ns: int) -> Export:
    """The records of one cluster as a logs export, all of one time."""
    return build_fleet_logs({
        cluster_id: [_build_record(cluster_id, cost, wall_ns) for cost in costs]
    })


def _build_record(cluster_id: str, cost: CostRecord, wall_ns: int) -> structs.LogRecord:
    named: dict[str, Any] = {
        _GPU_SECONDS: cost.gpu_seconds,
        _ATTRIBUTED: cost.attributed or None,
        Attribute.NODE_ID: cost.node_id or None,
        _VICTIM_NODE_ID: cost.victim_node_id or None,
        Attribute.PROVIDER: cost.provider or None,
        Attribute.GPU_MODEL: cost.gpu_model or None,
        Attribute.RANK: cost.rank,
        _AMOUNT: cost.amount,
        _CURRENCY: cost.currency or None,
    }
    attributes = {name: value for name, value in named.items() if value is not None}
    attributes[RECORD_UID] = build_record_uid(
        COST_EVENT,
        cluster_id,
        cost.node_id,
        cost.rank,
        cost.victim_node_id,
        cost.provider,
        cost.gpu_model,
        wall_ns,
    )
    return build_record(COST_EVENT, attributes, LogSeverity.INFO, cost.summary, wall_ns)


def is_cost(event_name: str) -> bool:
    """Whether a record of this event name is a cost, of any sender."""
    return last_word(event_name) == last_word(COST_EVENT)


def read_cost(record: LogRow) -> CostRecord:
    """Read a record of which `is_cost` is true; what is missing, mistyped or too large is left out, nothing raises."""
    facts = LogFacts(record.attributes)
    return CostRecord(
        gpu_seconds=_read_charge(facts.find(_GPU_SECONDS)),
        attributed=read_text(facts.find(_ATTRIBUTED)) or "",
        node_id=read_text(facts.find(Attribute.NODE_ID, "node_id")) or "",
        rank=read_small(facts.find(Attribute.RANK)),
        victim_node_id=read_text(facts.find(_VICTIM_NODE_ID)) or "",
        provider=read_text(facts.find(Attribute.PROVIDER)) or "",
        gpu_model=read_text(facts.find(Attribute.GPU_MODEL)) or "",
        amount=_read_charge(facts.find(_AMOUNT)),
        currency=read_text(facts.find(_CURRENCY)) or "",
        summary=read_text(facts.find("summary")) or read_text(record.body) or "",
    )


def _read_charge(value: object) -> float | None:
    number = read_number(value)
    return None if number is None or abs(number) > MAX_CHARGE else number
