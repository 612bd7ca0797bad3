"""What the log records of Fleet's conclusions share: resource, scope, severity, and how one of any sender is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final, Generic, TypeVar

from ingero.errors import BadDataError
from ingero.otlp.codec import (
    Export,
    LogEntry,
    build_attributes,
    build_logs,
    merge_exports,
    structs,
)
from ingero.otlp.names import Signal
from ingero.wire.names import Attribute

FLEET_SCOPE: Final = "ingero.fleet"
"""Instrumentation scope of what Fleet concludes."""
FLEET_SERVICE: Final = "ingero-fleet"
RecordT = TypeVar("RecordT")
ReadRecord = Callable[[Mapping[str, structs.Value], Mapping[str, structs.Value]], RecordT]
"""Makes something of a record's attributes and its resource's; raises BadDataError."""


class LogSeverity(IntEnum):
    """The lowest OTLP severity number of each range; the name is the severity text.

    Source: OpenTelemetry specification, Logs Data Model, "Field: SeverityNumber".
    """

    DEBUG = 5
    INFO = 9
    WARN = 13
    ERROR = 17
    FATAL = 21


@dataclass(slots=True)
class RecordsRead(Generic[RecordT]):
    """What a logs export held of one event; reads one record after the other.

    Attributes:
        read: Reads one.
        what: What the records are, for messages.
        limit: Records that are read; those beyond are refused.
        found: Every record that could be read, in order.
        n_refused: Records that could not; count them.
        first_problem: Why the first of them could not; empty when none was refused.
    """

    read: ReadRecord[RecordT]
    what: str
    limit: int
    found: list[RecordT] = field(default_factory=list)
    n_refused: int = 0
    first_problem: str = ""

    def add(self, entry: LogEntry) -> None:
        """Read one record; one that cannot be read costs only itself."""
        problem = f"more than {self.limit} {self.what} in one export"
        if len(self.found) < self.limit:
            try:
                self.found.append(self.read(entry.attributes, entry.resource))
            except BadDataError as error:
                problem = error.message
            else:
                return
        self.n_refused += 1
        self.first_problem = self.first_problem or problem


def build_record(
    event_name: str,
    attributes: Mapping[str, Any],
    severity: LogSeverity,
    summary: str,
    wall_ns: int,
) -> structs.LogRecord:
    """One record.

    Args:
        event_name: Its event name.
        attributes: In the order of the wire.
        severity: As number and as text.
        summary: The body: one line for a person.
        wall_ns: Time of what happened, and of the observation.

    Raises:
        BadDataError: An attribute is of no type that OTLP has.
    """
    return structs.LogRecord(
        time_unix_nano=wall_ns,
        observed_time_unix_nano=wall_ns,
        severity_number=int(severity),
        severity_text=severity.name,
        event_name=event_name,
        body=structs.AnyValue(string_value=summary),
        attributes=build_attributes(attributes),
    )


def build_fleet_logs(by_cluster: Mapping[str, Sequence[structs.LogRecord]]) -> Export:
    """Records by cluster as one logs export, a resource for each cluster."""
    exports = [
        build_logs(build_fleet_resource(cluster_id), records, FLEET_SCOPE)
        for cluster_id, records in by_cluster.items()
    ]
    if not exports:
        return Export.from_tree(Signal.LOGS, structs.LogsRequest([]))
    return merge_exports(exports)


def build_fleet_resource(cluster_id: str) -> dict[str, str]:
    """The resource of what Fleet concludes about one cluster."""
    return {
        str(Attribute.SERVICE_NAME): FLEET_SERVICE,
        str(Attribute.CLUSTER_ID): cluster_id,
    }


def read_sender(resource: Mapping[str, structs.Value], what: str) -> tuple[str, str]:
    """Cluster and node of an agent's record.

    Args:
        resource: The record's.
        what: What the record is, for messages.

    Raises:
        BadDataError: One of them is missing.
    """
    cluster_id, node_id = resource.get(Attribute.CLUSTER_ID), resource.get(Attribute.NODE_ID)
    if not isinstance(cluster_id, str) or not isinstance(node_id, str) or not node_id:
        raise BadDataError(f"{what} without {Attribute.NODE_ID} and {Attribute.CLUSTER_ID}")
    return cluster_id, node_id


class LogFacts:
    """The attributes of one record, found by our names, else by the last word of the names that other senders use.

    ``acme.straggler.slowdown`` is found where ``slowdown`` is the last word of our name. Of two attributes with one
    last word the later counts.

    Args:
        attributes: The record's own, by name.
    """

    def __init__(self, attributes: Mapping[str, structs.Value]) -> None:
        self._attributes = attributes
        self._by_word: dict[str, structs.Value] | None = None

    def find(self, name: str, *words: str) -> structs.Value:
        """The value of an attribute; None when there is none.

        Args:
            name: Our name of it.
            words: Last words of other senders' names for it, best first; the last word of ``name`` when left out.
        """
        if name in self._attributes:
            return self._attributes[name]
        if self._by_word is None:
            self._by_word = {last_word(name): value for name, value in self._attributes.items()}
        for word in words or (last_word(name),):
            if word in self._by_word:
                return self._by_word[word]
        return None


def last_word(name: str) -> str:
    """What follows the last dot of a name."""
    return name.rpartition(".")[2]
