"""The policy's sections for Kubernetes: how its API server is reached, and what is done to a node or to a device."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ingero.config.model import StrictModel
from ingero.config.types import Duration
from ingero.units import parse_duration


class KubernetesAccessConfig(StrictModel):
    """How the API server is reached."""

    kubeconfig: str = Field(
        "",
        description="File; empty takes the pod's service account, else $KUBECONFIG, else ~/.kube/config.",
    )
    context: str = Field("", description="Of the kubeconfig; empty takes its current one.")
    timeout: Duration = Field(parse_duration("10s"), gt=0, description="Of one request.")


class KubernetesConfig(KubernetesAccessConfig):
    """Taint, cordon and condition of nodes through the API server."""

    taint: Literal["NoSchedule", "NoExecute", "PreferNoSchedule", ""] = Field(
        "NoSchedule",
        description="Effect of a taint of our own: NoSchedule keeps new pods away, NoExecute also evicts those that do"
        " not tolerate it; empty sets none.",
    )
    taint_key: str = Field(
        "ingero.io/culprit", min_length=1, description="Its key; its value is the action's id."
    )
    cordon: bool = Field(
        default=False,
        description="Also make the node unschedulable. Undoing takes that back unless somebody has uncordoned and"
        " cordoned the node since; who cordons a node that is cordoned leaves no trace.",
    )
    condition: str = Field(
        "IngeroCulprit",
        description="Type of a condition of the node that says why, for people and other controllers; empty sets none.",
    )
    selector: dict[str, str] = Field(
        default={}, description="Only nodes with these labels are looked at and acted on."
    )
    out_of_service_taints: tuple[str, ...] = Field(
        default=(
            "node.kubernetes.io/*",
            "node.cloudprovider.kubernetes.io/*",
            "ToBeDeletedByClusterAutoscaler",
            "DeletionCandidateOfClusterAutoscaler",
            "karpenter.sh/disrupted",
        ),
        description="Keys of NoSchedule and NoExecute taints by which others have taken a node out; * and ? match.",
    )
    node_names: dict[str, str] = Field(
        default={},
        description="Fleet's node → name of the Node, where neither its name, its kubernetes.io/hostname nor an address"
        " is like it.",
    )

    @model_validator(mode="after")
    def _check_effect(self) -> Self:
        if not (self.taint or self.cordon or self.condition):
            raise ValueError("give at least one of taint, cordon and condition")
        return self


class KubernetesDeviceConfig(KubernetesAccessConfig):
    """A taint of the device that a rank was given by dynamic resource allocation; the node's other devices stay."""

    driver: str = Field(
        "gpu.nvidia.com",
        min_length=1,
        description="Name of the driver whose devices are tainted. A rank whose container has not exactly one of them"
        " is left alone, as it does not say which is its own.",
    )
    effect: Literal["NoSchedule", "NoExecute", "None"] = Field(
        "NoSchedule",
        description="NoSchedule keeps new pods off the device, NoExecute also deletes those that use it and do not"
        " tolerate it; None does neither: Kubernetes only tells how many pods NoExecute would delete.",
    )
    taint_key: str = Field(
        "ingero.io/culprit", min_length=1, description="Its key; its value is the action's id."
    )
    node_names: dict[str, str] = Field(
        default={}, description="Fleet's node → name of the Node, where they differ."
    )
