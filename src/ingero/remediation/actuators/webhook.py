"""A webhook with a signed body, for whatever acts on the other side.

The message's id is the same each time an action is asked for again, so a receiver that has done it can say so without
doing it twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

from ingero.errors import PermanentError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.actuator import NO_SETTINGS
from ingero.remediation.actuators.command import describe_action
from ingero.remediation.findings import NodeView
from ingero.remediation.records import ActionRecord
from ingero.remediation.secret_file import read_secret
from ingero.remediation.signed_posts import build_signed_headers, post_json
from ingero.remediation.webhook_config import SignedWebhookConfig
from ingero.units import NS_PER_S


class WebhookActuator:
    """A receiver of signed requests.

    Args:
        config: Which.
        read_wall_ns: The time, for the signature.

    Raises:
        ConfigError: The secret cannot be used.
    """

    kind = "webhook"
    can_read_nodes = False
    settings = NO_SETTINGS

    def __init__(self, config: SignedWebhookConfig, read_wall_ns: Callable[[], int]) -> None:
        self._url = config.url
        self._secret = read_secret(config.secret_file, "action.webhook.secret_file")
        self._read_wall_ns = read_wall_ns
        self._timeout_s = config.timeout / NS_PER_S

    def read_nodes(self) -> Mapping[str, NodeView]:
        """Nothing: a receiver does not tell."""
        return {}

    def find_target(self, rank: Rank, _nodes: Mapping[str, NodeView]) -> str:
        """Fleet's name."""
        return rank.node_id

    def watch(self, _targets: Iterable[str]) -> None:
        """Nothing: nobody can look."""

    def apply(self, record: ActionRecord) -> None:
        """Ask for the node to be taken out of service."""
        self._post(record, "drain")

    def rehearse(self, _record: ActionRecord) -> None:
        """Nothing: a receiver cannot be asked what it would do."""

    def reverse(self, record: ActionRecord) -> None:
        """Ask for it to be given back."""
        self._post(record, "undo")

    def _post(self, record: ActionRecord, event: str) -> None:
        body = json.dumps(describe_action(record, event)).encode()
        message_id, wall_s = f"{record.action_id}-{event}", self._read_wall_ns() // NS_PER_S
        headers = build_signed_headers(self._secret, message_id, wall_s, body)
        post_json(self._url, body, headers, self._timeout_s)

    def find_jobs(self, _record: ActionRecord) -> None:
        """Jobs are the receiver's own business."""

    def requeue(self, job: str) -> None:
        """Never asked."""
        raise PermanentError(f"job {job} cannot be requeued by a webhook")
