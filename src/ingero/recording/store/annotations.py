"""What workloads said of themselves, as a recording holds it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from ingero.model.untrusted import clean
from ingero.recording.store.files import open_recording, store_errors, table_columns
from ingero.recording.store.typed import INT64, Kind, select_typed

_COLUMNS: Final[dict[str, Kind]] = {
    "timestamp": INT64, "labels": str, "pid": INT64, "span_start": INT64, "span_end": INT64,
    "node": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredAnnotation:
    """One annotation.

    Attributes:
        start_ns: From when its labels hold, Unix time; of an instant, when it was said.
        end_ns: Until when; the same for an instant.
        pid: Of which process; 0 is the whole node.
        node: Where.
        labels: What; text of the traced program, made printable.
    """

    start_ns: int
    end_ns: int
    pid: int
    node: str
    labels: dict[str, str]

    def is_about(self, node: str, pid: int) -> bool:
        """Whether it speaks of a process, or of the node that the process is on; of all of a node for pid 0."""
        return self.node == node and (not pid or self.pid in {0, pid})


def read_annotations(path: Path) -> tuple[StoredAnnotation, ...]:
    """Every annotation of a recording that can be read, in time order; none where it has no such table.

    Raises:
        StoreError: The file cannot be read as a recording.
    """
    with open_recording(path) as connection, store_errors(path):
        if not _COLUMNS.keys() <= set(table_columns(connection, "annotations")):
            return ()
        rows, _ = select_typed(connection, "annotations", _COLUMNS, order="timestamp")
    found = []
    for said_ns, labels, pid, start_ns, end_ns, node in rows:
        try:
            decoded = msgspec.json.decode(labels, type=dict[str, str])
        except (msgspec.DecodeError, TypeError):  # damaged, or no text at all
            continue
        span = (start_ns, end_ns) if start_ns and end_ns else (said_ns, said_ns)
        plain = {clean(key): clean(value) for key, value in decoded.items()}
        found.append(StoredAnnotation(*span, pid, clean(node), plain))
    return tuple(found)
