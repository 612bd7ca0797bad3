"""OAuth access tokens next to our own bearers: a server of ours as an OAuth protected resource.

The site's authorization server issues the tokens. A client that comes without one learns which server that is from the
401 answer and the metadata document. A token is taken when its signature, issuer, audience and times fit; the keys are
read from a file, so that no server of ours ever connects to the authorization server.

Sources: RFC 9728 §2, §3.1, §5.1 (metadata, its place, the challenge); RFC 9068 §4 (validation of a JWT access token);
RFC 6750 §3.1 (error codes); Model Context Protocol 2026-07-28, "Authorization".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from ingero.errors import ConfigError, IngeroError
from ingero.serving.bearer import Principal
from ingero.telemetry.clock import Clock
from ingero.units import NS_PER_S

if TYPE_CHECKING:
    import jwt

WELL_KNOWN: Final = "/.well-known/oauth-protected-resource"
ALGORITHMS: Final = (
    *("ES256", "ES384", "ES512", "EdDSA", "PS256", "PS384", "PS512", "RS256", "RS384", "RS512"),
)
"""Signatures only: with a shared secret, every server that checks a token could make one."""
_LEEWAY_S: Final = 30
"""How far the authorization server's clock may be from ours."""
_CLAIMS: Final = ("aud", "exp", "iss", "sub")
_LOG: Final = logging.getLogger("ingero.serving.oauth")


@dataclass(frozen=True, slots=True)
class OAuthSettings:
    """Whose tokens are taken.

    Attributes:
        issuer: URL of the authorization server; the ``iss`` of its tokens.
        resource: URL of MCP as its clients know it; the ``aud`` of tokens that are meant for it.
        jwks_file: The authorization server's public keys, a JWK set.
        clusters_claim: The claim with the clusters that a token may touch, a list or words in one text, ``*`` for every
            one; empty where there are no clusters to tell apart.
        name: What is served, for people.
    """

    issuer: str
    resource: str
    jwks_file: str
    clusters_claim: str = ""
    name: str = ""


def check_urls(issuer: str, resource: str) -> str:
    """What is wrong with the two URLs, or an empty text. Plain HTTP is for loopback only (RFC 9728 §2)."""
    for name, url in (("issuer", issuer), ("resource", resource)):
        parts = urlsplit(url)
        is_local = parts.hostname in {"127.0.0.1", "localhost", "::1"}
        if parts.scheme != "https" and not (parts.scheme == "http" and is_local):
            return f"{name} {url!r} is no https URL"
        if parts.query or parts.fragment or not parts.hostname:
            return f"{name} {url!r} has a query or a fragment, or no host"
    return ""


class AccessTokens:
    """The tokens of one authorization server.

    Args:
        settings: Whose, for what.
        clock: For the times in a token.

    Raises:
        ConfigError: The key file cannot be used.
    """

    def __init__(self, settings: OAuthSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._keys = _load_keys(settings.jwks_file)
        parts = urlsplit(settings.resource)
        self.path = WELL_KNOWN + ("" if parts.path == "/" else parts.path)
        """Where the metadata document is served."""
        self._metadata_url = f"{parts.scheme}://{parts.netloc}{self.path}"
        self.metadata = msgspec.json.encode({
            "resource": settings.resource,
            "authorization_servers": [settings.issuer],
            "bearer_methods_supported": ["header"],
            "resource_name": settings.name,
        })
        """The metadata document, as JSON."""

    def reload(self) -> None:
        """Read the keys again; a file that cannot be used leaves the old ones in place and is logged."""
        try:
            self._keys = _load_keys(self._settings.jwks_file)
        except IngeroError as error:
            _LOG.error("OAuth keys not replaced, the old ones stay: %s", error)

    def challenge(self, authorization: str | None) -> str:
        """The value of ``WWW-Authenticate`` on a 401 answer to a request with this ``Authorization`` value."""
        error = 'error="invalid_token", ' if authorization else ""
        return f'Bearer {error}resource_metadata="{self._metadata_url}"'

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Who sent this ``Authorization`` value, or None.

        Its digest is of issuer and subject, so that limits and audit lines follow a person over renewed tokens.
        """
        scheme, _, token = (authorization or "").partition(" ")
        claims = self._decode(token.strip()) if scheme.lower() == "bearer" else None
        if claims is None:
            return None
        clusters = None
        if self._settings.clusters_claim:
            clusters = _read_clusters(claims.get(self._settings.clusters_claim))
            if clusters is not None and not clusters:
                return None
        subject = claims["sub"]
        digest = sha256(f"{self._settings.issuer}\0{subject}".encode()).hexdigest()
        return Principal(digest, subject, clusters)

    def _decode(self, token: str) -> dict[str, Any] | None:
        """The claims of a token that is valid now."""
        import jwt  # noqa: PLC0415 - takes long to import, and most servers take no access tokens

        try:
            key = self._find_key(jwt.get_unverified_header(token))
            if key is None:
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._settings.resource,
                issuer=self._settings.issuer,
                options={
                    "require": list(_CLAIMS),
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
        except jwt.PyJWTError:
            return None
        return claims if self._is_now(claims) and isinstance(claims["sub"], str) else None

    def _find_key(self, header: Mapping[str, Any]) -> jwt.PyJWK | None:
        name = header.get("kid")
        if name is None:
            return self._keys[0] if len(self._keys) == 1 else None
        return next((key for key in self._keys if key.key_id == name), None)

    def _is_now(self, claims: Mapping[str, Any]) -> bool:
        now_s = self._clock.wall_ns() / NS_PER_S
        ends_s, begins_s = claims["exp"], claims.get("nbf", 0)
        if not isinstance(ends_s, int | float) or not isinstance(begins_s, int | float):
            return False
        return begins_s - _LEEWAY_S <= now_s < ends_s + _LEEWAY_S


def _load_keys(file: str) -> list[jwt.PyJWK]:
    import jwt  # noqa: PLC0415 - as in `AccessTokens`

    try:
        document = msgspec.json.decode(Path(file).read_bytes(), type=dict[str, Any])
        found = jwt.PyJWKSet.from_dict(document).keys
    except OSError as error:
        raise ConfigError(error.strerror or str(error), source=file) from error
    except (jwt.PyJWTError, msgspec.MsgspecError) as error:
        raise ConfigError(f"is no JWK set: {error}", source=file) from error
    keys = [key for key in found if key.algorithm_name in ALGORITHMS]
    if not keys:
        raise ConfigError("has no public key that signs access tokens", source=file)
    return keys


def _read_clusters(claim: object) -> frozenset[str] | None:
    """The clusters of a claim; None is every one, and an empty set is what no rule gives a cluster."""
    words = claim.split() if isinstance(claim, str) else claim
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return frozenset()
    return None if words == ["*"] else frozenset(words) - {"*"}
