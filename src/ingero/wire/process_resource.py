"""Where a process runs, as OpenTelemetry's resource attributes: its pod, its container, its step of a Slurm job.

Agents put them on the resource of what they push about a process. Fleet keeps the latest of each worker and puts them
on what it concludes, so that the reader of a verdict finds the pod or the job without asking the node.

Names of Kubernetes and containers are the semantic conventions' (opentelemetry.io/docs/specs/semconv/resource, k8s and
container). They have none for Slurm; ``slurm.*`` is ours, after ``k8s.*``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeAlias

from ingero.otlp.codec import structs

ProcessResource: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values of `ResourceKey`, sorted by name; what is not known is left out."""
_MAX_CHARS: Final = 256


class ResourceKey(StrEnum):
    """Attributes that say where a process runs."""

    K8S_NAMESPACE_NAME = "k8s.namespace.name"
    K8S_POD_NAME = "k8s.pod.name"
    K8S_POD_UID = "k8s.pod.uid"
    CONTAINER_ID = "container.id"
    SLURM_JOB_ID = "slurm.job.id"
    SLURM_STEP_ID = "slurm.step.id"  # a number, or batch, extern, interactive
    SLURM_NODE_NAME = "slurm.node.name"  # Slurm's name of the node, not always its host name


_KEYS: Final = tuple(sorted(str(key) for key in ResourceKey))


def read_process_resource(attributes: Mapping[str, structs.Value]) -> ProcessResource:
    """Those of a resource's or a record's attributes that say where a process runs.

    A value that is no text, empty or longer than 256 characters is left out: where a process runs is said beside what
    is judged, and nothing is judged by it.
    """
    found = ((key, attributes.get(key)) for key in _KEYS)
    return tuple(
        (key, value)
        for key, value in found
        if isinstance(value, str) and 0 < len(value) <= _MAX_CHARS
    )
