"""The bearers file: who may read and write which clusters.

A YAML or JSON list; every problem is reported with its line, and one problem refuses the file, because half a list of
bearers is a list nobody wrote.

    - key_name: team-a
      token: 4f0c…
      allowed_clusters: [train-1, train-2]
    - key_name: operator
      token: 9a1b…
      allowed_clusters: ["*"]
      grace: 0s                     # when it leaves this file it is refused at once
    - key_name: agents
      token: c3d2…
      allowed_clusters: [train-1]
      scopes: [write]               # of read and write; both without it
      expires: 2027-01-01T00:00:00Z # refused from then on
      rows_per_second: 20000        # what it may write, with a burst of ten seconds
      bytes_per_second: 8MiB        # of bodies as they arrive
      max_series: 200000            # different ones in a day
      max_stored_bytes: 50GiB       # of values that its clusters may have stored
    - key_name: fleet-1
      certificate: fleet-1.site.example  # instead of a token: a name in the certificate that the client shows
      allowed_clusters: [train-1]
    - key_name: lost-laptop
      token: 77e0…
      revoked: true                 # refused from the next reload on, whatever grace there was
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Final

import yaml
from typing_extensions import override

from ingero.config.environment import LOOSE_TOKENS
from ingero.errors import ConfigError, ConfigProblem
from ingero.units import NS_PER_S, parse_duration, parse_size

MAX_BYTES: Final = 4 << 20
MIN_TOKEN_CHARS: Final = 16
"""``openssl rand -hex 32`` makes 64; what is shorter than this can be guessed."""
SCOPES: Final = frozenset({"read", "write"})
_KEYS: Final = (
    *(
        "key_name",
        "token",
        "certificate",
        "allowed_clusters",
        "scopes",
        "expires",
        "rows_per_second",
    ),
    *("bytes_per_second", "max_series", "max_stored_bytes", "grace", "revoked"),
)
_QUOTAS: Final = ("rows_per_second", "bytes_per_second", "max_series", "max_stored_bytes")
"""Keys of `WriteQuota`, in its order."""
_ANYBODY_WRITES: Final = 0o022
_OTHERS: Final = 0o007
_CLUSTER: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_ALL: Final = "*"


@dataclass(frozen=True, slots=True)
class WriteQuota:
    """What a bearer may write; None is no limit.

    Attributes:
        rows_per_second: Rows that are kept, in the mean.
        bytes_per_second: Bytes of bodies as they arrive, compressed or not, in the mean.
        max_series: Different series of metrics in about a day.
        max_stored_bytes: Bytes of values, not compressed, that the bearer's clusters may have stored.
    """

    rows_per_second: int | None = None
    bytes_per_second: int | None = None
    max_series: int | None = None
    max_stored_bytes: int | None = None


NO_QUOTA: Final = WriteQuota()


@dataclass(frozen=True, slots=True, repr=False)
class AclEntry:
    """One bearer. Prints without its token.

    Attributes:
        key_name: Its name in the audit log and nowhere else.
        token: The secret; empty where it has a certificate.
        clusters: What it may touch; None is every cluster.
        grace_ns: How long it is still taken after it left the file; None is as the server is set.
        is_revoked: It is refused, and at once where it was taken before.
        scopes: Of `SCOPES`, what it may do.
        expires_wall_ns: It is refused from then on; None is never.
        quota: What it may write.
        certificate: Name in the certificate that it shows instead of sending a token; empty where it has a token.
    """

    key_name: str
    token: str
    clusters: frozenset[str] | None
    grace_ns: int | None = None
    is_revoked: bool = False
    scopes: frozenset[str] = SCOPES
    expires_wall_ns: int | None = None
    quota: WriteQuota = NO_QUOTA
    certificate: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 of what it is known by, hexadecimal."""
        known_by = f"certificate:{self.certificate}" if self.certificate else self.token
        return sha256(known_by.encode()).hexdigest()

    @override
    def __repr__(self) -> str:
        """Name and clusters only."""
        return f"AclEntry({self.key_name!r}, clusters={self.clusters!r})"


def parse_token(text: str, source: str) -> tuple[AclEntry, ...]:
    """Read a token file: one line, one bearer, every cluster.

    Raises:
        ConfigError: It is empty, too short, or holds white space.
    """
    token = text.strip()
    if 0 < len(token) < MIN_TOKEN_CHARS:
        raise ConfigError(
            f"the token is shorter than {MIN_TOKEN_CHARS} characters",
            source=source,
            hint="openssl rand -hex 32 makes one",
        )
    if not token or any(character.isspace() for character in token):
        raise ConfigError(
            "must hold one token and nothing else",
            source=source,
            hint=f"(umask 077; openssl rand -hex 32 > {source})",
        )
    return (AclEntry("token", token, None),)


