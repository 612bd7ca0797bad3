"""Who is asking: bearer tokens, what each may touch, and their rotation without a restart.

Tokens are kept as SHA-256 digests and compared in constant time. A new set replaces the old one whole or not at all;
tokens that left it stay valid for a grace period, so that a rotation drops no request.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Final

from ingero.config.acl import NO_QUOTA, SCOPES, AclEntry, WriteQuota
from ingero.telemetry.clock import Clock

_SCHEME: Final = "bearer"
_N_LABEL_CHARS: Final = 12


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody who was recognised.

    Attributes:
        digest: SHA-256 of the token, or of its certificate's name, hexadecimal: its name in the audit log.
        key_name: The name its owner gave it; for the audit log only.
        clusters: What it may touch; None is every cluster.
        scopes: Whether it may ``read``, ``write`` or both.
        quota: What it may write.
    """

    digest: str
    key_name: str
    clusters: frozenset[str] | None
    scopes: frozenset[str] = SCOPES
    quota: WriteQuota = NO_QUOTA

    @property
    def label(self) -> str:
        """What names it in metrics and in the usage report: the first characters of the digest."""
        return self.digest[:_N_LABEL_CHARS]

    def may(self, cluster_id: str) -> bool:
        """Whether this cluster is within its list."""
        return self.clusters is None or cluster_id in self.clusters


@dataclass(frozen=True, slots=True)
class _Known:
    digest: bytes
    certificate: str  # empty: known by its token
    principal: Principal
    until_ns: int | None  # None: valid until it is replaced
    grace_ns: int | None = None  # None: as all
    expires_wall_ns: int | None = None  # None: never


class Bearers:
    """The tokens that are valid now.

    Args:
        entries: The first set.
        clock: For the grace period.
        grace_ns: How long a token that was rotated out is still taken.
    """

    def __init__(self, entries: Iterable[AclEntry], clock: Clock, grace_ns: int) -> None:
        self._clock = clock
        self._grace_ns = grace_ns
        self._known = _build(entries)

    @property
    def principals(self) -> tuple[Principal, ...]:
        """Everybody who has a token, those within their grace included."""
        return tuple(known.principal for known in self._known)

    def replace(self, entries: Iterable[AclEntry]) -> tuple[str, ...]:
        """Take a new set; returns the digests that are live now, for the audit line.

        A token in both sets gets the new one's rights at once; only tokens that left keep theirs for their grace. One
        that the new set revokes has none, also where it left earlier.
        """
        entries = tuple(entries)
        fresh = _build(entries)
        listed = {bytes.fromhex(entry.digest) for entry in entries}
        now_ns = self._clock.mono_ns()
        leaving = tuple(
            replace(known, until_ns=self._find_end(known, now_ns))
            for known in self._known
            if known.digest not in listed and self._find_end(known, now_ns) > now_ns
        )
        self._known = (*fresh, *leaving)
        return tuple(known.principal.digest for known in fresh)

    def _find_end(self, known: _Known, now_ns: int) -> int:
        if known.until_ns is not None:
            return known.until_ns
        return now_ns + (self._grace_ns if known.grace_ns is None else known.grace_ns)

    def authenticate(self, authorization: str | None) -> Principal | None:
        """Who sent this ``Authorization`` value, or None. Looks at every token whatever matches."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != _SCHEME:
            return None
        digest = sha256(token.strip().encode()).digest()
        found = None
        for known in self._known:
            is_valid = self._is_valid(known) and not known.certificate
            if hmac.compare_digest(known.digest, digest) and is_valid and found is None:
                found = known.principal
        return found

    def identify(self, authorization: str | None, names: Sequence[str]) -> Principal | None:
        """Who sent this ``Authorization`` value or, where there is none, showed a certificate of these names."""
        if authorization is not None or not names:
            return self.authenticate(authorization)
        for known in self._known:
            if known.certificate and known.certificate in names and self._is_valid(known):
                return known.principal
        return None

    def _is_valid(self, known: _Known) -> bool:
        is_kept = known.until_ns is None or known.until_ns > self._clock.mono_ns()
        expires_wall_ns = known.expires_wall_ns
        return is_kept and (expires_wall_ns is None or expires_wall_ns > self._clock.wall_ns())


def _build(entries: Iterable[AclEntry]) -> tuple[_Known, ...]:
    known = []
    for entry in entries:
        if entry.is_revoked:
            continue
        digest, name = entry.digest, entry.key_name
        principal = Principal(digest, name, entry.clusters, entry.scopes, entry.quota)
        times = (None, entry.grace_ns, entry.expires_wall_ns)
        known.append(_Known(bytes.fromhex(digest), entry.certificate, principal, *times))
    return tuple(known)
