"""NVSentinel: a health event about the node, and another one that says that it is well again.

NVSentinel's platform connector takes events over gRPC and decides itself what they mean: one to be stored changes
nothing; one to be acted on becomes a condition of the node, and by the site's rules a cordon, a drain and a repair. A
caller that names other nodes than its own needs a token of a service account that NVSentinel lists as
``crossNodeServiceAccounts``; without one the connector refuses it, or takes it for its own node's.

Source: NVIDIA/NVSentinel, data-models/protobufs/health_event.proto and docs/configuration/authentication.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from ingero.errors import BadDataError, PermanentError, RetryableError
from ingero.header_values import read_bearer
from ingero.model.collectives import Rank
from ingero.remediation.actuators.actuator import SETTINGS, describe_worker, write_reason
from ingero.remediation.config import NvsentinelConfig
from ingero.remediation.findings import NodeView
from ingero.remediation.records import ActionRecord
from ingero.units import NS_PER_S
from ingero.wire.protobuf import declare_messages

METHOD: Final = "/datamodels.PlatformConnector/HealthEventOccurredV1"
AGENT: Final = "ingero"
CHECK: Final = "IngeroCulprit"
"""The name of the check, which NVSentinel makes the type of the node's condition."""
ERROR_CODE: Final = "INGERO_CULPRIT"
MAX_MESSAGE_CHARS: Final = 500
ACTIONS: Final = {
    "NONE": 0,
    "COMPONENT_RESET": 2,
    "CONTACT_SUPPORT": 5,
    "RUN_FIELDDIAG": 6,
    "RESTART_VM": 15,
    "RESTART_BM": 24,
    "REPLACE_VM": 25,
    "RUN_DCGMEUD": 26,
}
"""NVSentinel's recommended actions by name."""
STRATEGIES: Final = {"execute": 1, "store-only": 2}
MESSAGES: Final = declare_messages(
    "nvsentinel",
    {
        "Timestamp": {"seconds": (1, "int64"), "nanos": (2, "int32")},
        "Entity": {"entityType": (1, "string"), "entityValue": (2, "string")},
        "Metadata": {"key": (1, "string"), "value": (2, "string")},
        "HealthEvent": {
            "version": (1, "uint32"),
            "agent": (2, "string"),
            "componentClass": (3, "string"),
            "checkName": (4, "string"),
            "isFatal": (5, "bool"),
            "isHealthy": (6, "bool"),
            "message": (7, "string"),
            "recommendedAction": (8, "int32"),
            "errorCode": (9, "*string"),
            "entitiesImpacted": (10, "*Entity"),
            "metadata": (11, "*Metadata"),
            "generatedTimestamp": (12, "Timestamp"),
            "nodeName": (13, "string"),
            "processingStrategy": (16, "int32"),
        },
        "HealthEvents": {"version": (1, "uint32"), "events": (2, "*HealthEvent")},
    },
)
_PASSING: Final = frozenset({
    grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN,
})  # fmt: skip


class NvsentinelActuator:
    """A platform connector.

    Args:
        config: Which.
        read_wall_ns: The time, for the event.

    Attributes:
        settings: As a second event must have them, to be about the same fault.
    """

    kind = "nvsentinel"
    can_read_nodes = False

    def __init__(self, config: NvsentinelConfig, read_wall_ns: Callable[[], int]) -> None:
        self.settings: Mapping[str, str] = {
            "strategy": config.strategy,
            "component_class": config.component_class,
        }
        self._config = config
        self._read_wall_ns = read_wall_ns

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Nothing: the connector only takes."""
        return {}

    def find_target(self, rank: Rank, _nodes: Mapping[str, NodeView]) -> str:
        """By the table of the policy, else Fleet's name."""
        return self._config.node_names.get(rank.node_id, rank.node_id)

    def watch(self, _targets: Iterable[str]) -> None:
        """Nothing: nobody can look."""

    def apply(self, record: ActionRecord) -> None:
        """Send that the node is not well."""
        message = write_reason(record, describe_worker(record), MAX_MESSAGE_CHARS)
        action = self._config.recommended_action
        event = self._build(record, message, is_healthy=False)
        event.isFatal = action != "NONE"  # as NVSentinel itself derives it
        event.recommendedAction = ACTIONS[action]
        event.errorCode.append(ERROR_CODE)
        self._send(event)

    def rehearse(self, _record: ActionRecord) -> None:
        """Nothing: the connector has no dry run; `strategy: store-only` is one that is stored."""

    def reverse(self, record: ActionRecord) -> None:
        """Send that it is well again."""
        message = write_reason(record, "undone", MAX_MESSAGE_CHARS)
        # As the first event was, whatever the policy says now: one to be stored alone ends nothing.
        self._send(self._build(record, message, is_healthy=True))

    def _build(self, record: ActionRecord, message: str, *, is_healthy: bool) -> Any:  # noqa: ANN401 - a message of the table
        settings = {**self.settings, **record.evidence.get(SETTINGS, {})}
        event = MESSAGES["HealthEvent"](
            version=1,
            agent=AGENT,
            componentClass=settings["component_class"],
            checkName=CHECK,
            isHealthy=is_healthy,
            message=message,
            nodeName=record.target,
            processingStrategy=STRATEGIES[settings["strategy"]],
        )
        # The same in both events: by node, check and entities the connector knows which fault is over.
        event.entitiesImpacted.add(entityType="NODE", entityValue=record.target)
        for key, value in (("action", record.action_id), ("episode", record.episode)):
            event.metadata.add(key=f"ingero.{key}", value=value)
        now_ns = self._read_wall_ns()
        event.generatedTimestamp.seconds = now_ns // NS_PER_S
        event.generatedTimestamp.nanos = now_ns % NS_PER_S
        return event

    def _send(self, event: Any) -> None:  # noqa: ANN401 - a message of the table
        events = MESSAGES["HealthEvents"](version=1, events=[event])
        target = f"unix:{Path(self._config.socket).absolute()}"
        with grpc.insecure_channel(target, [("grpc.enable_retries", 0)]) as channel:
            call = channel.unary_unary(
                METHOD,
                request_serializer=MESSAGES["HealthEvents"].SerializeToString,
                response_deserializer=None,
            )
            try:
                call(events, timeout=self._config.timeout / NS_PER_S, metadata=self._read_bearer())
            except grpc.RpcError as error:
                code, details = error.code(), error.details()  # it is also a Call
                problem = f"NVSentinel on {self._config.socket}: {code.name}: {details:.200}"
                kind = RetryableError if code in _PASSING else PermanentError
                raise kind(problem) from error

    def _read_bearer(self) -> tuple[tuple[str, str], ...]:
        """Read for each event, as Kubernetes replaces the token every hour."""
        file = self._config.token_file
        if not file:
            return ()
        try:
            token = read_bearer(Path(file))
        except BadDataError as error:
            raise RetryableError(f"action.nvsentinel.token_file: {error.message}") from error
        return (("authorization", f"Bearer {token}"),)

    def find_jobs(self, _record: ActionRecord) -> None:
        """Jobs are NVSentinel's own business."""

    def requeue(self, job: str) -> None:
        """Never asked."""
        raise PermanentError(f"job {job} cannot be requeued by NVSentinel")