def check_token_mode(file: str, mode: int, *, allows_loose: bool) -> None:
    """Refuse a file with tokens that others may change or read; its group may read it (0640).

    Args:
        file: For messages.
        mode: Its permission bits.
        allows_loose: Others may read it all the same: Kubernetes mounts secrets as 0644 by default.

    Raises:
        ConfigError: With what repairs it.
    """
    if mode & _ANYBODY_WRITES:
        raise ConfigError(
            f"may be written by others (mode {mode & 0o777:o})",
            source=file,
            hint=f"chmod 600 {file}",
        )
    if mode & _OTHERS and not allows_loose:
        raise ConfigError(
            f"holds bearer tokens and everybody may read it (mode {mode & 0o777:o})",
            source=file,
            hint=f"chmod 600 {file}; a Kubernetes secret: defaultMode 0400, with fsGroup 0440, or "
            f"{LOOSE_TOKENS}=1 if nobody else is in the container",
        )


def find_auth_token(environ: Mapping[str, str] | None = None) -> str | None:
    """``AUTH_TOKEN``, as the existing charts pass it; None when unset or empty."""
    return (os.environ if environ is None else environ).get("AUTH_TOKEN") or None


def parse_acl(text: str, source: str, *, is_empty_all: bool = False) -> tuple[AclEntry, ...]:
    """Read a bearers file.

    Args:
        text: YAML or JSON.
        source: The file's name, for messages.
        is_empty_all: An empty ``allowed_clusters`` means all, as the existing system reads it.

    Raises:
        ConfigError: Lists every problem with its line; never shows a token.
    """
    if len(text) > MAX_BYTES:
        raise ConfigError(f"larger than {MAX_BYTES} bytes", source=source)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else None
        raise ConfigError(
            [ConfigProblem("", f"not YAML: {error.problem}", line)], source=source
        ) from None
    except (yaml.YAMLError, RecursionError):
        raise ConfigError("not YAML", source=source) from None
    if not isinstance(root, yaml.SequenceNode):
        line = root.start_mark.line + 1 if root is not None else 1
        message = "not a list of bearers; begin each entry with `- key_name: …`"
        raise ConfigError([ConfigProblem("", message, line)], source=source)
    reader = _Reader(is_empty_all=is_empty_all)
    entries = [entry for node in root.value if (entry := reader.read(node)) is not None]
    if all(entry.is_revoked for entry in entries) and not reader.problems:
        reader.problems.append(ConfigProblem("", "no bearers in the list", 1))
    if reader.problems:
        raise ConfigError(reader.problems, source=source)
    return tuple(entries)


