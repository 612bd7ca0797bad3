"""The alerter's configuration: JSON (or YAML, which contains it), strict, secrets from files or the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ingero.config import HeaderName, HeaderSecret, Secret, StrictModel
from ingero.config.document import load_document
from ingero.config.model import check_model
from ingero.errors import ConfigError

PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
"""Source: PagerDuty Events API v2. Accounts of the EU service region use events.eu.pagerduty.com."""

_TIMEOUT_S = 10.0


def _check_url(text: str) -> str:
    if not text.startswith(("https://", "http://")):
        raise ValueError("must begin with https:// or http://")
    return text


Url = Annotated[str, AfterValidator(_check_url)]


class SlackConfig(StrictModel):
    """Messages to a Slack channel by an incoming webhook."""

    webhook_url: Secret | None = Field(None, description="The webhook; who knows it can post.")
    webhook_url_file: str | None = Field(None, description="A file that holds it instead.")
    channel: str | None = Field(None, description="Another channel than the webhook's own.")
    username: str | None = Field(None, description="Another name than the webhook's own.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.webhook_url is None) == (self.webhook_url_file is None):
            raise ValueError("needs webhook_url or webhook_url_file, and only one of them")
        return self


class PagerDutyConfig(StrictModel):
    """Incidents in PagerDuty."""

    routing_key: Secret | None = Field(None, description="Integration key of the service.")
    routing_key_file: str | None = Field(None, description="A file that holds it instead.")
    severity: Annotated[
        Literal["info", "warning", "error", "critical"],
        BeforeValidator(lambda value: value or "warning"),
    ] = Field("warning", description="Severity of the incidents.")
    url: Url = Field(PAGERDUTY_URL, description="Where events go.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.routing_key is None) == (self.routing_key_file is None):
            raise ValueError("needs routing_key or routing_key_file, and only one of them")
        return self


class WebhookConfig(StrictModel):
    """Any receiver of JSON over HTTP."""

    url: Url = Field(description="Where each alert is posted.")
    headers: dict[HeaderName, HeaderSecret] = Field(
        default_factory=dict, description="Sent along, such as Authorization."
    )
    bearer_token_file: str | None = Field(
        None, description="A file with a bearer token, read again for each post."
    )


class HttpClientConfig(StrictModel):
    """How requests are made."""

    request_timeout_seconds: Annotated[
        float, BeforeValidator(lambda value: _TIMEOUT_S if value == 0 else value)
    ] = Field(_TIMEOUT_S, gt=0, le=300, description="Longest wait for one; 0 is the default.")


class AlerterConfig(StrictModel):
    """The whole file."""

    uds_path: str = Field(min_length=1, description="The agent's event socket.")
    slack: SlackConfig | None = Field(None, description="Off without it.")
    pagerduty: PagerDutyConfig | None = Field(None, description="Off without it.")
    webhook: WebhookConfig | None = Field(None, description="Off without it.")
    http_client: HttpClientConfig = Field(
        default_factory=HttpClientConfig, description="How requests are made."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.slack or self.pagerduty or self.webhook):
            raise ValueError("names no receiver; give slack, pagerduty or webhook")
        return self


def load_config(path: Path) -> AlerterConfig:
    """Read a configuration.

    Raises:
        ConfigError: It cannot be read or has mistakes; lists every problem with its line.
    """
    document = load_document(path)
    tree = document.tree
    if isinstance(tree, dict):  # "slack": null is no Slack, as in the existing alerter's files
        tree = {key: value for key, value in tree.items() if value is not None}
    config, problems = check_model(AlerterConfig, tree, lines=document.lines)
    document.problems += problems
    document.raise_problems()
    assert config is not None
    return config


def read_secret(value: Secret | None, file: str | None) -> str:
    """A secret from the value or the file of the configuration.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """
    if value is not None:
        return value.get_secret_value()
    assert file is not None
    try:
        text = Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret file {file} cannot be read: {error}") from error
    if not text:
        raise ConfigError(f"the secret file {file} is empty")
    return text
