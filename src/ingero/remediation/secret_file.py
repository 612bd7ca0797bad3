"""Keys in files that only their owner may read."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Final

from ingero.config.environment import allows_loose_tokens
from ingero.errors import ConfigError

MIN_SECRET_BYTES: Final = 24
"""Source: Standard Webhooks 1.0, "Signature scheme"."""
_PREFIX: Final = "whsec_"


def read_secret_text(file: str, option: str) -> str:
    """What a file says that only its owner may read.

    Args:
        file: Where.
        option: The policy's key that names it, for errors.

    Raises:
        ConfigError: It cannot be read or says nothing, or others may read it and the environment does not permit that.
    """
    path = Path(file)
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {file} is not ASCII text") from error
    if mode & 0o077 and not allows_loose_tokens():
        raise ConfigError(f"{option} {file} may be read by others", hint=f"chmod 600 {file}")
    if not text:
        raise ConfigError(f"{option} {file} is empty")
    return text


def read_secret(file: str, option: str) -> bytes:
    """The key in a file: ``whsec_`` and base64, or base64 alone.

    Args:
        file: Where.
        option: The policy's key that names it, for errors.

    Raises:
        ConfigError: It cannot be read, others may read it and the environment does not permit that, or it is too short.
    """
    text = read_secret_text(file, option)
    try:
        secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise ConfigError(
            f"{option} {file} is not base64", hint="head -c 32 /dev/urandom | base64"
        ) from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"{option} {file} is shorter than {MIN_SECRET_BYTES} bytes")
    return secret
