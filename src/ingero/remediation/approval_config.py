"""The policy's section for people who approve."""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, field_validator, model_validator

from ingero.config.model import StrictModel
from ingero.config.types import Duration, Endpoint
from ingero.remediation.urls import SafeUrl
from ingero.remediation.webhook_config import SignedWebhookConfig
from ingero.units import parse_duration

MAX_LABEL_CHARS: Final = 60


class SlackReceiverConfig(StrictModel):
    """A Slack channel, by an incoming webhook."""

    webhook_url_file: str = Field(
        description="File with the webhook's address, which is the secret; mode 0600, read again for each message."
    )
    timeout: Duration = Field(parse_duration("10s"), gt=0, description="Of one request.")


class LinkReceiverConfig(StrictModel):
    """Whom a proposal's link is sent to: exactly one receiver. Who reads there may answer."""

    label: str = Field(description="Whose link: one of the labels.")
    slack: SlackReceiverConfig | None = Field(None, description="A message for people.")
    webhook: SignedWebhookConfig | None = Field(
        None, description="JSON for programs, signed as Standard Webhooks has it."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.slack is None) == (self.webhook is None):
            raise ValueError("needs slack or webhook, and only one of them")
        return self


class ApprovalLinkConfig(StrictModel):
    """Links for each proposal, by which one who has them may approve or reject that proposal once."""

    base_url: SafeUrl = Field(
        description="What links begin with, as browsers reach the page: https://HOST/PATH, or http on loopback."
    )
    key_file: str = Field(
        description="File with the key that signs links, in base64; 24 bytes or more, mode 0600. Another key ends"
        " all links."
    )
    listen: Endpoint = Field(
        Endpoint("127.0.0.1", 9468),
        description="host:port to serve the page on, without TLS: what answers at base_url passes it on.",
    )
    labels: tuple[str, ...] = Field(
        default=("approval link",),
        min_length=1,
        description="One link each. The journal says by whose link an answer came.",
    )
    send: tuple[LinkReceiverConfig, ...] = Field(
        default=(), description="Where links are sent when there is a proposal."
    )

    @model_validator(mode="after")
    def _check_receivers(self) -> Self:
        for one in self.send:
            if one.label not in self.labels:
                raise ValueError(f"send: {one.label!r} is none of labels")
        return self

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        for label in labels:
            if not (label.isprintable() and 0 < len(label) <= MAX_LABEL_CHARS):
                raise ValueError(f"a label has 1 to {MAX_LABEL_CHARS} printable characters")
        if len(set(labels)) < len(labels):
            raise ValueError("two labels are the same")
        return labels


class ApprovalConfig(StrictModel):
    """Mode ``ask``."""

    expires: Duration = Field(
        parse_duration("1h"), gt=0, description="A proposal that nobody approved is over then."
    )
    link: ApprovalLinkConfig | None = Field(
        None, description="Links to a page with two buttons, for those who have no shell here."
    )
