"""Kubernetes: taint, cordon and condition of a node, through the API server.

An action is written on the node as annotations, in the same request as its taint and its cordon: which action, why, and
what of the node it changed. So a poll tells whose a change is, and reversing takes away that alone. Each of these
requests names the version of the node that it was built from; the server refuses it when somebody else has changed the
node since, and it is built again.

Source: "Taints and Tolerations", "Node Status", "Server-Side Apply" (field management) and "Kubernetes API Concepts"
(resource versions, dry run) of the Kubernetes documentation; seen with an API server 1.20.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Final

import msgspec
from lightkube.models.core_v1 import Node as NodeModel
from lightkube.models.core_v1 import Taint
from lightkube.resources.core_v1 import Node, NodeStatus
from lightkube.types import PatchType

from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.actuator import (
    NO_SETTINGS,
    describe_worker,
    find_mark,
    find_name,
    index_hosts,
    write_reason,
)
from ingero.remediation.actuators.kubernetes_api import (
    ATTEMPTS,
    CHUNK,
    FIELD_MANAGER,
    MAX_MESSAGE_CHARS,
    REASON,
    ConflictError,
    connect,
    is_missing,
    name_request,
)
from ingero.remediation.findings import NodeView
from ingero.remediation.kubernetes_config import KubernetesConfig
from ingero.remediation.records import ActionRecord
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

EFFECTS: Final = "ingero.io/remediation-effects"
"""Annotation: what the action changed, as `Effects.write` has it."""
_HOST_LABEL: Final = "kubernetes.io/hostname"
_HOST_ADDRESSES: Final = frozenset({"Hostname", "InternalDNS"})
_LIST_AGE_NS: Final = 60 * NS_PER_S
"""How long a list of more than one part is kept: 5 000 nodes are some 80 MB."""
_CORDON: Final = "f:unschedulable"
"""The cordon, as the record of who changed a node's fields names it."""
_KEEPS_PODS_AWAY: Final = frozenset({"NoSchedule", "NoExecute"})


