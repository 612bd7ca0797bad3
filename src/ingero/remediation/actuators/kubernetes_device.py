"""Kubernetes: a taint of one device of a node, by a ``DeviceTaintRule`` of our own.

Which device a rank was given is said by its node's kubelet (`ingero.agent.capture.discover.pod_resources`) as
``DRIVER=POOL/DEVICE``, the three names by which a rule selects a device. A rule is one object per action, so that a
list tells whose it is, and reversing deletes that alone, as long as nobody has changed it: Kubernetes counts changes of
its spec in ``metadata.generation``.

Source: Kubernetes 1.37, resource.k8s.io/v1 (`DeviceTaintRule`, `ResourceSlice`), and "Device Taints and Tolerations" of
its documentation. The rule is v1alpha3 in 1.33 to 1.35 and v1beta2 in 1.36, both off by default, and v1 from 1.37; the
effect None is not known to 1.33 and 1.34.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lightkube.generic_resource import GenericGlobalResource, create_global_resource

from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.actuator import (
    NO_SETTINGS,
    describe_worker,
    find_mark,
    find_name,
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
    delete_unchanged,
    is_missing,
    name_request,
)
from ingero.remediation.findings import NodeView
from ingero.remediation.kubernetes_config import KubernetesDeviceConfig
from ingero.remediation.records import ActionRecord
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S
from ingero.wire.process_resource import ResourceKey

GROUP: Final = "resource.k8s.io"
_RULES: Final = tuple(
    create_global_resource(GROUP, version, "DeviceTaintRule", "devicetaintrules")
    for version in ("v1", "v1beta2", "v1alpha3")
)
_SLICES: Final = tuple(
    create_global_resource(GROUP, version, "ResourceSlice", "resourceslices")
    for version in ("v1", "v1beta2")
)
_NOT_SERVED: Final = (
    "this Kubernetes does not serve {what}: it needs 1.37, or an older one with the feature gates and API versions of"
    " device taints on; nothing is acted on"
)
_KEEPS_PODS_AWAY: Final = frozenset({"NoSchedule", "NoExecute"})
_SLICES_AGE_NS: Final = 60 * NS_PER_S
"""How long the list of devices is kept between polls. It is large, and changes as drivers start; before an action the
devices of its node are read again."""


@dataclass(frozen=True, slots=True)
class NodeDevice:
    """One device of a node.

    Attributes:
        driver: Its driver.
        pool: Its pool.
        name: Its name in the pool.
        node: The node that has it.
        taints: Effects and keys of the taints that its driver gave it, as far as they keep pods away.
    """

    driver: str
    pool: str
    name: str
    node: str = ""
    taints: tuple[str, ...] = field(default=(), compare=False)

    @property
    def target(self) -> str:
        """As the journal names it."""
        return f"{self.driver}/{self.pool}/{self.name}"


def find_devices(rank: Rank, driver: str) -> tuple[str, ...]:
    """Targets of the devices of a driver that the rank's container was given."""
    given = dict(rank.resource).get(ResourceKey.DEVICE_IDS, "").split(",")
    pairs = (one.partition("=") for one in given)
    return tuple(f"{driver}/{name}" for of, _, name in pairs if of == driver and "/" in name)


