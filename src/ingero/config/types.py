"""The kinds of value that a configuration has beside numbers and text: durations, sizes, addresses, secrets.

Code receives integers in nanoseconds or bytes; people write ``5s`` and ``64MiB``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    SecretStr,
)
from pydantic_core import CoreSchema, core_schema
from typing_extensions import override

from ingero.header_values import clean_header_value, is_header_name
from ingero.units import NS_PER_MS, NS_PER_S, NS_PER_US, parse_duration, parse_size

_DURATION_UNITS: Final = (
    ("h", 3600 * NS_PER_S),
    ("m", 60 * NS_PER_S),
    ("s", NS_PER_S),
    ("ms", NS_PER_MS),
    ("us", NS_PER_US),
    ("ns", 1),
)
_SIZE_UNITS: Final = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_ENDPOINT: Final = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.%]+)\]|(?P<host>[^:\[\]\s/]*)):(?P<port>\d{1,5})"
)

Secret = SecretStr
"""Text that prints as stars; read it with ``get_secret_value()`` where it is used and nowhere else."""


def _clean_secret(secret: SecretStr) -> SecretStr:
    return SecretStr(clean_header_value(secret.get_secret_value()))


def _check_header_name(name: str) -> str:
    if not is_header_name(name):
        raise ValueError("cannot name a header")
    return name


HeaderSecret = Annotated[SecretStr, AfterValidator(_clean_secret)]
"""The same for a header: without the white space around it; what cannot stand in one is refused, and not shown."""
HeaderName = Annotated[str, AfterValidator(_check_header_name)]
"""Text that can name a header."""


def write_duration(duration_ns: int) -> str:
    """Write nanoseconds as `ingero.units.parse_duration` reads them, exactly: ``"1m30s"``, ``"0s"``."""
    text, rest = "", duration_ns
    for unit, size in _DURATION_UNITS:
        count, rest = divmod(rest, size)
        text += f"{count}{unit}" if count else ""
    return text or "0s"


def write_size(n_bytes: int) -> str:
    """Write bytes in the largest binary unit that divides them: ``"64MiB"``, ``"1000"``."""
    for unit, size in _SIZE_UNITS:
        if n_bytes and n_bytes % size == 0:
            return f"{n_bytes // size}{unit}"
    return str(n_bytes)


def _read_duration(value: object) -> object:
    if isinstance(value, str):
        return parse_duration(value)
    if isinstance(value, int) and not isinstance(value, bool) and value != 0:
        raise ValueError(f"a duration needs a unit: write {value}s or {value}ms")
    return value


def _read_size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


_MAX_INT64: Final = 2**63 - 1
"""What is counted in 64 bits with a sign, as times and sizes are everywhere."""

Duration = Annotated[
    int,
    Field(ge=0, le=_MAX_INT64),
    BeforeValidator(_read_duration, json_schema_input_type=str),
    PlainSerializer(write_duration, when_used="json"),
]
"""Nanoseconds in code, ``500ms`` or ``1m30s`` in the file. Defaults are made with `ingero.units.parse_duration`."""

Size = Annotated[
    int,
    Field(ge=0, le=_MAX_INT64),
    BeforeValidator(_read_size, json_schema_input_type=int | str),
    PlainSerializer(write_size, when_used="json"),
]
"""Bytes in code, ``64MiB``, ``10GB`` or ``4096`` in the file."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A ``host:port`` to listen on or to call.

    Attributes:
        host: Name or address, without the brackets of IPv6; empty listens on every interface.
        port: 0 lets the kernel choose.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Read ``host:port``, ``:port`` or ``[v6]:port``.

        Raises:
            ValueError: It is none of these; the message shows one.
        """
        match = _ENDPOINT.fullmatch(text.strip())
        if match is None or int(match["port"]) > 65_535:
            raise ValueError(
                f"{text!r} is not host:port; write 0.0.0.0:4317, localhost:4317 or [::1]:4317"
            )
        return cls(match["v6"] or match["host"] or "", int(match["port"]))

    @property
    def is_loopback(self) -> bool:
        """True when only this machine can reach it, as far as the text tells."""
        return self.host in {"localhost", "::1"} or self.host.startswith("127.")

    @override
    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[Any], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Let a model use it as a field: text in, text out."""
        from_text = core_schema.no_info_after_validator_function(
            cls.parse, core_schema.str_schema()
        )
        return core_schema.json_or_python_schema(
            json_schema=from_text,
            python_schema=core_schema.union_schema(
                [core_schema.is_instance_schema(cls), from_text], mode="left_to_right"
            ),
            serialization=core_schema.to_string_ser_schema(),
        )
