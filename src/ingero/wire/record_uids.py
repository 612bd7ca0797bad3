"""The id of a log record, by which a receiver drops one that comes again.

``docs/specs/record-uid.md`` is the specification. The attribute is OpenTelemetry's: "If an id is provided, other log
records with the same id will be considered duplicates and can be removed safely."

Source: OpenTelemetry semantic conventions, "General logs attributes", ``log.record.uid``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

from ingero.otlp.codec import structs
from ingero.wire.names import MAX_ID_LENGTH

RECORD_UID: Final = "log.record.uid"
_UID_BYTES: Final = 16


def build_record_uid(event_name: str, cluster_id: str, *facts: str | float | None) -> str:
    """The id of a record, the same in every process.

    Args:
        event_name: The record's.
        cluster_id: Of its resource.
        facts: What tells it from every other record of this event and cluster, in the order of the specification.

    Returns:
        32 hexadecimal digits.
    """
    said = json.dumps([event_name, cluster_id, *facts], separators=(",", ":"))
    return blake2b(said.encode(), digest_size=_UID_BYTES).hexdigest()


def read_record_uid(attributes: Mapping[str, structs.Value]) -> str:
    """The id of a record of any sender; empty where it has none, or one that is no text of up to `MAX_ID_LENGTH`."""
    uid = attributes.get(RECORD_UID)
    return uid if isinstance(uid, str) and len(uid) <= MAX_ID_LENGTH else ""
