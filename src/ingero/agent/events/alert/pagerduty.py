"""One alert to PagerDuty on request, beside the alerter, which follows episodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import httpx
import msgspec

from ingero.agent.events.alert.config import PAGERDUTY_URL
from ingero.errors import PermanentError, RetryableError
from ingero.web_authorities import WebAuthorities

_TIMEOUT_S: Final = 10
_ACCEPTED: Final = 202


class PagerDutyPager:
    """Triggers incidents of one service.

    Source: PagerDuty Events API v2: 202 with ``dedup_key``; 429 and 5xx may be sent again.

    Args:
        routing_key: Integration key of the service.
        url: Where events go.
    """

    def __init__(self, routing_key: str, url: str = "") -> None:
        self._routing_key = routing_key
        self._url = url or PAGERDUTY_URL

    def __call__(self, alert: Mapping[str, Any], dedup_key: str) -> str:
        """Trigger an incident; returns its key.

        Raises:
            RetryableError: It did not answer or is busy.
            PermanentError: It refuses the event.
        """
        body: dict[str, Any] = {
            "routing_key": self._routing_key,
            "event_action": "trigger",
            "payload": {**alert, "component": "ingero", "class": "ai_investigation"},
        }
        if dedup_key:
            body["dedup_key"] = dedup_key
        try:
            answer = httpx.post(
                self._url,
                content=msgspec.json.encode(body),
                headers={"content-type": "application/json"},
                timeout=_TIMEOUT_S,
                verify=WebAuthorities(),
            )
        except httpx.HTTPError as error:
            raise RetryableError(f"PagerDuty does not answer: {type(error).__name__}") from error
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            raise RetryableError(f"PagerDuty answers HTTP {answer.status_code}")
        if answer.status_code != _ACCEPTED:
            raise PermanentError(f"PagerDuty refuses the event: HTTP {answer.status_code}")
        return _read_key(answer.content) or dedup_key


def _read_key(body: bytes) -> str:
    try:
        answer_body = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:
        return ""
    return str(answer_body.get("dedup_key", ""))
