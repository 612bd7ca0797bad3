"""Which devices the kubelet gave to which container, asked over the node's own socket.

The kubelet's pod-resources API, version 1, method ``List``: gRPC over a Unix socket that root may open. It names pods
and containers, not the ids that cgroups have; the file names of ``/var/log/containers`` have both.

Source: Kubernetes 1.37, k8s.io/kubelet/pkg/apis/podresources/v1/api.proto; Kubernetes documentation, "Device Plugins"
and "Logging Architecture"; the kubelet's log links are ``POD_NAMESPACE_CONTAINER-ID.log``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ingero.errors import UnsupportedError
from ingero.units import NS_PER_S

SERVICE: Final = "v1.PodResourcesLister"
CONTAINER_LOGS: Final = Path("/var/log/containers")
_TIMEOUT_NS: Final = 5 * NS_PER_S
_MAX_ANSWER_BYTES: Final = 16 << 20
"""What the kubelet's own client takes."""
_MAX_NAME_CHARS: Final = 253
_MESSAGES: Final = {
    "ListPodResourcesResponse": {"pod_resources": (1, "*PodResources")},
    "PodResources": {
        "name": (1, "string"),
        "namespace": (2, "string"),
        "containers": (3, "*ContainerResources"),
    },
    "ContainerResources": {
        "name": (1, "string"),
        "devices": (2, "*ContainerDevices"),
        "dynamic_resources": (5, "*DynamicResource"),
    },
    "ContainerDevices": {"resource_name": (1, "string"), "device_ids": (2, "*string")},
    "DynamicResource": {"claim_resources": (4, "*ClaimResource")},
    "ClaimResource": {
        "driver_name": (2, "string"),
        "pool_name": (3, "string"),
        "device_name": (4, "string"),
    },
}


@dataclass(frozen=True, slots=True)
class ContainerDevices:
    """What the kubelet gave to one container.

    Attributes:
        namespace: Of its pod.
        pod: Name of its pod.
        container: Its name in the pod.
        devices: As CDI names devices, such as ``nvidia.com/gpu=GPU-8f…``: the resource and the plug-in's own id, or for
            a claim of dynamic resource allocation the driver and ``POOL/DEVICE``.
    """

    namespace: str
    pod: str
    container: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ContainerName:
    """A container as its log's file name has it."""

    pod: str
    namespace: str
    container: str


def list_containers(socket: Path) -> list[ContainerDevices]:
    """Every container that the kubelet knows, with its devices. Waits for the answer, five seconds at most.

    Raises:
        UnsupportedError: There is no such socket, nobody answers, or grpcio is not installed. That may be over a moment
            later: the kubelet refuses more than a hundred questions a second, and is started again by updates.
    """
    try:
        import grpc  # noqa: PLC0415 - of an extra, and only needed in Kubernetes
    except ImportError as error:
        raise UnsupportedError(
            "asking the kubelet needs the package grpcio", hint="pip install 'ingero[agent]'"
        ) from error
    if not socket.exists():
        raise UnsupportedError(
            f"there is no {socket}",
            hint=f"mount the folder {socket.parent} of the node, or give --kubelet-socket PATH",
        )
    options = [
        ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
        ("grpc.enable_retries", 0),  # the caller's
    ]
    with grpc.insecure_channel(f"unix:{socket.absolute()}", options) as channel:
        ask = channel.unary_unary(
            f"/{SERVICE}/List",
            request_serializer=None,
            response_deserializer=_answer_class().FromString,
        )
        try:
            answer = ask(b"", timeout=_TIMEOUT_NS / NS_PER_S)
        except grpc.RpcError as error:
            code, details = error.code(), error.details()  # it is also a Call
            hint = "is the kubelet running? `ingero check` asks it again"
            raise UnsupportedError(f"{socket}: {code.name}: {details:.200}", hint=hint) from error
    return [
        ContainerDevices(pod.namespace, pod.name, one.name, tuple(_iter_devices(one)))
        for pod in answer.pod_resources
        for one in pod.containers
    ]


def _iter_devices(container: Any) -> Iterator[str]:  # noqa: ANN401 - a message built below
    for given in container.devices:
        yield from (f"{given.resource_name}={one}" for one in given.device_ids)
    for claim in container.dynamic_resources:
        for one in claim.claim_resources:
            yield f"{one.driver_name}={one.pool_name}/{one.device_name}"


def find_container_name(container: str, logs: Path = CONTAINER_LOGS) -> ContainerName | None:
    """A container's pod, namespace and name by its id; None where the node has no such log, or it may not be read."""
    end = f"-{container}.log"
    try:
        with os.scandir(logs) as entries:
            name = next((entry.name for entry in entries if entry.name.endswith(end)), "")
    except OSError:
        return None
    parts = name.removesuffix(end).split("_")  # which no name in Kubernetes contains
    if len(parts) != 3 or not all(0 < len(part) <= _MAX_NAME_CHARS for part in parts):
        return None
    return ContainerName(*parts)


@functools.cache
def _answer_class() -> Any:  # noqa: ANN401 - a class made at run time
    from ingero.wire.protobuf import declare_messages  # noqa: PLC0415 - slow, and only needed in Kubernetes

    return declare_messages("podresources", _MESSAGES)["ListPodResourcesResponse"]
