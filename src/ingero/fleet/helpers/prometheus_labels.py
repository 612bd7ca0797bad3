"""Which attributes become labels, for the exporters that write to Prometheus and that are read by it.

Who sends is said by the resource alone: a receiver checks that a token's holder may speak for the cluster named there,
and looks at no point.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from pydantic import Field

from ingero.config import StrictModel
from ingero.fleet.helpers.prometheus_names import build_label_name, build_labels, free_labels
from ingero.wire.names import Attribute

_CLUSTER_LABEL: Final = build_label_name(Attribute.CLUSTER_ID)
SENDER_LABELS: Final = frozenset({
    _CLUSTER_LABEL,
    build_label_name(Attribute.NODE_ID),
    "job",
    "instance",
})
"""Labels that name the sender: a point does not replace them."""
JOB_KEYS: Final = frozenset({"service.name", "service.namespace", "service.instance.id"})
"""Resource attributes that are in ``job`` and ``instance``."""
OWN_LABELS: Final = {"histogram": "le", "exponential_histogram": "le", "summary": "quantile"}
"""Kinds of metrics that have a label of their own in each bucket or quantile, and its name."""


class ResourceLabelsConfig(StrictModel):
    """Which resource attributes become labels; patterns such as ``k8s.*``."""

    included: tuple[str, ...] = Field(
        ("ingero.*",), description="Patterns of resource attributes that become labels."
    )
    excluded: tuple[str, ...] = Field(
        (), description="Patterns that do not, whatever included says."
    )


class ResourceConversionConfig(StrictModel):
    """The Collector's older switch."""

    enabled: bool = Field(default=False, description="Make every resource attribute a label.")


def matches(key: str, patterns: tuple[str, ...]) -> bool:
    """Whether a key fits one of some patterns such as ``k8s.*``."""
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def build_job_labels(attributes: Mapping[str, Any]) -> dict[str, str]:
    """``job`` and ``instance`` as the OpenTelemetry specification derives them; empty when there is no service."""
    labels = {}
    name = label_text(attributes.get("service.name", ""))
    namespace = label_text(attributes.get("service.namespace", ""))
    if name:
        labels["job"] = f"{namespace}/{name}" if namespace else name
    if instance := label_text(attributes.get("service.instance.id", "")):
        labels["instance"] = instance
    return labels


def label_text(value: object) -> str:
    """An attribute's value as that of a label."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | dict):
        return json.dumps(value, default=_bytes_text, separators=(",", ":"))
    return _bytes_text(value) if isinstance(value, bytes) else "" if value is None else str(value)


def _bytes_text(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class SeriesLabels(NamedTuple):
    """Labels of one series, each name in one of both.

    Attributes:
        sender: What it has from its sender.
        point: What it has itself.
    """

    sender: dict[str, str]
    point: dict[str, str]


def settle_labels(
    sender: Mapping[str, str],
    point: Mapping[str, str],
    own_label: str,
    fixed: Collection[str] = SENDER_LABELS,
) -> SeriesLabels:
    """Labels of a series of which no name stands twice.

    Args:
        sender: Of the sender, const_labels among them.
        point: Of the point; where both have a name, the point's value counts.
        own_label: From `OWN_LABELS`: neither has it afterwards; empty for a kind without one.
        fixed: Names of which the sender's value counts, and the point's is shown as ``exported_…``.
    """
    kept = free_labels(sender, {own_label})
    shown = free_labels(point, {own_label, *(name for name in fixed if name in kept)})
    return SeriesLabels({name: text for name, text in kept.items() if name not in shown}, shown)


def build_sender_labels(
    resource: Mapping[str, Any], chosen: ResourceLabelsConfig, *, is_all: bool
) -> dict[str, str]:
    """Labels of every series of a sender.

    Args:
        resource: Its attributes.
        chosen: Which of them become labels, besides ``job`` and ``instance``.
        is_all: All but the excluded ones.
    """
    pairs = (
        _read_pair(key, value)
        for key, value in resource.items()
        if (is_all or matches(key, chosen.included)) and not matches(key, chosen.excluded)
    )
    return build_labels(pairs) | build_job_labels(resource)


def build_target_labels(resource: Mapping[str, Any]) -> dict[str, str]:
    """Labels of ``target_info``: all that a sender says of itself; empty when there is no service."""
    job = build_job_labels(resource)
    if not job:
        return {}
    pairs = (_read_pair(key, value) for key, value in resource.items() if key not in JOB_KEYS)
    return build_labels(pairs) | job


def _read_pair(key: str, value: object) -> tuple[str, str]:
    """A resource's attribute; one that would only look like the cluster, which nobody has checked, has another name."""
    is_cluster = key == Attribute.CLUSTER_ID and isinstance(value, str)
    if not is_cluster and build_label_name(key) == _CLUSTER_LABEL:
        key = f"exported_{_CLUSTER_LABEL}"
    return key, label_text(value)


def build_point_labels(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Labels of a point; where it names a cluster, as ``exported_ingero_cluster_id``, for only a sender has one."""
    labels = build_labels((key, label_text(value)) for key, value in attributes.items())
    return free_labels(labels, {_CLUSTER_LABEL}) if _CLUSTER_LABEL in labels else labels
