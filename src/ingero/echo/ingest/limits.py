"""What one record may hold, and the refusal of one that holds more or holds nonsense: it alone, never its request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from ingero.errors import BadDataError

CLUSTER_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""A cluster's name; what the bearers file and the tools' arguments take, so that what is kept can be asked for."""
_MAX_SHOWN: Final = 3


class RefusalReason(StrEnum):
    """Why a record was refused; a label of a metric, so a closed set."""

    TIME = "time"
    SIZE = "size"
    CLUSTER = "cluster"
    HISTOGRAM = "histogram"
    BATCH = "batch"
    UNREADABLE = "unreadable"
    STORE = "store"
    QUOTA = "quota"


class RefusedRecordError(BadDataError):
    """One record that cannot be kept; the others of its request are.

    Args:
        reason: For the counter.
        message: For the sender.
    """

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class RecordLimits:
    """What one record may hold; everything longer is refused and counted.

    Attributes:
        n_attributes: Attributes of a resource, and of a point, record or span.
        key_chars: Length of an attribute's name, a metric's name and a unit.
        value_chars: Length of an attribute's text, of a node's name and of a span's name.
        attributes_bytes: All attributes of a resource, a point or a span as JSON.
        record_bytes: The same of a log record (a verdict names everybody who waited), and its body.
    """

    n_attributes: int = 128
    key_chars: int = 256
    value_chars: int = 16 << 10
    attributes_bytes: int = 64 << 10
    record_bytes: int = 1 << 20

    def find_excess(self, attributes: Mapping[str, Any], n_bytes: int, limit_bytes: int) -> str:
        """What is too long about attributes whose JSON has ``n_bytes``; empty where nothing is."""
        if len(attributes) > self.n_attributes:
            return f"{len(attributes)} attributes; {self.n_attributes} are taken"
        if n_bytes > self.value_chars or n_bytes > self.key_chars:
            for key, value in attributes.items():
                if len(key) > self.key_chars:
                    return (
                        f"an attribute's name of {len(key)} characters; {self.key_chars} are taken"
                    )
                if isinstance(value, str | bytes) and len(value) > self.value_chars:
                    return f"attribute {key:.80} has {len(value)} characters; {self.value_chars} are taken"
        if n_bytes > limit_bytes:
            return f"attributes of {n_bytes} bytes; {limit_bytes} are taken"
        return ""

    def check_name(self, name: str, what: str) -> None:
        """Refuse a name that is too long.

        Raises:
            RefusedRecordError: It is.
        """
        if len(name) > self.key_chars:
            raise RefusedRecordError(
                RefusalReason.SIZE,
                f"a {what} of {len(name)} characters; {self.key_chars} are taken",
            )


@dataclass(slots=True)
class Refusals:
    """Records of one request that were refused, and why.

    Attributes:
        by_reason: How many, by `RefusalReason`.
        messages: The first reasons in words, each once.
    """

    by_reason: dict[RefusalReason, int] = field(default_factory=dict)
    messages: dict[str, None] = field(default_factory=dict)

    @property
    def n_refused(self) -> int:
        """Records that were refused."""
        return sum(self.by_reason.values())

    def add(self, error: RefusedRecordError) -> None:
        """Note one record."""
        self.add_many(error.reason, 1, error.message)

    def add_many(self, reason: RefusalReason, n_records: int, message: str) -> None:
        """Note records that were refused for one reason."""
        self.by_reason[reason] = self.by_reason.get(reason, 0) + n_records
        if len(self.messages) < _MAX_SHOWN:
            self.messages[message] = None

    def tell(self) -> str:
        """The reasons for the sender; empty where nothing was refused."""
        return "; ".join(self.messages)
