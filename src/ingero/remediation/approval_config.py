"""The policy's section for people who approve."""

from __future__ import annotations

from typing import Final

from pydantic import Field, field_validator

from ingero.config.model import StrictModel
from ingero.config.types import Duration, Endpoint
from ingero.remediation.urls import SafeUrl
from ingero.units import parse_duration

MAX_LABEL_CHARS: Final = 60


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
