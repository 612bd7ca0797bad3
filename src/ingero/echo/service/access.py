"""Who may ask: the site's bearers and, where it has an authorization server, that one's access tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from ingero.config.acl import AclEntry
from ingero.echo.service.config import EchoConfig
from ingero.echo.service.report_page import REPORT_PATHS
from ingero.errors import IngeroError
from ingero.serving.audit import write_audit
from ingero.serving.bearer import Bearers, Principal
from ingero.serving.oauth import AccessTokens, OAuthSettings
from ingero.serving.tls import FileStamps, stamp_files
from ingero.telemetry.clock import Clock

_LOG: Final = logging.getLogger("ingero.echo")
LOOK_S: Final = 2.0
"""Time between two looks at the files; one that has changed is read when it was the same for two looks."""
LoadTokens = Callable[[], tuple[AclEntry, ...]]

OPEN_PATHS: Final = frozenset({"/api/versions", "/api/v2/health"})
"""What everybody may ask; the metadata of `Access` and the files of the report's page are open, too."""


class Access:
    """The two kinds of token that the API and MCP take; they follow their files.

    Args:
        load_tokens: Reads the site's own bearers; called now and at each reload.
        config: How long a token is taken that was rotated out, and where the authorization server's keys are.
        clock: Time.

    Attributes:
        bearers: The site's own.
        on_reload: Called after the bearers were replaced.
    """

    def __init__(self, load_tokens: LoadTokens, config: EchoConfig, clock: Clock) -> None:
        self._load_tokens = load_tokens
        self.bearers = Bearers(load_tokens(), clock, config.token_grace)
        self._tokens = build_access_tokens(config, clock)
        self._files = tuple(
            file
            for file in (config.auth_token_file, config.bearer_acl_file, config.oauth_jwks_file)
            if file is not None
        )
        self.on_reload: Callable[[], None] = lambda: None

    @property
    def documents(self) -> Mapping[str, bytes]:
        """JSON documents that are served to everybody, by path."""
        return {} if self._tokens is None else {self._tokens.path: self._tokens.metadata}

    def is_open(self, path: str) -> bool:
        """Whether a path needs no token."""
        return path in OPEN_PATHS or path in REPORT_PATHS or path in self.documents

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Who sent this ``Authorization`` value, or None."""
        known = self.bearers.authenticate(authorization)
        if known is None and self._tokens is not None:
            return self._tokens.authenticate(authorization)
        return known

    def challenge(self, authorization: str | None) -> str:
        """The value of ``WWW-Authenticate`` on a 401 answer to a request with this ``Authorization`` value."""
        if self._tokens is not None:
            return self._tokens.challenge(authorization)
        return 'Bearer error="invalid_token"' if authorization else "Bearer"

    def reload(self) -> None:
        """Read bearers and the authorization server's keys again; bad ones leave the old in place."""
        try:
            live = self.bearers.replace(self._load_tokens())
        except IngeroError as error:
            _LOG.error("bearers not replaced, the old ones stay: %s", error.message)
        else:
            for digest in live:
                write_audit({"event": "bearer_rotation_applied", "live_hash": digest})
            self.on_reload()
        if self._tokens is not None:
            self._tokens.reload()

    async def follow(self) -> None:
        """Read the files again when they have changed, until cancelled.

        A file that is being written is left alone until it is the same for two looks, so that no half of one is read.
        """
        loaded = seen = self._stamp()
        while self._files:
            await asyncio.sleep(LOOK_S)
            before, seen = seen, self._stamp()
            if seen is not None and seen == before and seen != loaded:
                loaded = seen
                self.reload()

    def _stamp(self) -> FileStamps | None:
        """None while one is not there, as between two steps of a replacement."""
        try:
            return stamp_files(self._files)
        except IngeroError:
            return None


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
