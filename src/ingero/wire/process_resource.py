"""Where a process runs, as OpenTelemetry's resource attributes: its pod, its container, its step of a Slurm job.

Agents put them on the resource of what they push about a process. Fleet keeps the latest of each worker and puts them
on what it concludes, so that the reader of a verdict finds the pod or the job without asking the node.

Names of Kubernetes and containers are the semantic conventions' (opentelemetry.io/docs/specs/semconv/resource, k8s and
container). They have none for Slurm and for the devices of a container: ``slurm.*``, after ``k8s.*``, and
``ingero.device.ids`` are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from ingero.otlp.codec import structs

ProcessResource: TypeAlias = tuple[tuple[str, str], ...]
"""Names and values of `ResourceKey`, sorted by name; what is not known is left out."""
MAX_CHARS: Final = 256
MAX_DEVICES_CHARS: Final = 4096
"""Some 70 devices by their UUIDs."""


class ResourceKey(StrEnum):
    """Attributes that say where a process runs."""

    K8S_NAMESPACE_NAME = "k8s.namespace.name"
    K8S_POD_NAME = "k8s.pod.name"
    K8S_POD_UID = "k8s.pod.uid"
    K8S_CONTAINER_NAME = "k8s.container.name"
    CONTAINER_ID = "container.id"
    DEVICE_IDS = "ingero.device.ids"  # of the container, as CDI names devices, with commas between
    SLURM_JOB_ID = "slurm.job.id"
    SLURM_STEP_ID = "slurm.step.id"  # a number, or batch, extern, interactive
    SLURM_NODE_NAME = "slurm.node.name"  # Slurm's name of the node, not always its host name


_KEYS: Final = tuple(sorted(str(key) for key in ResourceKey))
_LIMITS: Final = {**dict.fromkeys(_KEYS, MAX_CHARS), str(ResourceKey.DEVICE_IDS): MAX_DEVICES_CHARS}


def join_devices(devices: Iterable[str]) -> str:
    """Devices as the value of `ResourceKey.DEVICE_IDS`; of more than fit the first, whole."""
    text = ",".join(sorted(devices))
    return (
        text if len(text) <= MAX_DEVICES_CHARS else text[: MAX_DEVICES_CHARS + 1].rpartition(",")[0]
    )


def read_process_resource(attributes: Mapping[str, structs.Value]) -> ProcessResource:
    """Those of a resource's or a record's attributes that say where a process runs.

    A value that is no text, empty or longer than 256 characters (devices: 4096) is left out: where a process runs is
    said beside what is judged, and nothing is judged by it.
    """
    found = ((key, attributes.get(key)) for key in _KEYS)
    return tuple(
        (key, value)
        for key, value in found
        if isinstance(value, str) and 0 < len(value) <= _LIMITS[key]
    )
