"""``bearertokenauth``: checks and sends bearer tokens, from the configuration or from a file that may change.

A token is compared by the digest of it, in constant time, and never logged. White space around it does not belong to
it; one that is not printable ASCII is refused, because no header carries it. The subject of a push is the start of its
token's SHA-256, so an operator can tell tokens apart without reading them.

Source: opentelemetry-collector-contrib ``extension/bearertokenauthextension`` (key names; one token per line of
``filename``, of which a client sends the first).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

from pydantic import Field, model_validator

from ingero.config import Duration, HeaderName, HeaderSecret, StrictModel
from ingero.errors import ConfigError, IngeroError
from ingero.fleet.component import Authenticator, ComponentId, Host, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.credentials import REFUSED
from ingero.header_values import clean_header_value
from ingero.units import parse_duration

_log = logging.getLogger("ingero.fleet.extensions.bearertokenauth")


_BINDING: Final = "clusters="


class _Token(NamedTuple):
    """A token and the clusters that it may report for; None is any."""

    text: str
    clusters: frozenset[str] | None


class ClusterTokenConfig(StrictModel):
    """A token for some clusters."""

    token: HeaderSecret = Field(description="The token.")
    clusters: tuple[str, ...] = Field(
        min_length=1, description="Values of ingero.cluster.id that its holder may push for."
    )


class BearerTokenAuthConfig(StrictModel):
    """Which tokens are right."""

    scheme: str = Field(
        "Bearer", pattern="^[ -~]*$", description="Word before the token; empty is the token alone."
    )
    token: HeaderSecret | None = Field(None, description="The token.")
    tokens: tuple[HeaderSecret, ...] = Field(
        (), description="Several tokens, for a server; a client sends the first."
    )
    cluster_tokens: tuple[ClusterTokenConfig, ...] = Field(
        (), description="Tokens, for a server, that may report for some clusters only."
    )
    filename: str | None = Field(
        None,
        description="File with one token per line, read again when it changes; `TOKEN clusters=A,B` binds one to"
        " clusters.",
    )
    header: HeaderName = Field("Authorization", description="Header that a client sends it in.")
    refresh_interval: Duration = Field(
        parse_duration("5s"), gt=0, description="How often the file is checked for a change."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [bool(self.token), bool(self.tokens or self.cluster_tokens), bool(self.filename)]
        if sum(given) != 1:
            raise ValueError("give exactly one of token, tokens (or cluster_tokens) and filename")
        return self

    @property
    def given_tokens(self) -> list[_Token]:
        """Those in the configuration, in order: the first is what a client sends."""
        free = [*self.tokens, *([self.token] if self.token else [])]
        bound = [
            _Token(one.token.get_secret_value(), frozenset(one.clusters))
            for one in self.cluster_tokens
        ]
        return [_Token(one.get_secret_value(), None) for one in free] + bound


class BearerTokenAuth:
    """An `Authenticator` for both sides of a connection."""

    def __init__(self, component: ComponentId, config: BearerTokenAuthConfig) -> None:
        self._name = str(component)
        self._config = config
        self._prefix = f"{config.scheme} " if config.scheme else ""
        self._digests: tuple[bytes, ...] = ()
        self._clusters: dict[str, frozenset[str] | None] = {}
        self._first = ""
        self._stamp: tuple[int, int, int] | None = None

    async def start(self, host: Host) -> None:
        """Read the tokens and offer the check. Raises IngeroError for a file without tokens that can be sent."""
        refused = host.meter.counter(REFUSED)
        self._missing = refused.bound(extension=self._name, reason="missing")
        self._wrong = refused.bound(extension=self._name, reason="wrong")
        if self._config.filename is None:
            self._take(self._config.given_tokens)
        else:
            self._read(Path(self._config.filename))
            host.every(self._config.refresh_interval, self._refresh)
        host.offer(Authenticator, self)

    async def stop(self) -> None:
        """Nothing to release."""

    def authenticate(self, authorization: str | None) -> str | None:
        """The subject behind an ``Authorization`` value, or None when it is refused."""
        if authorization is None:
            self._missing(1)
            return None
        prefix = self._prefix
        is_right_scheme = authorization[: len(prefix)].lower() == prefix.lower()
        token = authorization[len(prefix) :]
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        is_right = False
        for known in self._digests:
            is_right |= hmac.compare_digest(digest, known)
        if not is_right or not is_right_scheme:
            self._wrong(1)
            return None
        return _name_subject(digest)

    def find_clusters(self, subject: str) -> frozenset[str] | None:
        """The clusters that a subject may report for: None is any, and none for a token that is no longer known."""
        return self._clusters.get(subject, frozenset())

    def client_headers(self) -> Mapping[str, str]:
        """The header with the first token."""
        return {self._config.header: self._prefix + self._first}

    def _refresh(self) -> None:
        assert self._config.filename is not None
        try:
            self._read(Path(self._config.filename))
        except IngeroError as error:
            _log.warning("extensions.%s keeps its old tokens: %s", self._name, error.message)

    def _read(self, path: Path) -> None:
        try:
            stat = path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp == self._stamp:
                return
        except OSError as error:
            raise IngeroError(f"cannot read {path}: {error.strerror or error}") from error
        self._take(_read_tokens(path))
        self._stamp = stamp

    def _take(self, tokens: list[_Token]) -> None:
        self._digests, self._clusters = _index_tokens(tokens)
        self._first = tokens[0].text


def _read_tokens(path: Path) -> list[_Token]:
    """The tokens of a file. Raises IngeroError for one that cannot be read or holds what no header carries."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise IngeroError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise IngeroError(f"{path}: not UTF-8 text") from error
    return [
        _read_line(line, f"{path} line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]


def _index_tokens(
    tokens: list[_Token],
) -> tuple[tuple[bytes, ...], dict[str, frozenset[str] | None]]:
    """Digests, and clusters by subject. Raises ConfigError for tokens that cannot be used together."""
    if not tokens or not all(token.text for token in tokens):
        raise ConfigError("there is no token, or an empty one")
    digests = tuple(hashlib.sha256(token.text.encode()).digest() for token in tokens)
    clusters: dict[str, frozenset[str] | None] = {}
    for digest, token in zip(digests, tokens, strict=True):
        subject = _name_subject(digest)
        if clusters.setdefault(subject, token.clusters) != token.clusters:
            raise ConfigError("a token is there twice, for different clusters")
    return digests, clusters


def _name_subject(digest: bytes) -> str:
    return f"token:{digest.hex()[:12]}"


def _read_line(line: str, where: str) -> _Token:
    """``TOKEN`` or ``TOKEN clusters=A,B``. Raises ConfigError that says where, and nothing of the line."""
    text, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    is_bound = rest.startswith(_BINDING)
    try:
        token = clean_header_value(text if is_bound else line)  # a token may hold blanks
    except ValueError as error:
        raise ConfigError(f"{where}: the token {error}") from error
    if not is_bound:
        return _Token(token, None)
    names = frozenset(name.strip() for name in rest.removeprefix(_BINDING).split(","))
    if not all(names):
        raise ConfigError(f"a token is bound to no cluster; write {_BINDING}NAME,NAME")
    return _Token(token, names)


def _check_files(config: BearerTokenAuthConfig) -> None:
    if config.filename is not None:
        _index_tokens(_read_tokens(Path(config.filename)))


FACTORY: Final = ExtensionFactory(
    type="bearertokenauth",
    config=BearerTokenAuthConfig,
    description="Checks and sends bearer tokens.",
    stability=Stability.BETA,
    metrics=(REFUSED,),
    create=BearerTokenAuth,
    check_files=_check_files,
    example={"token": "${env:INGERO_TOKEN}"},
)
