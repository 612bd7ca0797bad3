"""Requests to receivers outside, signed or to a secret address.

Source: Standard Webhooks 1.0, whose libraries verify it: ``webhook-id``, ``webhook-timestamp`` and ``webhook-signature:
v1,BASE64(HMAC-SHA256(secret, "ID.TIMESTAMP.BODY"))``. The id is the same each time something is sent again.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import httpx

from ingero import __version__
from ingero.errors import PermanentError, RetryableError
from ingero.web_authorities import WebAuthorities

_PASSING: Final = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS})


def sign(secret: bytes, message_id: str, wall_s: int, body: bytes) -> str:
    """The value of ``webhook-signature``."""
    signed = f"{message_id}.{wall_s}.".encode() + body
    digest = hmac.new(secret, signed, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def build_signed_headers(
    secret: bytes, message_id: str, wall_s: int, body: bytes
) -> dict[str, str]:
    """What a receiver verifies a body by."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(wall_s),
        "webhook-signature": sign(secret, message_id, wall_s, body),
    }


def post_json(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> None:
    """Send a body; no redirect is followed, and no error names the address, which may be a secret.

    Raises:
        RetryableError: It may be taken later.
        PermanentError: It is refused.
    """
    named = {
        "content-type": "application/json",
        "user-agent": f"ingero-remediator/{__version__}",
        **headers,
    }
    try:
        answer = httpx.post(
            url,
            content=body,
            headers=named,
            timeout=timeout_s,
            follow_redirects=False,
            verify=WebAuthorities(),
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RetryableError(f"the webhook did not answer: {type(error).__name__}") from error
    if answer.is_success:
        return
    problem = f"the webhook answered {answer.status_code}"
    if answer.is_server_error or answer.status_code in _PASSING:
        raise RetryableError(problem)
    raise PermanentError(problem)