class Effects(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an action changes of a node.

    Attributes:
        taint: Key of its taint; empty for none.
        cordon: Whether it makes the node unschedulable.
        condition: Type of its condition; empty for none.
    """

    taint: str = ""
    cordon: bool = False
    condition: str = ""

    def write(self) -> str:
        """As the annotation has it."""
        return msgspec.json.encode(self).decode()


def read_effects(text: str | None) -> Effects:
    """What an annotation says; nothing when somebody wrote something else there."""
    try:
        return msgspec.json.decode(text or "{}", type=Effects)
    except msgspec.MsgspecError:
        return Effects()


class KubernetesActuator:
    """The nodes of one Kubernetes cluster.

    Args:
        config: How.
        clock: The time of a condition, and how old a list is.

    Raises:
        ConfigError: There is no kubeconfig, it cannot be read, or it has no such context.
    """

    kind = "kubernetes"
    can_read_nodes = True
    settings = NO_SETTINGS

    def __init__(self, config: KubernetesConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._of_hosts: dict[str, set[str]] = {}
        self._views: dict[str, NodeView] = {}
        self._watched: set[str] = set()
        self._listed_ns: int | None = None
        self._client = connect(config, "action.kubernetes")
        taint_key = config.taint_key if config.taint else ""
        self._effects = Effects(taint_key, config.cordon, config.condition)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Every node that the policy's selector lets through.

        In a large cluster the list is up to a minute old, but for nodes that bear an action or that a finding is about;
        `apply` reads its node again in any case.
        """
        now_ns = self._clock.mono_ns()
        is_due = self._listed_ns is None or now_ns - self._listed_ns >= _LIST_AGE_NS
        try:
            if is_due or len(self._views) <= CHUNK:
                with name_request("tell its nodes"):
                    labels: Any = dict(self._config.selector)
                    nodes = list(self._client.list(Node, labels=labels, chunk_size=CHUNK))
                self._of_hosts = index_hosts((_name(one), _host_names(one)) for one in nodes)
                self._views = {_name(node): self._view(node) for node in nodes}
                self._listed_ns = now_ns
                self._watched.clear()
            else:
                marked = {name for name, view in self._views.items() if view.mark}
                some = {next(iter(self._views))}  # a server that is away is to be noticed
                for name in self._watched | marked or some:
                    self._read_again(name)
        except PermanentError as error:
            raise RetryableError(error.message) from error
        return dict(self._views)

    def _read_again(self, name: str) -> None:
        try:
            self._views[name] = self._view(self._get(name))
        except PermanentError as error:
            if not is_missing(error):
                raise
            self._views.pop(name, None)

    def _view(self, node: NodeModel) -> NodeView:
        problems = list(_find_problems(node, self._config.out_of_service_taints))
        mark = _find_present(node)
        return NodeView(
            _name(node),
            in_service=not problems and not mark,
            state=", ".join(problems) or ("Tainted" if mark else "Ready"),
            mark=mark,
            reason=_annotations(node).get(REASON, ""),
        )

    def find_target(self, rank: Rank, nodes: Mapping[str, NodeView]) -> str:
        """By the table of the policy, else by the node's name, its host's label or its addresses' names."""
        return find_name(rank.node_id, nodes, self._of_hosts, self._config.node_names)

    def watch(self, targets: Iterable[str]) -> None:
        """Until the next list of all."""
        self._watched.update(targets)

    def apply(self, record: ActionRecord) -> None:
        """Taint and cordon the node in one request, then set its condition."""
        self._apply(record, is_rehearsal=False)

    def rehearse(self, record: ActionRecord) -> None:
        """The same requests as dry runs: the server checks rights and admission, and stores nothing."""
        self._apply(record, is_rehearsal=True)

    def _apply(self, record: ActionRecord, *, is_rehearsal: bool) -> None:
        message = write_reason(record, describe_worker(record), MAX_MESSAGE_CHARS)
        effects = self._effects

        def build(node: NodeModel) -> dict[str, Any] | None:
            if _find_present(node) == record.action_id:
                return None
            view = self._view(node)
            if not view.in_service:
                raise PermanentError(f"{view.name} is out of service already: {view.state}")
            return {
                "metadata": {"annotations": {REASON: message, EFFECTS: effects.write()}},
                "spec": _add_to_spec(node, effects, self._config.taint, record.action_id),
            }

        self._change(record.target, build, is_rehearsal=is_rehearsal)
        # A condition without its taint could make others act; a taint without its condition is only less explained.
        if effects.condition:
            condition = self._build_condition(
                effects.condition, "RankIsCulprit", message, is_set=True
            )
            self._set_condition(record.target, condition, is_rehearsal=is_rehearsal)

    def reverse(self, record: ActionRecord) -> None:
        """Take away what the action's annotations name, as far as it is still there."""
        node = self._get(record.target)
        if not _is_of(node, record.action_id):
            return
        effects = read_effects(_annotations(node).get(EFFECTS))
        if _has_condition(node, effects.condition, record.action_id):
            message = f"action {record.action_id} was undone"
            condition = self._build_condition(
                effects.condition, "ActionUndone", message, is_set=False
            )
            self._set_condition(record.target, condition)

        def build(node: NodeModel) -> dict[str, Any] | None:
            if not _is_of(node, record.action_id):
                return None
            return {
                "metadata": {"annotations": {REASON: None, EFFECTS: None}},
                "spec": _take_from_spec(node, effects, record.action_id),
            }

        self._change(record.target, build)

    def _get(self, name: str) -> NodeModel:
        with name_request("tell a node"):
            node = self._client.get(Node, name)
        if _name(node) != name:
            raise RetryableError(f"what answers is not Kubernetes' API server: no node {name}")
        return node

    def _change(
        self,
        name: str,
        build: Callable[[NodeModel], dict[str, Any] | None],
        *,
        is_rehearsal: bool = False,
    ) -> None:
        """Patch a node that nobody else changes meanwhile; the builder says None when there is nothing to do."""
        for _ in range(ATTEMPTS):
            node = self._get(name)
            patch = build(node)
            if patch is None:
                return
            assert node.metadata is not None
            patch["metadata"]["resourceVersion"] = node.metadata.resourceVersion
            try:
                with name_request("change a node"):
                    self._client.patch(
                        Node,
                        name,
                        patch,
                        patch_type=PatchType.MERGE,
                        field_manager=FIELD_MANAGER,
                        dry_run=is_rehearsal,
                    )
            except ConflictError:
                continue
            return
        raise RetryableError(f"somebody else keeps changing {name}")

    def _build_condition(
        self, kind: str, reason: str, message: str, *, is_set: bool
    ) -> dict[str, str]:
        now = datetime.fromtimestamp(self._clock.wall_ns() // NS_PER_S, UTC)
        moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "type": kind,
            "status": "True" if is_set else "False",
            "reason": reason,
            "message": message,
            "lastHeartbeatTime": moment,
            "lastTransitionTime": moment,
        }

    def _set_condition(
        self, name: str, condition: dict[str, str], *, is_rehearsal: bool = False
    ) -> None:
        with name_request("set a node's condition"):
            # A strategic patch merges conditions by their type; the kubelet leaves those of others alone.
            self._client.patch(
                NodeStatus,
                name,
                {"status": {"conditions": [condition]}},
                patch_type=PatchType.STRATEGIC,
                field_manager=FIELD_MANAGER,
                dry_run=is_rehearsal,
            )

    def find_jobs(self, _record: ActionRecord) -> None:
        """Pods are left alone, or evicted by Kubernetes itself where the taint is NoExecute."""

    def requeue(self, job: str) -> None:
        """Never asked."""
        raise PermanentError(f"job {job} cannot be requeued through Kubernetes")


def _name(node: NodeModel) -> str:
    return (node.metadata.name if node.metadata else None) or ""


def _annotations(node: NodeModel) -> Mapping[str, str]:
    return (node.metadata.annotations if node.metadata else None) or {}


def _taints(node: NodeModel) -> list[Taint]:
    return list((node.spec.taints if node.spec else None) or [])


def _host_names(node: NodeModel) -> tuple[str, ...]:
    labels = (node.metadata.labels if node.metadata else None) or {}
    addresses = (node.status.addresses if node.status else None) or []
    named = [one.address for one in addresses if one.type in _HOST_ADDRESSES]
    return tuple(one for one in (labels.get(_HOST_LABEL, ""), *named) if one)


def _find_problems(node: NodeModel, patterns: tuple[str, ...]) -> Iterator[str]:
    """Why a node takes no pods, by itself or by others."""
    conditions = (node.status.conditions if node.status else None) or []
    ready = next((one.status for one in conditions if one.type == "Ready"), "Unknown")
    if ready != "True":
        yield "NotReady"
    if node.spec is not None and node.spec.unschedulable:
        yield "SchedulingDisabled"
    if node.metadata is not None and node.metadata.deletionTimestamp is not None:
        yield "Deleting"
    for taint in _taints(node):
        is_other = any(fnmatchcase(taint.key, pattern) for pattern in patterns)
        if is_other and taint.effect in _KEEPS_PODS_AWAY:
            yield taint.key


def _is_of(node: NodeModel, action_id: str) -> bool:
    return find_mark(_annotations(node).get(REASON, "")) == action_id


def _has_condition(node: NodeModel, kind: str, action_id: str) -> bool:
    conditions = (node.status.conditions if node.status else None) or []
    return any(
        one.type == kind and one.status == "True" and find_mark(one.message or "") == action_id
        for one in conditions
    )


def _find_present(node: NodeModel) -> str:
    """The action that the node's annotations name, while what it keeps pods away by is still there.

    A condition keeps none away: it counts alone, where the action was no more than that.
    """
    action_id = find_mark(_annotations(node).get(REASON, ""))
    effects = read_effects(_annotations(node).get(EFFECTS))
    if not (effects.taint or effects.cordon):
        return action_id if _has_condition(node, effects.condition, action_id) else ""
    is_tainted = any(one.key == effects.taint and one.value == action_id for one in _taints(node))
    return action_id if is_tainted or (effects.cordon and _has_own_cordon(node)) else ""


def _has_own_cordon(node: NodeModel) -> bool:
    """Whether the node is unschedulable since we made it so.

    The server keeps who changed a field last; one who uncordons and cordons is that from then on. A server that keeps
    no such record says nothing, and the cordon counts as ours.
    """
    if node.spec is None or not node.spec.unschedulable:
        return False
    records = (node.metadata.managedFields if node.metadata else None) or []
    owners = {
        one.manager for one in records if _CORDON in ((one.fieldsV1 or {}).get("f:spec") or {})
    }
    return not owners or FIELD_MANAGER in owners


def _add_to_spec(
    node: NodeModel, effects: Effects, taint_effect: str, action_id: str
) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if effects.taint:
        kept = [one.to_dict() for one in _taints(node) if one.key != effects.taint]
        spec["taints"] = [
            *kept,
            {"key": effects.taint, "value": action_id, "effect": taint_effect},
        ]
    if effects.cordon:
        spec["unschedulable"] = True
    return spec


def _take_from_spec(node: NodeModel, effects: Effects, action_id: str) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    if effects.taint:
        spec["taints"] = [
            one.to_dict()
            for one in _taints(node)
            if (one.key, one.value) != (effects.taint, action_id)
        ]
    if effects.cordon and _has_own_cordon(node):
        spec["unschedulable"] = None
    return spec
