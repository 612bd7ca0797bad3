"""The request with which each receiver takes an alert.

Sources: Slack incoming webhooks (``text``, ``channel``, ``username``); PagerDuty Events API v2 (``routing_key``,
``event_action``, ``dedup_key``, ``payload``; 202 on success); the texts are those of the existing alerter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ingero.agent.events.alert.config import (
    AlerterConfig,
    PagerDutyConfig,
    SlackConfig,
    WebhookConfig,
    read_secret,
)
from ingero.agent.events.alert.episodes import Action, Alert
from ingero.config import Secret
from ingero.errors import BadDataError, ConfigError
from ingero.header_values import read_bearer
from ingero.slack_text import escape_slack_text


@dataclass(frozen=True, slots=True)
class Post:
    """One request.

    Attributes:
        url: Where to; may be a secret and is never logged.
        body: JSON-able.
        headers: Sent along.
    """

    url: str
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A receiver."""

    @property
    def name(self) -> str:
        """For logs."""
        ...

    def build(self, alert: Alert) -> Post:
        """The request for one alert.

        Raises:
            BadDataError: A secret cannot be read now.
        """
        ...


@dataclass(frozen=True, slots=True)
class Slack:
    """A message per alert."""

    config: SlackConfig
    name: str = "slack"

    def build(self, alert: Alert) -> Post:
        """Two lines, as people know them; names and labels are what a job's user wrote."""
        text = escape_slack_text(f"{alert.title}\n{_describe(alert)}")
        body: dict[str, Any] = {"text": text}
        if self.config.channel:
            body["channel"] = self.config.channel
        if self.config.username:
            body["username"] = self.config.username
        return Post(_read(self.config.webhook_url, self.config.webhook_url_file), body)


def _describe(alert: Alert) -> str:
    details = alert.details
    if not alert.node:
        return f"throughput -{details['throughput_drop_pct']:.0f} % event_id={details['event_id']}"
    rank = "" if details["rank"] is None else f" rank={details['rank']}/{details['world_size']}"
    labels = "".join(f" {key}={value}" for key, value in details.get("labels", {}).items())
    return (
        f"score={details['score']:.3f} threshold={details['threshold']:.3f} mode={details['detection_mode']}"
        f" dominant={details['dominant_signal']}{rank} event_id={details['event_id']}"
        f"{labels}"
    )


@dataclass(frozen=True, slots=True)
class PagerDuty:
    """An incident per episode."""

    config: PagerDutyConfig
    name: str = "pagerduty"

    def build(self, alert: Alert) -> Post:
        """A trigger, or the resolve of the same dedup key."""
        body: dict[str, Any] = {
            "routing_key": _read(self.config.routing_key, self.config.routing_key_file),
            "event_action": alert.action.value,
            "dedup_key": alert.key,
        }
        if alert.action is Action.TRIGGER:
            body["payload"] = {
                "summary": alert.title,
                "severity": self.config.severity,
                "source": alert.node or "local",
                "component": "ingero",
                "group": alert.cluster,
                "class": "gpu_straggler",
                "custom_details": alert.details,
            }
        return Post(self.config.url, body)


@dataclass(frozen=True, slots=True)
class Webhook:
    """The alert itself as JSON."""

    config: WebhookConfig
    name: str = "webhook"

    def build(self, alert: Alert) -> Post:
        """Everything that is known."""
        headers = {name: value.get_secret_value() for name, value in self.config.headers.items()}
        if self.config.bearer_token_file is not None:
            token = read_bearer(Path(self.config.bearer_token_file))
            headers["Authorization"] = f"Bearer {token}"
        body = {
            "action": alert.action.value,
            "episode": alert.key,
            "node_id": alert.node,
            "cluster_id": alert.cluster,
            "title": alert.title,
            "details": alert.details,
        }
        return Post(self.config.url, body, headers)


def build_backends(config: AlerterConfig) -> list[Backend]:
    """Every receiver that the configuration names; each reads its secret again for every alert.

    Raises:
        ConfigError: A secret's file cannot be read.
    """
    backends: list[Backend] = []
    if config.slack is not None:
        read_secret(config.slack.webhook_url, config.slack.webhook_url_file)
        backends.append(Slack(config.slack))
    if config.pagerduty is not None:
        read_secret(config.pagerduty.routing_key, config.pagerduty.routing_key_file)
        backends.append(PagerDuty(config.pagerduty))
    if config.webhook is not None:
        backends.append(Webhook(config.webhook))
    return backends


def _read(value: Secret | None, file: str | None) -> str:
    """A secret as it is now, so that a file can be replaced while we run.

    Raises:
        BadDataError: Its file cannot be read at this moment.
    """
    try:
        return read_secret(value, file)
    except ConfigError as error:
        raise BadDataError(error.message) from error