class _Reader:
    def __init__(self, *, is_empty_all: bool) -> None:
        self.problems: list[ConfigProblem] = []
        self._is_empty_all = is_empty_all
        self._names: set[str] = set()
        self._tokens: set[str] = set()

    def read(self, node: yaml.Node) -> AclEntry | None:
        before = len(self.problems)
        if not isinstance(node, yaml.MappingNode):
            self._add_problem(
                node, "", "an entry is a mapping of key_name, token and allowed_clusters"
            )
            return None
        values = dict(self._iter_values(node))
        name = self._read_text(node, values, "key_name")
        token = certificate = ""
        if "certificate" in values:
            certificate = self._read_text(node, values, "certificate")
            if "token" in values:
                description = "stands beside a certificate; which is meant?"
                self._add_problem(values["token"], "token", description)
        else:
            token = self._read_text(node, values, "token")
        is_revoked = self._read_flag(values.get("revoked"))
        clusters: frozenset[str] | None = frozenset()
        if not is_revoked or "allowed_clusters" in values:
            clusters = self._read_clusters(node, values.get("allowed_clusters"))
        grace_ns = self._read_grace(values.get("grace"))
        scopes = self._read_scopes(values.get("scopes"))
        expires_wall_ns = self._read_time(values.get("expires"))
        quota = WriteQuota(*(self._read_amount(values, name) for name in _QUOTAS))
        self._refuse_repeats(node, name, token or certificate)
        if len(self.problems) > before:
            return None
        return AclEntry(*(
            name,
            token,
            clusters,
            grace_ns,
            is_revoked,
            scopes,
            expires_wall_ns,
            quota,
            certificate,
        ))

    def _read_scopes(self, value: yaml.Node | None) -> frozenset[str]:
        if value is None:
            return SCOPES
        nodes = value.value if isinstance(value, yaml.SequenceNode) else []
        names = {item.value for item in nodes if isinstance(item, yaml.ScalarNode)}
        if not names or not names <= SCOPES or len(names) < len(nodes):
            self._add_problem(value, "scopes", "must be a list of read, write, or both")
        return frozenset(names)

    def _read_time(self, value: yaml.Node | None) -> int | None:
        """A date, which is its first moment in UTC, or a time with its zone."""
        if value is None:
            return None
        text = value.value if isinstance(value, yaml.ScalarNode) else ""
        try:
            moment = datetime.fromisoformat(f"{text}T00:00Z" if _DATE.fullmatch(text) else text)
        except ValueError:
            self._add_problem(value, "expires", f"{text!r} is no time such as 2027-01-31T12:00:00Z")
            return None
        if moment.tzinfo is None:
            self._add_problem(value, "expires", "has no time zone; write Z behind it for UTC")
            return None
        return round(moment.timestamp()) * NS_PER_S

    def _read_amount(self, values: Mapping[str, yaml.Node], name: str) -> int | None:
        value = values.get(name)
        if value is None:
            return None
        try:
            rate = parse_size(value.value if isinstance(value, yaml.ScalarNode) else "")
        except ValueError as error:
            self._add_problem(value, name, str(error))
            return None
        if not rate:
            self._add_problem(value, name, "is 0: take write out of scopes instead")
        return rate

    def _read_flag(self, value: yaml.Node | None) -> bool:
        if value is None:
            return False
        text = value.value if isinstance(value, yaml.ScalarNode) else ""
        if text not in {"true", "false"}:
            self._add_problem(value, "revoked", "must be true or false")
        return text == "true"

    def _read_grace(self, value: yaml.Node | None) -> int | None:
        if value is None:
            return None
        try:
            return parse_duration(value.value if isinstance(value, yaml.ScalarNode) else "")
        except ValueError as error:
            self._add_problem(value, "grace", str(error))
            return None

    def _iter_values(self, node: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node]]:
        seen = set()
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name not in _KEYS:
                self._add_problem(key, name, f"unknown key; an entry has {', '.join(_KEYS)}")
            elif name in seen:
                self._add_problem(key, name, "stands twice")
            else:
                seen.add(name)
                yield name, value

    def _read_text(self, node: yaml.Node, values: dict[str, yaml.Node], name: str) -> str:
        value = values.get(name)
        if value is None:
            self._add_problem(node, name, "is missing")
            return ""
        if not isinstance(value, yaml.ScalarNode) or not value.value.strip():
            self._add_problem(value, name, "must be text")
            return ""
        text: str = value.value
        if any(character.isspace() for character in text) and name == "token":
            self._add_problem(value, name, "holds white space")
        elif name == "token" and len(text) < MIN_TOKEN_CHARS:
            self._add_problem(value, name, f"is shorter than {MIN_TOKEN_CHARS} characters")
        return text

    def _read_clusters(self, node: yaml.Node, value: yaml.Node | None) -> frozenset[str] | None:
        if value is None:
            self._add_problem(node, "allowed_clusters", 'is missing; ["*"] means every cluster')
            return frozenset()
        if not isinstance(value, yaml.SequenceNode):
            self._add_problem(
                value, "allowed_clusters", 'must be a list; ["*"] means every cluster'
            )
            return frozenset()
        if not value.value and not self._is_empty_all:
            self._add_problem(value, "allowed_clusters", 'is empty; ["*"] means every cluster')
            return frozenset()
        names = []
        for item in value.value:
            text = item.value if isinstance(item, yaml.ScalarNode) else ""
            if text != _ALL and _CLUSTER.fullmatch(text) is None:
                self._add_problem(
                    item, "allowed_clusters", f"{text!r} is no cluster id: {_CLUSTER.pattern}"
                )
            names.append(text)
        if _ALL in names and len(names) > 1:
            self._add_problem(
                value, "allowed_clusters", '"*" stands with other names; which is meant?'
            )
        return None if not names or names == [_ALL] else frozenset(names)

    def _refuse_repeats(self, node: yaml.Node, name: str, token: str) -> None:
        if name and name in self._names:
            self._add_problem(node, "key_name", f"{name!r} stands twice")
        if token and token in self._tokens:
            self._add_problem(node, "token", "is another entry's token too")
        self._names.add(name)
        self._tokens.add(token)

    def _add_problem(self, node: yaml.Node, path: str, message: str) -> None:
        self.problems.append(ConfigProblem(path, message, node.start_mark.line + 1))
