"""``basicauth``: checks and sends names with passwords (RFC 7617).

A server reads ``htpasswd`` lines whose passwords are hashed by bcrypt; other hashes are refused at the start, because
they are broken or need a library that nobody keeps. Credentials that were checked are remembered by a keyed digest,
right ones until their line changes, so that bcrypt, which is slow on purpose, runs once per process and sender and not
for each push. It runs where pushes are taken, so all checks together get a share of one core's time: credentials that
nobody knows yet are asked to come again when it is used up, and known ones do not notice.

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
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator

from ingero.config import Secret, StrictModel
from ingero.errors import ConfigError, ConfigProblem, IngeroError, RetryableError
from ingero.fleet.component import Authenticator, ComponentId, Host, Stability
from ingero.fleet.factory import ExtensionFactory
from ingero.fleet.helpers.credentials import REFUSED
from ingero.telemetry.clock import Clock, SystemClock
from ingero.units import NS_PER_S

_log = logging.getLogger("ingero.fleet.extensions.basicauth")

_BCRYPT: Final = re.compile(r"\$2[abxy]\$\d\d\$[./A-Za-z0-9]{53}")
_MAX_REMEMBERED: Final = 100_000
_MAX_WRONG: Final = 10_000
_CHECKS_SHARE: Final = 0.2
"""Of one core."""
_MAX_CHECKS_AT_ONCE_NS: Final = NS_PER_S // 2
"""Processor time after a pause; about eight checks of htpasswd's cost 10."""
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


class _CheckTime:
    """Processor time that checks may take: a share of each second, some of it saved up.

    Args:
        clock: Time.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_ns: float = _MAX_CHECKS_AT_ONCE_NS
        self._read_ns = clock.mono_ns()

    def find_wait_ns(self) -> int:
        """Until a check may run; 0 for now. One that takes longer than what is left delays the next."""
        now_ns = self._clock.mono_ns()
        earned_ns = (now_ns - self._read_ns) * _CHECKS_SHARE
        self._left_ns = min(_MAX_CHECKS_AT_ONCE_NS, self._left_ns + earned_ns)
        self._read_ns = now_ns
        return 0 if self._left_ns > 0 else int(-self._left_ns / _CHECKS_SHARE) + 1

    def spend(self, used_ns: int) -> None:
        """A check took so long."""
        self._left_ns -= used_ns


class BasicAuth:
    """An `Authenticator` for either side of a connection."""

    def __init__(self, component: ComponentId, config: BasicAuthConfig) -> None:
        self._name = str(component)
        self._config = config
        self._hashes: dict[str, bytes] = {}
        self._header = ""
        self._key = secrets.token_bytes(32)
        self._right: dict[bytes, str] = {}
        self._wrong: dict[bytes, bytes] = {}
        self._read: tuple[str, ...] = ()
        self._check_time = _CheckTime(SystemClock())

    async def start(self, host: Host) -> None:
        """Read the passwords and offer the check. Raises IngeroError for an unreadable file or another kind of hash."""
        refused = host.meter.counter(REFUSED)
        self._count_refused = {
            reason: refused.bound(extension=self._name, reason=reason)
            for reason in ("missing", "wrong", "unchecked")
        }
        self._check_time = _CheckTime(host.clock)
        self._load()
        if any(_iter_files(self._config)):
            host.every(_REFRESH_NS, self._refresh)
        host.offer(Authenticator, self)

    async def stop(self) -> None:
        """Nothing to release."""

    def authenticate(self, authorization: str | None) -> str | None:
        """The subject behind an ``Authorization`` value, or None when it is refused.

        Raises:
            RetryableError: It is not known yet, and too many others were checked just now.
        """
        if authorization is None:
            self._count_refused["missing"](1)
            return None
        digest = self._digest(authorization.encode("utf-8", "surrogateescape"))
        name = self._right.get(digest)
        if name is None and digest not in self._wrong:
            name = self._check(authorization, digest)
        if name is None:
            self._count_refused["wrong"](1)
            return None
        return f"user:{name}"

    def client_headers(self) -> Mapping[str, str]:
        """The header with name and password; none for a server."""
        return {"Authorization": self._header} if self._header else {}

    def _digest(self, text: bytes) -> bytes:
        """What a text is remembered by; says nothing of it outside this process."""
        return hmac.digest(self._key, text, "sha256")

    def _check(self, authorization: str, digest: bytes) -> str | None:
        """The name of credentials that are met for the first time, if they are right."""
        given = _read_credentials(authorization)
        if given is None:
            return None
        name, password = given
        known = self._hashes.get(name)
        # An unknown name takes as long as a known one.
        is_right = self._is_password(password, known or next(iter(self._hashes.values())))
        if known is None or not is_right:
            if len(self._wrong) >= _MAX_WRONG:
                self._wrong.pop(next(iter(self._wrong)), None)
            self._wrong[digest] = self._digest(name.encode())
            return None
        if len(self._right) >= _MAX_REMEMBERED:
            self._right.clear()
        self._right[digest] = name
        return name

    def _is_password(self, password: bytes, known: bytes) -> bool:
        import bcrypt  # noqa: PLC0415 -- a client needs none

        wait_ns = self._check_time.find_wait_ns()
        if wait_ns:
            self._count_refused["unchecked"](1)
            message = "too many new credentials at once; push again"
            raise RetryableError(message, retry_after_ns=wait_ns)
        before_ns = time.thread_time_ns()
        is_right = bcrypt.checkpw(password, known)
        self._check_time.spend(time.thread_time_ns() - before_ns)
        return is_right

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
            self._take_hashes(_read_hashes([*rest, inline]))
        self._read = texts

    def _take_hashes(self, hashes: dict[str, bytes]) -> None:
        """Passwords from now on; what was found of names whose hash is another is forgotten."""
        before, self._hashes = self._hashes, hashes
        names = before.keys() | hashes.keys()
        changed = {name for name in names if before.get(name) != hashes.get(name)}
        digests = {self._digest(name.encode()) for name in changed}
        self._right = {key: name for key, name in self._right.items() if name not in changed}
        self._wrong = {key: name for key, name in self._wrong.items() if name not in digests}


def _read_credentials(authorization: str) -> tuple[str, bytes] | None:
    """Name and password; None where none can be."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        name, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return None
    text = password.encode()
    if scheme.lower() != "basic" or not colon or len(text) > _MAX_PASSWORD_BYTES:
        return None
    return name, text


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
