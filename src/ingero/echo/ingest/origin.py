"""Whose rows these are, and a stable hash of what each row is about; both cached, because senders repeat themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from hashlib import blake2b
from typing import Any, Final

import msgspec

from ingero.echo.db.writer import EPOCH
from ingero.units import NS_PER_S, NS_PER_US
from ingero.wire.names import Attribute

_OLDEST_NS: Final = (
    946_684_800 * NS_PER_S
)  # 2000-01-01; older times are since boot (agents' nccl points)
_AHEAD_NS: Final = 86_400 * NS_PER_S
_CACHED_SERIES: Final = 200_000

_CLUSTER: Final = str(Attribute.CLUSTER_ID)
_NODE: Final = str(Attribute.NODE_ID)
_K8S_NODE: Final = str(Attribute.K8S_NODE_NAME)
_HOST: Final = "host.name"
_POINT_CLUSTER: Final = "cluster_id"
_POINT_NODE: Final = "node_id"

_ENCODER: Final = msgspec.json.Encoder(order="sorted")


@dataclass(frozen=True, slots=True)
class Origin:
    """One resource.

    Attributes:
        cluster_id: ``ingero.cluster.id``; empty when absent.
        node_id: ``ingero.node.id``; empty when absent.
        host: ``host.name``, else the Kubernetes node; None when absent.
        hash: Stable hash of all of the resource's attributes.
        attributes: All of them, as sent.
    """

    cluster_id: str
    node_id: str
    host: str | None
    hash: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    """What points of one origin with one name and attributes have in common.

    Attributes:
        hash: Stable 64-bit hash of origin, name and attributes.
        attributes: JSON object with sorted keys.
        cluster_id: The origin's, else the point's own label.
        node_id: The origin's, else the point's own label, else the host that sent it.
    """

    hash: int
    attributes: str
    cluster_id: str
    node_id: str


class Origins:
    """Caches of one receiving thread; not shared between threads."""

    def __init__(self) -> None:
        self._series: dict[tuple[Any, ...], Series] = {}

    def series(self, origin: Origin, name: str, attributes: Mapping[str, Any], hint: str) -> Series:
        """The series of a point.

        Args:
            origin: Its resource.
            name: Metric or event name.
            attributes: The point's own.
            hint: Cluster that the request named, for resources that name none.
        """
        key = (origin.hash, name, hint, *attributes.items())
        try:
            found = self._series.get(key)
        except TypeError:  # a list or map among the values
            return _build_series(origin, name, attributes, hint)
        if found is None:
            if len(self._series) >= _CACHED_SERIES:
                self._series.clear()
            found = self._series[key] = _build_series(origin, name, attributes, hint)
        return found


def _build_series(origin: Origin, name: str, attributes: Mapping[str, Any], hint: str) -> Series:
    text = encode_attributes(attributes)
    return Series(
        hash=stable_hash(origin.hash.to_bytes(8, "little"), name.encode(), text.encode()),
        attributes=text,
        cluster_id=origin.cluster_id or _text(attributes.get(_POINT_CLUSTER)) or hint,
        node_id=origin.node_id
        or _text(attributes.get(_POINT_NODE))
        or _text(attributes.get(_NODE))
        or origin.host
        or "",
    )


def read_origin(resource: Mapping[str, Any]) -> Origin:
    """Read a resource's attributes."""
    k8s_node = _text(resource.get(_K8S_NODE))
    host = _text(resource.get(_HOST)) or k8s_node
    return Origin(
        cluster_id=_text(resource.get(_CLUSTER)),
        node_id=_text(resource.get(_NODE)),
        host=host or None,
        hash=stable_hash(encode_attributes(resource).encode()),
        attributes=resource,
    )


def encode_attributes(attributes: Mapping[str, Any]) -> str:
    """JSON object with sorted keys; bytes become base64, non-finite numbers null."""
    return _ENCODER.encode(attributes).decode() if attributes else "{}"


def stable_hash(*parts: bytes) -> int:
    """64 bits that are the same in every process."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def plausible_ns(time_ns: int, now_ns: int) -> int:
    """The sender's time, or ours where theirs cannot be: absent, before 2000 or a day ahead."""
    return time_ns if _OLDEST_NS <= time_ns <= now_ns + _AHEAD_NS else now_ns


def to_timestamp(wall_ns: int) -> datetime:
    """UTC without a zone, as the store keeps it; microseconds."""
    return EPOCH + timedelta(microseconds=wall_ns // NS_PER_US)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
