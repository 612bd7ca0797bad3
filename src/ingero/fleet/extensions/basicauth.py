"""``basicauth``: checks and sends names with passwords (RFC 7617).

A server reads ``htpasswd`` lines whose passwords are hashed by bcrypt; other hashes are refused at the start, because
they are broken or need a library that nobody keeps. A password that was right once is remembered by a keyed digest, so
that bcrypt, which is slow on purpose, runs once per process and sender and not for each push.

Source: opentelemetry-collector-contrib ``extension/basicauthextension`` (key names; client and server exclude each
other; ``file`` before ``inline``).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from ingero.config import Secret, StrictModel
from ingero.errors import ConfigError, ConfigProblem, IngeroError
from ingero.fleet.component import Authenticator, ComponentId, Host, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.credentials import REFUSED
from ingero.units import NS_PER_S

_log = logging.getLogger("ingero.fleet.extensions.basicauth")

_BCRYPT: Final = re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}")
_MAX_REMEMBERED: Final = 100_000
_MAX_PASSWORD_BYTES: Final = 72
"""What bcrypt reads; the library refuses more."""
_REFRESH_NS: Final = 5 * NS_PER_S


class HtpasswdConfig(StrictModel):
    """Who may enter."""

    file: str | None = Field(
        None,
        description="Lines of name:bcrypt as `htpasswd -B` writes; read again when it changes.",
    )
    inline: Secret | None = Field(
        None, description="Such lines here; they win over those of the file."
    )


class BasicClientConfig(StrictModel):
    """As whom an exporter enters."""

    username: str | None = Field(None, description="The name.")
    password: Secret | None = Field(None, description="The password.")
    username_file: str | None = Field(
        None, description="File with the name, read again when it changes."
    )
    password_file: str | None = Field(
        None, description="File with the password, read again when it changes."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("username", "password"):
            if (getattr(self, name) is None) == (getattr(self, f"{name}_file") is None):
                raise ValueError(f"give exactly one of {name} and {name}_file")
        if self.username is not None and ":" in self.username:
            raise ValueError("username must not hold a colon")
        return self


class BasicAuthConfig(StrictModel):
    """Which names and passwords are right, or are sent."""

    htpasswd: HtpasswdConfig | None = Field(None, description="Who may enter, for a receiver.")
    client_auth: BasicClientConfig | None = Field(
        None, description="As whom to enter, for an exporter."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.htpasswd is None) == (self.client_auth is None):
            raise ValueError("give exactly one of htpasswd and client_auth")
        if self.htpasswd is not None and not (self.htpasswd.file or self.htpasswd.inline):
            raise ValueError("htpasswd needs file or inline")
        return self


class BasicAuth:
    """An `Authenticator` for either side of a connection."""

    def __init__(self, component: ComponentId, config: BasicAuthConfig) -> None:
        self._name = str(component)
        self._config = config
        self._hashes: dict[str, bytes] = {}
        self._header = ""
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, str | None] = {}
        self._read: tuple[str, ...] = ()

    async def start(self, host: Host) -> None:
        """Read the passwords and offer the check. Raises IngeroError for an unreadable file or another kind of hash."""
        refused = host.meter.counter(REFUSED)
        self._missing = refused.bound(extension=self._name, reason="missing")
        self._wrong = refused.bound(extension=self._name, reason="wrong")
        self._load()
        if any(_iter_files(self._config)):
            host.every(_REFRESH_NS, self._refresh)
        host.offer(Authenticator, self)

    async def stop(self) -> None:
        """Nothing to release."""

    def authenticate(self, authorization: str | None) -> str | None:
        """The subject behind an ``Authorization`` value, or None when it is refused."""
        if authorization is None:
            self._missing(1)
            return None
        digest = hmac.digest(self._key, authorization.encode("utf-8", "surrogateescape"), "sha256")
        if digest not in self._remembered:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered[digest] = self._check(authorization)
        subject = self._remembered[digest]
        if subject is None:
            self._wrong(1)
        return subject

    def client_headers(self) -> Mapping[str, str]:
        """The header with name and password; none for a server."""
        return {"Authorization": self._header} if self._header else {}

    def _check(self, authorization: str) -> str | None:
        import bcrypt  # noqa: PLC0415 -- a client needs none

        scheme, _, encoded = authorization.partition(" ")
        try:
            name, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return None
        known = self._hashes.get(name)
        text = password.encode()
        if scheme.lower() != "basic" or not colon or len(text) > _MAX_PASSWORD_BYTES:
            return None
        # An unknown name takes as long as a known one.
        is_right = bcrypt.checkpw(text, known or next(iter(self._hashes.values())))
        return f"user:{name}" if is_right and known is not None else None

    def _refresh(self) -> None:
        try:
            self._load()
        except IngeroError as error:
            _log.warning("extensions.%s keeps its old passwords: %s", self._name, error.message)

    def _load(self) -> None:
        texts = tuple(_read_text(file) for file in _iter_files(self._config))
        if texts == self._read and (self._hashes or self._header):
            return
        client, server = self._config.client_auth, self._config.htpasswd
        rest = iter(texts)
        if client is not None:
            name = client.username if client.username is not None else next(rest).strip()
            password = client.password.get_secret_value() if client.password else next(rest)
            pair = f"{name}:{password.rstrip(chr(10))}".encode()
            self._header = f"Basic {base64.b64encode(pair).decode()}"
        elif server is not None:
            inline = server.inline.get_secret_value() if server.inline else ""
            self._hashes = _read_hashes([*rest, inline])
            self._remembered.clear()
        self._read = texts


def _iter_files(config: BasicAuthConfig) -> Iterator[Path]:
    client, server = config.client_auth, config.htpasswd
    names = (
        (client.username_file, client.password_file)
        if client is not None
        else (server.file if server is not None else None,)
    )
    for name in names:
        if name is not None:
            yield Path(name)


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise IngeroError(f"cannot read {file}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise IngeroError(f"{file}: not UTF-8 text") from error


def _read_hashes(texts: list[str]) -> dict[str, bytes]:
    """Hashes by name; later lines win. Messages name users and no hash."""
    hashes: dict[str, bytes] = {}
    problems = []
    for text in texts:
        for number, line in enumerate(text.splitlines(), 1):
            name, _, found = line.strip().partition(":")
            if not line.strip() or line.startswith("#"):
                continue
            if not name or not _BCRYPT.fullmatch(found):
                message = f"htpasswd line {number}: {name[:64]!r} has no bcrypt hash; write it with `htpasswd -B`"
                problems.append(ConfigProblem("", message))
                continue
            hashes[name] = found.encode()
    if not hashes and not problems:
        problems.append(ConfigProblem("", "htpasswd names nobody"))
    if problems:
        raise ConfigError(problems)
    return hashes


def _check_files(config: BasicAuthConfig) -> None:
    texts = [_read_text(file) for file in _iter_files(config)]
    if config.htpasswd is not None:
        inline = config.htpasswd.inline
        _read_hashes([*texts, inline.get_secret_value() if inline else ""])


FACTORY: Final = ExtensionFactory(
    type="basicauth",
    config=BasicAuthConfig,
    description="Checks and sends names with passwords.",
    stability=Stability.BETA,
    metrics=(REFUSED,),
    create=BasicAuth,
    check_files=_check_files,
    example={"client_auth": {"username": "fleet", "password": "${env:INGERO_TOKEN}"}},
)
