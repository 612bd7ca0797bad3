"""Addresses as a policy has them."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from ingero.config.types import Endpoint


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("should be http://HOST:PORT or https://HOST:PORT")
    if parts.query or parts.fragment:
        raise ValueError("should have no query")
    return url.rstrip("/")


def _check_safe_url(url: str) -> str:
    parts = urlsplit(_check_url(url))
    if parts.scheme != "https" and not Endpoint(parts.hostname or "", 0).is_loopback:
        raise ValueError("should be https: what it is sent takes nodes out of service")
    return url.rstrip("/")


Url = Annotated[str, AfterValidator(_check_url)]
SafeUrl = Annotated[str, AfterValidator(_check_safe_url)]
"""``https``, or ``http`` on loopback."""
