"""Who may ask: the site's bearers and, where it has an authorization server, that one's access tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ingero.echo.service.config import EchoConfig
from ingero.echo.service.report_page import REPORT_PATHS
from ingero.serving.bearer import Bearers, Principal
from ingero.serving.oauth import AccessTokens, OAuthSettings
from ingero.telemetry.clock import Clock

OPEN_PATHS: Final = frozenset({"/api/versions", "/api/v2/health"})
"""What everybody may ask; the metadata of `Access` and the files of the report's page are open, too."""


class Access:
    """The two kinds of token that the API and MCP take.

    Args:
        bearers: The site's own.
        tokens: The authorization server's; None where there is none.
    """

    def __init__(self, bearers: Bearers, tokens: AccessTokens | None = None) -> None:
        self._bearers = bearers
        self._tokens = tokens

    @property
    def documents(self) -> Mapping[str, bytes]:
        """JSON documents that are served to everybody, by path."""
        return {} if self._tokens is None else {self._tokens.path: self._tokens.metadata}

    def is_open(self, path: str) -> bool:
        """Whether a path needs no token."""
        return path in OPEN_PATHS or path in REPORT_PATHS or path in self.documents

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Who sent this ``Authorization`` value, or None."""
        known = self._bearers.authenticate(authorization)
        if known is None and self._tokens is not None:
            return self._tokens.authenticate(authorization)
        return known

    def challenge(self, authorization: str | None) -> str:
        """The value of ``WWW-Authenticate`` on a 401 answer to a request with this ``Authorization`` value."""
        if self._tokens is not None:
            return self._tokens.challenge(authorization)
        return 'Bearer error="invalid_token"' if authorization else "Bearer"

    def reload(self) -> None:
        """Read the authorization server's keys again; bad ones leave the old in place."""
        if self._tokens is not None:
            self._tokens.reload()


def build_access_tokens(config: EchoConfig, clock: Clock) -> AccessTokens | None:
    """The authorization server's tokens, where the settings name one.

    Raises:
        ConfigError: Its keys cannot be used.
    """
    issuer, resource, keys = config.oauth_issuer, config.oauth_resource, config.oauth_jwks_file
    if issuer is None or resource is None or keys is None:
        return None
    settings = OAuthSettings(issuer, resource, keys, config.oauth_clusters_claim, "Ingero Echo")
    return AccessTokens(settings, clock)
