"""Links by which a person answers one proposal.

A link ends in ``/answer/ACTION.UNTIL.LABEL.MAC``. The MAC (HMAC-SHA256) is over the action with its finding, node,
target and actuator, the label and the time until which it holds, so a link is good for what was proposed and nothing
else. Nothing of it is stored: who has the key can make it again, and a proposal that was answered takes no other
answer.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ingero.remediation.approval_config import ApprovalConfig
from ingero.remediation.records import ActionRecord, ActionState
from ingero.remediation.secret_file import read_secret
from ingero.units import NS_PER_S

PAGE: Final = "answer"
_PURPOSE: Final = b"ingero-remediator approval link 1"
"""Keeps what is signed here apart from whatever else is signed with the same key."""


@dataclass(frozen=True, slots=True)
class Token:
    """The last part of a link, read but not yet believed.

    Attributes:
        action_id: The action.
        until_s: When it is over, in seconds since the epoch.
        label: Whose link it is.
        mac: Its signature.
    """

    action_id: str
    until_s: int
    label: str
    mac: bytes


class LinkSigner:
    """Makes links and checks them.

    Args:
        key: The key.
        base_url: What links begin with.
        expires_ns: How long a proposal waits.
        labels: One link each.
    """

    def __init__(self, key: bytes, base_url: str, expires_ns: int, labels: tuple[str, ...]) -> None:
        self._key = key
        self._base_url = base_url
        self._expires_ns = expires_ns
        self._labels = labels

    def build_links(self, record: ActionRecord) -> Mapping[str, str]:
        """The links of a proposal by label; none of an action that is no proposal (any more)."""
        if record.state is not ActionState.PROPOSED:
            return {}
        until_s = (record.changed.wall_ns + self._expires_ns) // NS_PER_S
        return {
            label: self.build_url(
                Token(record.action_id, until_s, label, self._sign(record, label, until_s))
            )
            for label in self._labels
        }

    def build_url(self, token: Token) -> str:
        """The link that ends in a token."""
        parts = (token.action_id, str(token.until_s), _pack(token.label.encode()), _pack(token.mac))
        return f"{self._base_url}/{PAGE}/{'.'.join(parts)}"

    def is_of(self, token: Token, record: ActionRecord) -> bool:
        """Whether a token was signed for this action as it stands in the journal, and its label still has a link."""
        wanted = self._sign(record, token.label, token.until_s)
        return hmac.compare_digest(wanted, token.mac) and token.label in self._labels

    def _sign(self, record: ActionRecord, label: str, until_s: int) -> bytes:
        parts = (
            record.action_id, record.episode, record.cluster_id, record.node_id, record.target, record.kind, label,
            str(until_s),
        )  # fmt: skip
        message = b"\0".join([_PURPOSE, *(part.encode() for part in parts)])
        return hmac.new(self._key, message, hashlib.sha256).digest()


def build_signer(approval: ApprovalConfig) -> LinkSigner | None:
    """By the policy; None without links.

    Raises:
        ConfigError: The key cannot be used.
    """
    link = approval.link
    if link is None:
        return None
    key = read_secret(link.key_file, "approval.link.key_file")
    return LinkSigner(key, link.base_url, approval.expires, link.labels)


def parse_token(text: str) -> Token | None:
    """The last part of a link; None when it is none."""
    parts = text.split(".")
    if len(parts) != 4 or not (parts[1].isascii() and parts[1].isdecimal() and len(parts[1]) < 16):
        return None
    try:
        label, mac = (
            base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
            for part in parts[2:]
        )
        return Token(parts[0], int(parts[1]), label.decode(), mac)
    except (binascii.Error, ValueError):
        return None


def _pack(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")