class KubernetesDeviceActuator:
    """The devices of one driver in one Kubernetes cluster.

    Args:
        config: How.
        clock: Says how old the list of devices is.

    Raises:
        ConfigError: There is no kubeconfig, it cannot be read, or it has no such context.
    """

    kind = "kubernetes_device"
    can_read_nodes = True
    settings = NO_SETTINGS

    def __init__(self, config: KubernetesDeviceConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._client = connect(config, "action.kubernetes_device")
        self._devices: dict[str, NodeDevice] = {}
        self._read_ns: int | None = None

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Every device of the driver that belongs to one node."""
        try:
            rules = self._list(_RULES, "DeviceTaintRule", {})[1]
            now_ns = self._clock.mono_ns()
            if self._read_ns is None or now_ns - self._read_ns >= _SLICES_AGE_NS:
                self._devices = self._read_devices({})
                self._read_ns = now_ns
        except PermanentError as error:
            raise RetryableError(error.message) from error
        return {target: _view(device, rules) for target, device in self._devices.items()}

    def _read_devices(self, fields: Mapping[str, str]) -> dict[str, NodeDevice]:
        wanted = {"spec.driver": self._config.driver, **fields}
        found = self._list(_SLICES, "ResourceSlice", wanted)[1]
        return {device.target: device for device in _iter_devices(found)}

    def _list(
        self, kinds: Iterable[type[GenericGlobalResource]], what: str, fields: Mapping[str, str]
    ) -> tuple[type[GenericGlobalResource], list[GenericGlobalResource]]:
        """All of the newest version that is served, and that version.

        Raises:
            RetryableError: None is served, or the server does not answer.
            PermanentError: The server refused.
        """
        for kind in kinds:
            try:
                with name_request(f"tell {what}s"):
                    wanted: Any = dict(fields)
                    return kind, list(self._client.list(kind, fields=wanted, chunk_size=CHUNK))
            except PermanentError as error:
                if not is_missing(error):
                    raise
        raise RetryableError(_NOT_SERVED.format(what=what))

    def find_target(self, rank: Rank, nodes: Mapping[str, NodeView]) -> str:
        """The device that the rank's container was given, where that is one, and of the rank's own node."""
        given = find_devices(rank, self._config.driver)
        if len(given) != 1 or given[0] not in nodes:
            return ""
        node = self._devices[given[0]].node
        named = find_name(rank.node_id, {node}, {}, self._config.node_names)
        return given[0] if named == node else ""

    def watch(self, _targets: Iterable[str]) -> None:
        """Nothing: each look asks for every rule, and `apply` for the devices of its node."""

    def apply(self, record: ActionRecord) -> None:
        """Write the action's rule."""
        self._apply(record, is_rehearsal=False)

    def rehearse(self, record: ActionRecord) -> None:
        """The same request as a dry run: the server checks rights, fields and admission, and stores nothing."""
        self._apply(record, is_rehearsal=True)

    def _apply(self, record: ActionRecord, *, is_rehearsal: bool) -> None:
        kind, rules = self._list(_RULES, "DeviceTaintRule", {})
        known = self._devices.get(record.target)
        devices = self._read_devices({"spec.nodeName": known.node}) if known else {}
        device = devices.get(record.target)
        if device is None:
            raise PermanentError(f"there is no device {record.target}")
        view = _view(device, rules)
        if view.mark == record.action_id:
            return
        if not view.in_service:
            raise PermanentError(f"{view.name} is out of service already: {view.state}")
        rule = kind.from_dict(self._build_rule(record, device))
        with name_request("write a DeviceTaintRule"):
            self._client.create(rule, field_manager=FIELD_MANAGER, dry_run=is_rehearsal)

    def _build_rule(self, record: ActionRecord, device: NodeDevice) -> dict[str, Any]:
        config = self._config
        message = write_reason(record, describe_worker(record), MAX_MESSAGE_CHARS)
        return {
            "metadata": {
                "name": _rule_name(record.action_id),
                "labels": {"app.kubernetes.io/managed-by": FIELD_MANAGER},
                "annotations": {REASON: message},
            },
            "spec": {
                "deviceSelector": {
                    "driver": device.driver,
                    "pool": device.pool,
                    "device": device.name,
                },
                "taint": {
                    "key": config.taint_key,
                    "value": record.action_id,
                    "effect": config.effect,
                },
            },
        }

    def reverse(self, record: ActionRecord) -> None:
        """Delete the action's rule, if nobody has changed what it says."""
        name = _rule_name(record.action_id)
        for _ in range(ATTEMPTS):
            kind, rules = self._list(_RULES, "DeviceTaintRule", {})
            ours = [one for one in rules if _name(one) == name]
            if not ours or _find_action(ours[0]) != record.action_id:
                return
            meta = ours[0]["metadata"]
            try:
                delete_unchanged(self._client, kind, name, meta["uid"], meta["resourceVersion"])
            except ConflictError:
                continue  # Kubernetes writes into its status
            return
        raise RetryableError(f"somebody else keeps changing {name}")

    def find_jobs(self, _record: ActionRecord) -> None:
        """Pods are left alone, or deleted by Kubernetes itself where the effect is NoExecute."""

    def requeue(self, job: str) -> None:
        """Never asked."""
        raise PermanentError(f"job {job} cannot be requeued through Kubernetes")


def _rule_name(action_id: str) -> str:
    return f"ingero-{action_id}"


def _name(rule: Mapping[str, Any]) -> str:
    return str(rule["metadata"]["name"])


def _find_action(rule: Mapping[str, Any]) -> str:
    """The action that a rule was written by; empty for one of somebody else, or that somebody has changed since."""
    meta = rule["metadata"]
    action_id = find_mark((meta.get("annotations") or {}).get(REASON, ""))
    is_ours = meta["name"] == _rule_name(action_id) and meta.get("generation", 1) == 1
    return action_id if is_ours else ""


def _selects(rule: Mapping[str, Any], device: NodeDevice) -> bool:
    """Whether a rule is about a device. What Kubernetes 1.33 and 1.34 select by besides is taken as fitting."""
    selector = rule["spec"].get("deviceSelector")
    if selector is None:
        return False
    names = {"driver": device.driver, "pool": device.pool, "device": device.name}
    return all(selector.get(key) in {None, name} for key, name in names.items())


def _view(device: NodeDevice, rules: Iterable[Mapping[str, Any]]) -> NodeView:
    problems, mark, reason = list(device.taints), "", ""
    for rule in rules:
        if not _selects(rule, device):
            continue
        action_id = _find_action(rule)
        if action_id:
            mark, reason = action_id, rule["metadata"]["annotations"][REASON]
        elif rule["spec"]["taint"]["effect"] in _KEEPS_PODS_AWAY:
            problems.append(f"DeviceTaintRule {_name(rule)}")
    return NodeView(
        device.target,
        in_service=not problems and not mark,
        state=", ".join(problems) or ("Tainted" if mark else "Ready"),
        mark=mark,
        reason=reason,
        node=device.node,
    )


def _iter_devices(slices: Iterable[Mapping[str, Any]]) -> Iterator[NodeDevice]:
    """Devices of one node each, by the newest generation of each pool."""
    specs = [one["spec"] for one in slices if one["spec"].get("nodeName")]
    newest: dict[tuple[str, str], int] = {}
    for spec in specs:
        key = (spec["driver"], spec["pool"]["name"])
        newest[key] = max(spec["pool"]["generation"], newest.get(key, 0))
    for spec in specs:
        pool = spec["pool"]
        if pool["generation"] < newest[spec["driver"], pool["name"]]:
            continue
        for one in spec.get("devices") or ():
            taints = tuple(
                f"{taint['key']}:{taint['effect']}"
                for taint in one.get("taints") or ()
                if taint["effect"] in _KEEPS_PODS_AWAY
            )
            yield NodeDevice(spec["driver"], pool["name"], one["name"], spec["nodeName"], taints)
