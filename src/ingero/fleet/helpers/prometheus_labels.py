"""Which attributes become labels, for the exporters that write to Prometheus and that are read by it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

from pydantic import Field

from ingero.config import StrictModel
from ingero.fleet.helpers.prometheus_names import free_labels

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
    sender: Mapping[str, str], point: Mapping[str, str], own_label: str
) -> SeriesLabels:
    """Labels of a series of which no name stands twice.

    Args:
        sender: Of the sender, const_labels among them.
        point: Of the point; where both have a name, the point's value counts.
        own_label: From `OWN_LABELS`: neither has it afterwards; empty for a kind without one.
    """
    taken = {own_label}
    shown = free_labels(point, taken)
    kept = free_labels(sender, taken)
    return SeriesLabels({name: text for name, text in kept.items() if name not in shown}, shown)
