"""Whose rows these are, and a stable hash of what each row is about; cached, because senders repeat themselves."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from sys import getsizeof
from typing import Any, Final

import msgspec

from ingero.echo.db.deduplication import stable_hash
from ingero.echo.db.writer import EPOCH
from ingero.echo.ingest.limits import CLUSTER_ID, RecordLimits, RefusalReason, RefusedRecordError
from ingero.units import NS_PER_S, NS_PER_US
from ingero.wire.names import Attribute

_OLDEST_NS: Final = (
    946_684_800 * NS_PER_S
)  # 2000-01-01; older times are since boot (agents' nccl points)
_AHEAD_NS: Final = 86_400 * NS_PER_S
_CACHE_BYTES: Final = 64 << 20
_ENTRY_BYTES: Final = 800
_PAIR_BYTES: Final = 160
"""What an entry and each of its attributes take beside their texts, rounded up (CPython 3.11)."""
_INT64: Final = 2**63

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
        problem: Why nothing of it can be kept; empty where it can.
    """

    cluster_id: str
    node_id: str
    host: str | None
    hash: int
    attributes: Mapping[str, Any]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class OriginSeries:
    """What points of one origin with one name and attributes have in common.

    Attributes:
        hash: Stable 64-bit hash of cluster, origin, name and attributes: no tenant's row has another's hash.
        attributes: JSON object with sorted keys.
        cluster_id: The origin's, else the point's own label.
        node_id: The origin's, else the point's own label, else the host that sent it.
    """

    hash: int
    attributes: str
    cluster_id: str
    node_id: str


class Origins:
    """The series that were met, for every receiving thread; starts over when it holds too many bytes.

    Args:
        limits: What a resource and a point may hold.
        max_bytes: Bound on memory.
    """

    def __init__(self, limits: RecordLimits, max_bytes: int = _CACHE_BYTES) -> None:
        self.limits = limits
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._series: dict[tuple[Any, ...], OriginSeries] = {}
        self._n_bytes = 0

    @property
    def n_bytes(self) -> int:
        """Bytes held, about."""
        return self._n_bytes

    def read(self, resource: Mapping[str, Any]) -> Origin:
        """Read a resource's attributes."""
        return read_origin(resource, self.limits)

    def series(
        self,
        origin: Origin,
        name: str,
        attributes: Mapping[str, Any],
        hint: str,
        limit_bytes: int = 0,
    ) -> OriginSeries:
        """The series of a point.

        Args:
            origin: Its resource.
            name: Metric or event name.
            attributes: The point's own.
            hint: Cluster that the request named, for resources that name none.
            limit_bytes: Most bytes of its attributes; 0 is what points may have.

        Raises:
            RefusedRecordError: It, or its resource, holds more than may be kept, or names no possible cluster.
        """
        if origin.problem:
            raise RefusedRecordError(RefusalReason.SIZE, origin.problem)
        kinds = map(type, attributes.values())  # True, 1 and 1.0 are equal and not the same
        key = (origin.hash, name, hint, *attributes.items(), *kinds)
        try:
            found = self._series.get(key)
        except TypeError:  # a list or map among the values
            return self._build(origin, name, attributes, (hint, limit_bytes))
        if found is None:
            found = self._build(origin, name, attributes, (hint, limit_bytes))
            self._keep(key, found, len(attributes))
        return found

    def _build(
        self,
        origin: Origin,
        name: str,
        attributes: Mapping[str, Any],
        request: tuple[str, int],
    ) -> OriginSeries:
        hint, limit_bytes = request
        limits = self.limits
        limits.check_name(name, "name")
        encoded = _ENCODER.encode(attributes) if attributes else b"{}"
        limit_bytes = limit_bytes or limits.attributes_bytes
        if excess := limits.find_excess(attributes, len(encoded), limit_bytes):
            raise RefusedRecordError(RefusalReason.SIZE, excess)
        cluster_id = origin.cluster_id or _text(attributes.get(_POINT_CLUSTER)) or hint
        node_id = (
            origin.node_id
            or _text(attributes.get(_POINT_NODE))
            or _text(attributes.get(_NODE))
            or origin.host
            or ""
        )
        check_who(cluster_id, node_id, limits)
        own = origin.hash.to_bytes(8, "little")
        return OriginSeries(
            hash=stable_hash(cluster_id.encode(), own, name.encode(), encoded),
            attributes=encoded.decode(),
            cluster_id=cluster_id,
            node_id=node_id,
        )

    def _keep(self, key: tuple[Any, ...], series: OriginSeries, n_attributes: int) -> None:
        n_bytes = _ENTRY_BYTES + _PAIR_BYTES * n_attributes + 2 * getsizeof(series.attributes)
        with self._lock:
            if self._n_bytes + n_bytes > self._max_bytes:
                self._series.clear()
                self._n_bytes = 0
            self._series[key] = series
            self._n_bytes += n_bytes


def check_who(cluster_id: str, node_id: str, limits: RecordLimits) -> None:
    """Refuse a cluster that no question could name; a row without one is the operators'.

    Raises:
        RefusedRecordError: The cluster or the node has no possible name.
    """
    if cluster_id and CLUSTER_ID.fullmatch(cluster_id) is None:
        raise RefusedRecordError(
            RefusalReason.CLUSTER,
            f"cluster {cluster_id!r:.80}; 1 to 64 of letters, digits, dot, dash and underscore are taken",
        )
    limits.check_name(node_id, "node's name")


def read_origin(resource: Mapping[str, Any], limits: RecordLimits) -> Origin:
    """Read a resource's attributes."""
    encoded = _ENCODER.encode(resource) if resource else b"{}"
    problem = limits.find_excess(resource, len(encoded), limits.attributes_bytes)
    if problem:
        return Origin("", "", None, 0, {}, f"a resource with {problem}")
    k8s_node = _text(resource.get(_K8S_NODE))
    host = _text(resource.get(_HOST)) or k8s_node
    return Origin(
        cluster_id=_text(resource.get(_CLUSTER)),
        node_id=_text(resource.get(_NODE)),
        host=host or None,
        hash=stable_hash(encoded),
        attributes=resource,
    )


def encode_attributes(attributes: Mapping[str, Any]) -> str:
    """JSON object with sorted keys; bytes become base64, non-finite numbers null."""
    return _ENCODER.encode(attributes).decode() if attributes else "{}"


def row_ns(time_ns: int) -> int:
    """The time that tells a row from others of its series, as sent; 0 where none was sent, for `date_rows`.

    Raises:
        RefusedRecordError: It is beyond 64 bits with a sign, which is the year 2262.
    """
    if time_ns >= _INT64:
        raise RefusedRecordError(
            RefusalReason.TIME, f"time {time_ns}, which is after the year 2262"
        )
    return time_ns


def plausible_ns(time_ns: int, now_ns: int) -> int:
    """The sender's time, or ours where theirs cannot be: absent, before 2000 or a day ahead."""
    return time_ns if _OLDEST_NS <= time_ns <= now_ns + _AHEAD_NS else now_ns


def to_timestamp(wall_ns: int) -> datetime:
    """UTC without a zone, as the store keeps it; microseconds."""
    return EPOCH + timedelta(microseconds=wall_ns // NS_PER_US)


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
