"""What may stand in a header of HTTP or in metadata of gRPC. No message quotes a value: it may be a secret."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ingero.errors import BadDataError

_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110 §5.6.2, token


def is_header_name(text: str) -> bool:
    """Whether it may name a header."""
    return _NAME.fullmatch(text) is not None


def clean_header_value(text: str) -> str:
    """Text without the white space around it, such as the line end of a file.

    Raises:
        ValueError: It holds what no header may: a line end, another control character, or one beyond ASCII.
    """
    value = text.strip()
    if not (value.isascii() and value.isprintable()):
        raise ValueError("is not printable ASCII, so it cannot stand in a header")
    return value


def read_bearer(file: Path) -> str:
    """The bearer token in a file. Raises BadDataError that names the file when there is none that can be sent."""
    try:
        token = clean_header_value(file.read_text("utf-8"))
    except OSError as error:
        reason = f"the bearer token cannot be read: {file}: {error.strerror or error}"
        raise BadDataError(reason) from error
    except ValueError as error:  # also of the decoder
        raise BadDataError(f"{file}: the bearer token is not printable ASCII") from error
    if not token:
        raise BadDataError(f"{file} holds no bearer token")
    return token


def clean_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Headers as they can be sent. Raises BadDataError that names the one that cannot."""
    cleaned = {}
    for name, value in headers.items():
        if not is_header_name(name):
            raise BadDataError(f"{name!r} cannot name a header")
        try:
            cleaned[name] = clean_header_value(value)
        except ValueError as error:
            raise BadDataError(f"header {name}: the value {error}") from error
    return cleaned
