"""A webhook with a signed body, for whatever acts on the other side.

Source: Standard Webhooks 1.0, whose libraries verify it: ``webhook-id``, ``webhook-timestamp`` and ``webhook-signature:
v1,BASE64(HMAC-SHA256(secret, "ID.TIMESTAMP.BODY"))``. The id is the same each time an action is asked for again, so a
receiver that has done it can say so without doing it twice.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final

import httpx

from ingero import __version__
from ingero.errors import PermanentError, RetryableError
from ingero.model.collectives import Rank
from ingero.remediation.actuators.command import describe_action
from ingero.remediation.config import SignedWebhookConfig
from ingero.remediation.findings import NodeView
from ingero.remediation.records import ActionRecord
from ingero.remediation.secret_file import read_secret
from ingero.units import NS_PER_S

_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


def sign(secret: bytes, message_id: str, wall_s: int, body: bytes) -> str:
    """The value of ``webhook-signature``."""
    signed = f"{message_id}.{wall_s}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


class WebhookActuator:
    """A receiver of signed requests.

    Args:
        config: Which.
        read_wall_ns: The time, for the signature.

    Raises:
        ConfigError: The secret cannot be used.
    """

    kind = "webhook"
    can_look = False

    def __init__(self, config: SignedWebhookConfig, read_wall_ns: Callable[[], int]) -> None:
        self._url = config.url
        self._secret = read_secret(config.secret_file, "action.webhook.secret_file")
        self._read_wall_ns = read_wall_ns
        self._timeout_s = config.timeout / NS_PER_S

    def look(self) -> Mapping[str, NodeView]:
        """Nothing: a receiver does not tell."""
        return {}

    def find_target(self, rank: Rank, _nodes: Mapping[str, NodeView]) -> str:
        """Fleet's name."""
        return rank.node_id

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
        headers = {
            "content-type": "application/json",
            "user-agent": f"ingero-remediator/{__version__}",
            "webhook-id": message_id,
            "webhook-timestamp": str(wall_s),
            "webhook-signature": sign(self._secret, message_id, wall_s, body),
        }
        try:
            answer = httpx.post(
                self._url, content=body, headers=headers, timeout=self._timeout_s,
                follow_redirects=False,
            )  # fmt: skip
        except httpx.HTTPError as error:
            raise RetryableError(f"the webhook did not answer: {type(error).__name__}") from error
        if answer.is_success:
            return
        problem = f"the webhook answered {answer.status_code}"
        if answer.is_server_error or answer.status_code in _PASSING:
            raise RetryableError(problem)
        raise PermanentError(problem)

    def find_jobs(self, _record: ActionRecord) -> None:
        """Jobs are the receiver's own business."""

    def requeue(self, job: str) -> None:
        """Never asked."""
        raise PermanentError(f"job {job} cannot be requeued by a webhook")
