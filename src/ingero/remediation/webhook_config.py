"""Receivers of signed requests, as a policy has them."""

from __future__ import annotations

from pydantic import Field

from ingero.config.model import StrictModel
from ingero.config.types import Duration
from ingero.remediation.urls import SafeUrl
from ingero.units import parse_duration


class SignedWebhookConfig(StrictModel):
    """A receiver of signed requests. It cannot be asked whether a node is out of service."""

    url: SafeUrl = Field(description="https://HOST/PATH, or http on loopback.")
    secret_file: str = Field(
        description="File with the key that signs each body, in base64; 24 bytes or more, mode 0600."
    )
    timeout: Duration = Field(parse_duration("10s"), gt=0, description="Of one request.")
